"""The oracle of sharding rules: does an operator on shards do what its rule claims?

A strategy gives each input and output of an operator a placement per mesh axis. Let x be the
whole inputs, y = f(x), and g a gradient of y. The claim is checked against the definition of the
placements, in float64. Ranks that communicate are threads of this process.

    x_r = scatter(x)     R, I: x on every rank; S: a piece; P: random summands of x
    y_r = f_r(x_r)       f with localised arguments, or the function that replaces it
    gather(y_r) = y      R, I: equal on every rank; S: joined; P: summed           (`gather`)
    g_r = scatter(g)     with the placements of gradients: R -> P, P -> R, I -> I, S -> S
    gather(dx_r) = dx    with the placements of the inputs' gradients

`check_strategy` checks one strategy; `report.py` checks all strategies of one call. Both
sides must agree to 1e-12 of the largest element (`TOLERANCE`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.errors import AutoparError, VerificationError
from autopar.mesh import LogicalMesh
from autopar.placement import (
    Spec,
    TensorType,
    difference,
    gather,
    gradient_spec,
    illegal_reason,
    local_shape,
    scatter,
)
from autopar.program.graph import Atom, Factors, leaves, name_sizes, unify
from autopar.rules import (
    FOLDED,
    GROUP,
    AxisStrategy,
    Lowering,
    OpCall,
    OpRule,
    Pattern,
    axis_strategies,
    check_call,
    resolve,
)
from autopar.runtime import lowered
from autopar.runtime.groups import Group
from autopar.runtime.launch import ThreadWorld, run_threads

TOLERANCE = 1e-12  # of the largest element; float64 sums of a few hundred terms stay below it
MESHES: tuple[tuple[int, ...], ...] = ((2,), (4,), (2, 2))  # meshes on which a rule is checked


@dataclass(frozen=True)
class OracleCase:
    """One call of an operator on whole tensors: its types, its results, its gradients.

    seeds        upstream gradients of the outputs, None for outputs without gradient
    gradients    the resulting gradients of the inputs, None for inputs without gradient
    """

    rule: OpRule
    call: OpCall
    pattern: Pattern
    inputs: tuple[TensorType, ...]
    outputs: tuple[TensorType, ...]
    results: tuple[Tensor, ...]
    seeds: tuple[Tensor | None, ...]
    gradients: tuple[Tensor | None, ...]

    @staticmethod
    def of(
        rule: OpRule,
        op: torch._ops.OpOverload,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None = None,
        refine: bool = False,
    ) -> OracleCase:
        """Run the operator on whole tensors.

        refine    split every even factor in two, as another operator in the graph might, so
                  that strided shards are checked too
        """
        with torch.no_grad():
            call = OpCall.of(op, args, kwargs or {}, op(*args, **(kwargs or {})))
        check_call(rule, call)
        tensors = [_leaf(t) for t in call.tensors]
        results = _run(call, tensors, {})
        random = torch.Generator().manual_seed(len(results))
        seeds = tuple(
            torch.randn(y.shape, generator=random, dtype=y.dtype) if y.requires_grad else None
            for y in results
        )
        notation = rule.notation_of(call)
        sizes = name_sizes(notation, call.inputs, call.outputs)
        dims = _factors(rule, call, refine)
        types = [
            TensorType(d, t.element_size(), t.requires_grad)
            for d, t in zip(dims, (*tensors, *results), strict=True)
        ]
        inputs, outputs = types[: len(tensors)], types[len(tensors) :]
        return OracleCase(
            rule,
            call,
            resolve(notation, inputs, outputs, sizes),
            tuple(inputs),
            tuple(outputs),
            tuple(y.detach() for y in results),
            seeds,
            _true_gradients(rule, results, tensors, seeds),
        )

    def strategies(self) -> tuple[AxisStrategy, ...]:
        """The strategies that the rule allows on one axis."""
        grads = [[t.has_grad for t in types] for types in (self.inputs, self.outputs)]
        return axis_strategies(self.rule, self.call, self.pattern, *grads)

    def specs(self, strategies: Sequence[AxisStrategy]) -> tuple[list[Spec], list[Spec]]:
        """The specs of inputs and of outputs under one strategy per axis; axis 0 is outermost."""
        inputs = zip(*(s.inputs for s in strategies), strict=True)
        outputs = zip(*(s.outputs for s in strategies), strict=True)
        return [Spec(p) for p in inputs], [Spec(p) for p in outputs]

    def fits(self, strategies: Sequence[AxisStrategy], sizes: Sequence[int]) -> bool:
        """Do all sharded factors divide, and does at most one function replace the operator?"""
        if len({id(s.lowering) for s in strategies if s.lowering}) > 1:
            return False
        inputs, outputs = self.specs(strategies)
        placed = zip((*self.inputs, *self.outputs), (*inputs, *outputs), strict=True)
        return all(illegal_reason(t, spec, sizes) is None for t, spec in placed)


def _leaf(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_(x.requires_grad)


def _factors(rule: OpRule, call: OpCall, refine: bool) -> list[tuple[tuple[int, ...], ...]]:
    """Factor sizes of every input and output, as in a graph with only this operator."""
    factors = Factors()
    inputs = [f"in{i}" for i in range(len(call.inputs))]
    outputs = [f"out{i}" for i in range(len(call.outputs))]
    for name, shape in zip((*inputs, *outputs), (*call.inputs, *call.outputs), strict=True):
        factors.add(name, shape)
    factors.join(rule.notation_of(call), inputs, outputs)
    if refine:
        whole = {
            id(leaf): leaf
            for atoms in factors.atoms.values()
            for atom in atoms
            if atom is not None
            for leaf in leaves(atom)
        }
        for leaf in whole.values():
            if leaf.size > 2 and leaf.size % 2 == 0:
                unify([leaf], [Atom(2), Atom(leaf.size // 2)])
    return [factors.sizes(name) for name in (*inputs, *outputs)]


def _substituted(call: OpCall, tensors: Sequence[Tensor]) -> dict[str, Any]:
    """The arguments of a call by name, with `tensors` in place of its own."""
    rest = iter(tensors)

    def substituted(value: Any) -> Any:
        if isinstance(value, Tensor):
            return next(rest)
        return [substituted(v) for v in value] if isinstance(value, (list, tuple)) else value

    return {name: substituted(value) for name, value in call.args.items()}


def _run(call: OpCall, tensors: Sequence[Tensor], changed: Mapping[str, Any]) -> list[Tensor]:
    """Run the operator on other tensors, with some arguments changed; results as a list."""
    values = _substituted(call, tensors) | dict(changed)
    by_name = [a.name for a in call.op._schema.arguments if a.kwarg_only]
    keywords = {name: values.pop(name) for name in by_name}
    out = call.op(*values.values(), **keywords)
    return list(out) if isinstance(out, (list, tuple)) else [out]


def _run_lowered(
    call: OpCall, lowering: Lowering, tensors: Sequence[Tensor], group: Group | None
) -> list[Tensor]:
    """Run the function that replaces the operator on other tensors; results as a list."""
    values = _substituted(call, tensors) | {GROUP: group, FOLDED: False}
    out = getattr(lowered, lowering.function)(*(values[name] for name in lowering.arguments))
    return list(out) if isinstance(out, (list, tuple)) else [out]


def _gradients(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], seeds: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Gradients of the inputs that require grad; zeros if no output depends on an input."""
    differentiated = [x for x in inputs if x.requires_grad]
    roots = [(y, g) for y, g in zip(outputs, seeds, strict=True) if g is not None]
    found: Sequence[Tensor | None] = [None] * len(differentiated)
    if roots and differentiated:
        ys, gs = zip(*roots, strict=True)
        found = torch.autograd.grad(ys, differentiated, gs, allow_unused=True)
    rest = iter(found)
    gradients: list[Tensor | None] = [None] * len(inputs)
    for i, x in enumerate(inputs):
        if x.requires_grad:
            gradient = next(rest)
            gradients[i] = torch.zeros_like(x) if gradient is None else gradient
    return gradients


def _true_gradients(
    rule: OpRule, results: Sequence[Tensor], tensors: Sequence[Tensor],
    seeds: Sequence[Tensor | None],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    try:
        return tuple(_gradients(results, tensors, seeds))
    except RuntimeError as error:
        raise VerificationError(
            f"{rule.op} has no gradient: {str(error).partition('. ')[0]}",
            hint="register one with torch.library.register_autograd, or check under torch.no_grad",
        ) from error


@dataclass(frozen=True)
class StrategyErrors:
    """The largest errors of one strategy, relative to the largest element."""

    value: float = 0.0
    gradient: float = 0.0


def check_strategy(
    case: OracleCase, strategies: Sequence[AxisStrategy], sizes: Sequence[int], seed: int = 0
) -> StrategyErrors:
    """Compare one strategy per axis of a mesh of `sizes` with the unsharded operator.

    Raises `VerificationError` that names the fault: an output, a gradient, a local shape, or the
    error that the operator raised on shards.
    """
    input_specs, output_specs = case.specs(strategies)
    gradient_specs = [gradient_spec(s) for s in input_specs]
    try:
        outputs, gradients = _run_ranks(case, strategies, sizes, seed)
        return StrategyErrors(
            _worst("output", case.results, outputs, case.outputs, output_specs, sizes),
            _worst(
                "gradient of input", case.gradients, gradients, case.inputs, gradient_specs, sizes
            ),
        )
    except (AutoparError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        shown = " | ".join(map(str, strategies))
        raise VerificationError(
            f"{case.rule.op}: {error}", where=f"{shown} on a mesh of {tuple(sizes)}"
        ) from error


PerRank = list[list[Tensor | None]]  # [tensor][rank]


def _run_ranks(
    case: OracleCase, strategies: Sequence[AxisStrategy], sizes: Sequence[int], seed: int
) -> tuple[PerRank, PerRank]:
    """Run every rank: the outputs and the gradients of the inputs, each by rank."""
    random = torch.Generator().manual_seed(seed)
    input_specs, output_specs = case.specs(strategies)
    pieces = [
        scatter(x.detach(), t, spec, sizes, random)
        for x, t, spec in zip(case.call.tensors, case.inputs, input_specs, strict=True)
    ]
    seeds = [
        None if g is None else scatter(g, t, gradient_spec(spec), sizes, random)
        for g, t, spec in zip(case.seeds, case.outputs, output_specs, strict=True)
    ]
    axes, local_operator = _local_operator(case, strategies, sizes)
    mesh = LogicalMesh.unpriced(sizes, [f"axis{i}" for i in range(len(sizes))])

    def on_rank(rank: int, group: Group | None) -> tuple[list[Tensor], list[Tensor | None]]:
        tensors = [
            by_rank[rank].requires_grad_(x.requires_grad)
            for by_rank, x in zip(pieces, case.call.tensors, strict=True)
        ]
        outputs = local_operator(tensors, group)
        _check_shapes(outputs, case, output_specs, sizes)
        mine = [None if g is None else g[rank] for g in seeds]
        return [y.detach() for y in outputs], _gradients(outputs, tensors, mine)

    def thread_call(world: ThreadWorld) -> tuple[list[Tensor], list[Tensor | None]]:
        return on_rank(world.rank, world.make_groups(mesh)[axes])

    # Without communication no threads are needed; they would take most of the time.
    n_ranks = math.prod(sizes)
    by_rank = (
        run_threads(thread_call, n_ranks) if axes else [on_rank(r, None) for r in range(n_ranks)]
    )
    outputs = [list(column) for column in zip(*(outs for outs, _ in by_rank), strict=True)]
    gradients = [list(column) for column in zip(*(grads for _, grads in by_rank), strict=True)]
    return outputs, gradients


def _check_shapes(
    outputs: Sequence[Tensor], case: OracleCase, specs: Sequence[Spec], sizes: Sequence[int]
) -> None:
    expected = [local_shape(t, spec, sizes) for t, spec in zip(case.outputs, specs, strict=True)]
    actual = [tuple(y.shape) for y in outputs]
    if actual != expected:
        raise VerificationError(
            f"on one rank the outputs have shapes {', '.join(map(str, actual))}, "
            f"{', '.join(map(str, specs))} means {', '.join(map(str, expected))}"
        )


def _worst(
    kind: str, expected: Sequence[Tensor | None], actual: PerRank,
    types: Sequence[TensorType], specs: Sequence[Spec], sizes: Sequence[int],
) -> float:  # fmt: skip
    """The largest error relative to the largest element of all `expected`.

    All tensors share this scale, because a tensor that is zero up to rounding (the gradient of
    a key's bias) has no scale of its own.
    """
    floats = [
        t
        for t in expected
        if t is not None and (t.is_floating_point() or t.is_complex()) and t.numel()
    ]
    scale = max((t.abs().max().item() for t in floats), default=0.0) or 1.0
    largest = 0.0
    for i, whole in enumerate(expected):
        if whole is None:
            continue
        locals_ = [x for x in actual[i] if x is not None]
        value, spread = gather(locals_, types[i], specs[i], sizes)
        error = max(difference(value, whole), spread) / scale
        if not error <= TOLERANCE:
            differ = "; ranks differ" if spread > TOLERANCE * scale else ""
            raise VerificationError(f"{kind} {i} under {specs[i]} is wrong by {error:.1e}{differ}")
        largest = max(largest, error)
    return largest


def _local_operator(
    case: OracleCase, strategies: Sequence[AxisStrategy], sizes: Sequence[int]
) -> tuple[tuple[int, ...], Callable[[Sequence[Tensor], Group | None], list[Tensor]]]:
    """The axes of the group it needs (`()` for none), and the function that one rank runs.

    The function is the operator with localised arguments, or what replaces the operator.
    """
    axes = tuple(axis for axis, s in enumerate(strategies) if s.lowering)
    if axes:
        lowering = strategies[axes[0]].lowering
        assert lowering is not None
        return axes, lambda tensors, group: _run_lowered(case.call, lowering, tensors, group)
    changed: dict[str, Any] = {}
    if case.rule.localise is not None:
        inputs, outputs = (
            [local_shape(t, spec, sizes) for t, spec in zip(types, specs, strict=True)]
            for types, specs in zip(
                (case.inputs, case.outputs), case.specs(strategies), strict=True
            )
        )
        changed = case.rule.localise(case.call, inputs, outputs)
    return (), lambda tensors, group: _run(case.call, tensors, changed)


def combinations(case: OracleCase, sizes: Sequence[int]) -> Iterator[tuple[AxisStrategy, ...]]:
    """All choices of one strategy per axis that fit (`OracleCase.fits`)."""
    for strategies in itertools.product(case.strategies(), repeat=len(sizes)):
        if case.fits(strategies, sizes):
            yield strategies
