"""Where the batch is in every value, and whether it may be split into microbatches.

The batch is the leading factor of dim 0 of the model's inputs. It is followed through the graph
with the operators' own strategies, as if a virtual mesh axis sharded it. Every operator must shard
the batch's name or be linear in a partial sum. The loss must end Partial, a sum over microbatches.
If that fails, the loss is not a sum over rows, and splitting the batch would change its meaning.

Some values depend on no batched input: a mask of ones, token types made for all rows, a class token
expanded to all rows. Such a value has rows only if an operator combines it with the batch. That
operator *asks* for its rows (`_BatchWalk.forward`), and the producer asks its own inputs
(`_BatchWalk.backward`). The chain ends at a constant, which is delivered by rows, or at an operator
that creates the rows. Requests are never withdrawn; both passes repeat until there is no new one.
The last pass then has a strategy of every operator for the final placements of all its tensors. So
if one operator needs a value by rows and another needs it whole, the batch is broken; the sum is
never wrong.

Microbatches run one after the other. So the batch is also broken by an operator that exchanges
values between parts of the batch (statistics of a batch norm), by a buffer that changes from rows,
and by a changing buffer that the loss depends on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autopar.errors import BatchError, NotSupportedError
from autopar.passes.analysis.groups import PlacedOperator, place_operators
from autopar.placement import P, Placement, R, S
from autopar.program.graph import Operator, Program, Types, operators_of, row_dims, tensor_types
from autopar.rules import AxisStrategy


@dataclass(frozen=True)
class Batch:
    """Where the batch is.

    size           rows of the global batch; 0 if no input has a batch
    cells          value -> its batch factor (dim, factor), for the values that have one
    broken_at      the operator at which the batch breaks; then only one microbatch is exact.
                   None: the loss is a sum over rows
    n_accumulated  number of microbatches, if the program is one of them (`Program.accumulation`)
    """

    size: int
    cells: Mapping[str, tuple[int, int]]
    broken_at: str | None
    n_accumulated: int = 1

    @property
    def n_samples(self) -> int:
        """Rows of all microbatches of a step."""
        return self.size * self.n_accumulated

    def n_splits(self, n_microbatches: int) -> int:
        """The number of parts into which that many microbatches split the rows of the graph."""
        return n_microbatches // self.n_accumulated

    def check_divides(self, n_microbatches: int, where: str = "") -> None:
        if self.n_accumulated > 1:
            if n_microbatches != self.n_accumulated:
                raise BatchError(
                    f"the program is one of {self.n_accumulated} microbatches, not of "
                    f"{n_microbatches}",
                    where=where or None,
                )
            return
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
    items: Sequence[PlacedOperator],
    types: Types,
    batch_dims: Mapping[str, int | None] | None = None,
) -> Batch:
    """Follow the batch through the operators (`place_operators`), from the inputs to the loss.

    `batch_dims` maps input path -> its batch dim, or None if it has no batch. By default the batch
    is dim 0 of every input that is as long there as the first input.
    """
    seeds, size = _seed_inputs(program, types, batch_dims or {})
    open_values = _open_values(program, items, seeds)
    # Equal operators share one tuple of strategies.
    distinct = {id(item.strategies): item for item in items}
    split = {key: _split(item) for key, item in distinct.items()}
    plain = {key: tuple(s for s in kept if s.lowering is None) for key, kept in split.items()}
    every = [_Followed(item.operator, split[id(item.strategies)]) for item in items]
    # Microbatches cannot exchange values: strategies without a lowering.
    alone = [_Followed(item.operator, plain[id(item.strategies)]) for item in items]
    placed, stuck = _BatchWalk(seeds, open_values).run(alone)
    broken: str | None = None if size else "the inputs, which have no batch dim"
    if stuck is not None:
        broken = broken or program.where(stuck)
    if program.loss is not None and placed.get(program.loss) != P:
        broken = broken or program.where(program.loss)
    broken = broken or _row_dependent_buffer(program, placed)
    if broken is not None:  # ranks, unlike microbatches, may exchange values (batch norm)
        placed, _ = _BatchWalk(seeds, open_values).run(every)
    cells = {name: p.cell for name, p in placed.items() if p.is_shard}
    accumulation = program.accumulation
    return Batch(size, cells, broken, accumulation.n if accumulation else 1)


def batch_of(program: Program, batch_dims: Mapping[str, int | None] | None = None) -> Batch:
    """The batch of a program that has no `Analysis`."""
    operators = operators_of(program)
    types = tensor_types(program, operators, batch_dims)
    return find_batch(program, place_operators(operators, types.tensors), types, batch_dims)


def _seed_inputs(
    program: Program, types: Types, batch_dims: Mapping[str, int | None]
) -> tuple[dict[str, Placement], int]:
    """The placement of every input, and the size of the batch."""
    dims, size = row_dims({i.path: i.shape for i in program.inputs.values()}, batch_dims)
    seeds: dict[str, Placement] = {}
    for name, info in program.inputs.items():
        dim = dims.get(info.path)
        has_rows = dim is not None and types.tensors[name].dims[dim]
        seeds[name] = S(dim) if dim is not None and has_rows else R
    return seeds, size


def _row_dependent_buffer(program: Program, placed: Mapping[str, Placement]) -> str | None:
    """The buffer that every microbatch would see or leave different, if there is one."""
    seen_by_loss: set[str] = set()
    stack = [program.node(program.loss)] if program.loss is not None else []
    while stack:
        node = stack.pop()
        if node.name not in seen_by_loss:
            seen_by_loss.add(node.name)
            stack.extend(node.all_input_nodes)
    for placeholder, info in program.buffers.items():
        if info.update is None:
            continue
        if placeholder in seen_by_loss or placed.get(info.update, R) != R:
            return f"buffer `{info.name}`, changed at {program.where(info.update)}"
    return None


def _open_values(
    program: Program, items: Sequence[PlacedOperator], seeds: Mapping[str, Placement]
) -> frozenset[str]:
    """Constants, and values computed without any batched input.

    Parameters and unbatched inputs are not among them: their rows are fixed and cannot be asked
    for.
    """
    found = set(program.constants)
    reached = {name for name, placement in seeds.items() if placement.is_shard}
    for operator in (item.operator for item in items):
        (found if reached.isdisjoint(operator.inputs) else reached).update(operator.outputs)
    return frozenset(found)


def _split(placed: PlacedOperator) -> tuple[AxisStrategy, ...]:
    """The strategies under which microbatches do different work: not all outputs are I."""
    return tuple(
        strategy
        for strategy in placed.strategies
        if not strategy.outputs or any(p.kind != "I" for p in strategy.outputs)
    )


@dataclass(frozen=True)
class _Followed:
    """An operator and how the batch may pass through it."""

    operator: Operator
    strategies: tuple[AxisStrategy, ...]


@dataclass
class _BatchWalk:
    """Passes over the graph; they share the requests for rows.

    seeds    placements of the inputs
    open     values that may be asked for rows
    asked    values that were asked, and where their rows are
    """

    seeds: Mapping[str, Placement]
    open: frozenset[str]
    asked: dict[str, Placement] = field(default_factory=dict)

    def run(self, followed: Sequence[_Followed]) -> tuple[dict[str, Placement], str | None]:
        """Repeat both passes until there is no new request; the results of the last `forward`."""
        while True:
            n_asked = len(self.asked)
            placed, stuck = self.forward(followed)
            self.backward(followed)
            if len(self.asked) == n_asked:
                return placed, stuck

    def forward(self, followed: Sequence[_Followed]) -> tuple[dict[str, Placement], str | None]:
        """Placements of all values, and the first operator without a strategy for its inputs."""
        placed = {**self.seeds, **self.asked}
        stuck: str | None = None
        for item in followed:
            operator, strategy = item.operator, self._strategy(item, placed)
            if strategy is None:
                stuck = stuck or operator.name
                placed.update((name, R) for name in operator.outputs)
                continue
            placed.update(self._ask(operator, strategy))
            placed.update(zip(operator.outputs, strategy.outputs, strict=True))
        return placed, stuck

    def backward(self, followed: Sequence[_Followed]) -> None:
        """Pass requests on from computed values to what they are computed from."""
        for item in reversed(followed):
            if not self.asked.keys().isdisjoint(item.operator.outputs):
                strategy = self._strategy(item, self.asked)
                if strategy is not None:
                    self._ask(item.operator, strategy)

    def _ask(self, operator: Operator, strategy: AxisStrategy) -> dict[str, Placement]:
        """Ask for the rows of open inputs; returns those inputs' placements."""
        rows = {
            name: placement
            for name, placement in zip(operator.inputs, strategy.inputs, strict=True)
            if name in self.open and placement.is_shard
        }
        self.asked.update(rows)
        return rows

    def _strategy(self, item: _Followed, placed: Mapping[str, Placement]) -> AxisStrategy | None:
        """The first strategy that fits the inputs' placements and the outputs' requests.

        Open inputs that were not asked yet fit any shard.
        """
        given = [(n, placed.get(n, R)) for n in item.operator.inputs]
        has_rows = any(p != R for _, p in given)
        has_rows = has_rows or any(n in self.asked for n in item.operator.outputs)
        for strategy in item.strategies:
            if not has_rows and any(p.is_shard for p in (*strategy.inputs, *strategy.outputs)):
                continue  # nothing here has rows, so none may be sharded
            takes = all(
                wanted == p or (wanted.is_shard and n in self.open and n not in self.asked)
                for (n, p), wanted in zip(given, strategy.inputs, strict=True)
            )
            if takes and all(
                self.asked.get(n, p) == p
                for n, p in zip(item.operator.outputs, strategy.outputs, strict=True)
            ):
                return strategy
        return None
