"""Microbatching: one more split of the batch, before any mesh axis.

The batch is the leading factor of dim 0 of the model's inputs. It is followed through the
graph with the operators' own strategies, as if a virtual mesh axis split it everywhere:
every operator shards the batch's label, or is linear in a partial sum; the loss must end
Partial (a sum over microbatches). Where that fails the loss is no sum over rows, and
splitting the batch would change its meaning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.errors import BatchError, NotSupportedError
from autopar.factors import Operator, Types, name_sizes
from autopar.program import Program
from autopar.rules import rule_for
from autopar.rules.pattern import AxisStrategy, axis_strategies, resolve
from autopar.spec import P, Placement, R, S


@dataclass(frozen=True)
class Batch:
    """Where the batch sits: (dim, factor) of every value that carries it.

    size          rows of the global batch; 0 when no input has a batch
    cells         value name -> its batch factor
    broken_at     operator at which the batch stops being one (None: the loss is a sum over
                  rows); then only one microbatch is exact
    """

    size: int
    cells: Mapping[str, tuple[int, int]]
    broken_at: str | None

    def check_divides(self, n_microbatches: int, where: str = "") -> None:
        if self.size % n_microbatches:
            raise BatchError(
                f"a batch of {self.size} rows does not divide into {n_microbatches} microbatches",
                where=where or None,
                hint="choose microbatches that divide the batch, or drop_last=True in the loader",
            )
        if n_microbatches > 1 and self.broken_at is not None:
            raise NotSupportedError(
                f"microbatches={n_microbatches}: the loss is not a sum or mean over rows",
                where=self.broken_at,
                hint="use microbatches=1 for this model",
            )


def find_batch(
    program: Program,
    operators: Sequence[Operator],
    types: Types,
    batch_dims: Mapping[str, int | None] | None = None,
) -> Batch:
    """Follow the batch from the inputs to the loss.

    `batch_dims` maps input paths to the dim that is the batch (None: has no batch); by
    default it is dim 0 of every input as long as the first one.
    """
    placed: dict[str, Placement] = {}
    size = _seed_inputs(program, types, batch_dims or {}, placed)
    broken: str | None = None if size else "the inputs, which have no batch dim"
    fixed = set(program.parameters) | set(placed)
    for operator in operators:
        strategy = _following(operator, types, placed, fixed)
        if strategy is None:
            broken = broken or program.where(operator.name)
            strategy = AxisStrategy((R,) * len(operator.inputs), (R,) * len(operator.outputs))
        for name, placement in zip(operator.inputs, strategy.inputs, strict=True):
            if name not in fixed and placement.is_shard:  # a constant takes what is asked
                placed[name] = placement
                fixed.add(name)
        for name, placement in zip(operator.outputs, strategy.outputs, strict=True):
            placed[name] = placement
            fixed.add(name)
    if program.loss is not None and placed.get(program.loss) != P:
        broken = broken or program.where(program.loss)
    cells = {name: p.cell for name, p in placed.items() if p.is_shard}
    return Batch(size, cells, broken)


def _seed_inputs(
    program: Program,
    types: Types,
    batch_dims: Mapping[str, int | None],
    placed: dict[str, Placement],
) -> int:
    """Place the batch of every input; returns its size."""
    size = 0
    for name, info in program.inputs.items():
        dim = batch_dims.get(info.path, 0 if info.shape else None)
        if dim is None:
            placed[name] = R
            continue
        size = size or info.shape[dim]
        same = info.shape[dim] == size and size > 1
        placed[name] = S(dim) if same and types.tensors[name].dims[dim] else R
    return size


def _following(
    operator: Operator, types: Types, placed: Mapping[str, Placement], fixed: set[str]
) -> AxisStrategy | None:
    """The strategy that takes the inputs as they are placed; None when there is none."""
    rule = rule_for(str(operator.call.op))
    inputs = [types.tensors[n] for n in operator.inputs]
    outputs = [types.tensors[n] for n in operator.outputs]
    sizes = name_sizes(operator.notation, operator.call.inputs, operator.call.outputs)
    pattern = resolve(operator.notation, inputs, outputs, sizes)
    grads = [t.has_grad for t in inputs], [t.has_grad for t in outputs]
    wanted = [placed.get(n, R) for n in operator.inputs]
    free = [n not in fixed for n in operator.inputs]
    for strategy in axis_strategies(rule, operator.call, pattern, *grads):
        if all(
            given == asked or (loose and asked.is_shard)
            for given, asked, loose in zip(wanted, strategy.inputs, free, strict=True)
        ) and (any(p != R for p in wanted) or not any(p.is_shard for p in strategy.inputs)):
            if any(p.is_shard for p in strategy.outputs) and all(p == R for p in wanted):
                continue  # nothing carries the batch here: do not invent one
            if all(p.kind == "I" for p in strategy.outputs) and strategy.outputs:
                continue
            return strategy
    return None
