"""Chosen plans follow their recipe and compute what one process computes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial

import pytest

from autopar.passes.inter import operator_flops
from autopar.passes.intra import Constraints, PlacementRequest, choose, recipe_cost
from autopar.passes.lowering import lower
from autopar.placement import I, Move, R, Spec
from autopar.program.lines import CallLine, Period, StageProgram, Strategy
from tests.helpers.harness import Case, abstract_cost, generated_code, model_case, thread_step
from tests.helpers.nightly import one_in, sampled
from tests.helpers.random_programs import named_analysis, named_batch

__all__ = ["generated_code"]

MODELS = ("mlp", "gpt2", "llama")
# Mesh and number of microbatches; the mesh of two axes has both numbers.
PLACES = (((1, 2), 1), ((2, 2), 1), ((2, 2), 4), ((1, 4), 4))
DATA, TENSOR = 0, 1
RECIPES = {
    "auto": Constraints(),
    "megatron": Constraints(frozenset({"sequence"}), ("data", "tensor"), 0),
    "sequence": Constraints(frozenset(), ("data", "tensor"), 0),
    "ddp": Constraints(frozenset(), ("data", "data"), 0),
    "zero-1": Constraints(frozenset(), ("data", "data"), 1),
    "zero-2": Constraints(frozenset(), ("data", "data"), 2),
    "zero-3": Constraints(frozenset(), ("data", "data"), 3),
    "megatron zero-3": Constraints(frozenset({"sequence"}), ("data", "tensor"), 3),
}
# On one axis.
RECIPES_OF_IMAGES = {
    "tensor": Constraints(forbid=frozenset({"data"})),
    "zero-3 over all": Constraints(roles=("data",), zero=3),
}
PERIODS: dict[int, Period] = {1: "step", 2: "micro", 3: "use"}


@dataclass(frozen=True)
class Planned:
    """A chosen plan and what its checks read."""

    case: Case
    sizes: tuple[int, ...]
    strategy: Strategy
    program: StageProgram

    @property
    def active(self) -> tuple[int, ...]:
        return tuple(axis for axis, n in enumerate(self.sizes) if n > 1)

    def uses(self, parameter: str) -> list[Spec]:
        return [
            spec
            for operator in self.case.analysis.operators
            for name, spec in zip(
                operator.inputs, self.strategy.operators[operator.name].inputs, strict=True
            )
            if name == parameter
        ]

    @property
    def reduce_scatters(self) -> list[Move]:
        """Moves of activations that reduce_scatter, forward or backward."""
        moves = [line.move for line in self.program.moves() if line.has_grad]
        return [m for m in moves if "reduce_scatter" in (m.forward, m.backward)]

    def is_batch_sharded(self, axis: int) -> bool:
        """Is every model input sharded by rows on `axis`?"""
        return all(
            item.batch_cell is not None
            and item.local.spec.placements[axis].is_shard
            and item.local.spec.placements[axis].cell == item.batch_cell
            for item in self.program.delivered
            if item.kind == "input"
        )


def plan(case: Case, sizes: tuple[int, ...], n_microbatches: int, recipe: str) -> Planned:
    constraints = (RECIPES | RECIPES_OF_IMAGES)[recipe]
    cost = abstract_cost(sizes)
    pricing = recipe_cost(cost) if recipe != "auto" else cost
    chosen = choose(
        case.analysis, PlacementRequest(pricing, n_microbatches, constraints), "adamw", None
    )
    program = lower(case.analysis, chosen.strategy, cost)
    return Planned(case, sizes, chosen.strategy, program)


def check_megatron(planned: Planned) -> None:
    """Weights of matmuls are sharded over tp and whole over dp; rows are sharded over dp only."""
    products = {
        name
        for name, info in planned.case.analysis.program.parameters.items()
        if len(info.shape) == 2 and "embed" not in info.name and "wpe" not in info.name
    }
    assert products
    for name in products:
        for use in planned.uses(name):
            assert not use.placements[DATA].is_shard, name
    sharded = {n for n in products if any(u.placements[TENSOR].is_shard for u in planned.uses(n))}
    assert sharded == products
    if DATA in planned.active:
        assert planned.is_batch_sharded(DATA)
    assert not planned.is_batch_sharded(TENSOR)


def check_sequence(planned: Planned) -> None:
    """Norms run on shards over tp, and activations reduce_scatter over tp."""
    assert planned.reduce_scatters
    assert all(m.axes == (TENSOR,) for m in planned.reduce_scatters)
    for operator in planned.case.analysis.operators:
        if str(operator.call.op) in ("aten.layer_norm.default", "aten.rsqrt.default"):
            rows = planned.strategy.operators[operator.name].inputs[0]
            assert rows.placements[TENSOR].is_shard, operator.name


def check_storage(planned: Planned, zero: int, axes: tuple[int, ...]) -> None:
    """Parameters are used whole on the data `axes`; ZeRO stores them sharded there."""
    for name, storage in planned.strategy.storage.items():
        kept = [storage.spec.placements[axis] for axis in axes]
        assert all(not u.placements[a].is_shard for u in planned.uses(name) for a in axes), name
        if zero == 0 or not axes:
            assert all(p == I for p in kept), name
        else:
            assert all(p.is_shard for p in kept), name
            assert storage.period == PERIODS[zero], name


def check_data_parallel(planned: Planned, zero: int) -> None:
    assert all(planned.is_batch_sharded(axis) for axis in planned.active)
    check_storage(planned, zero, planned.active)
    for name in planned.strategy.storage:
        for use in planned.uses(name):
            assert all(use.placements[axis] == R for axis in planned.active), name


def check_recipe(planned: Planned, recipe: str) -> None:
    constraints = RECIPES[recipe]
    if constraints.roles == ("data", "data"):
        check_data_parallel(planned, constraints.zero or 0)
    elif constraints.roles:
        check_megatron(planned)
        if "sequence" not in constraints.forbid:
            check_sequence(planned)
        data = tuple(axis for axis in planned.active if axis == DATA)
        check_storage(planned, constraints.zero or 0, data)


CASES = [(m, sizes, n, r) for m in MODELS for sizes, n in PLACES for r in RECIPES]
# Every recipe, and every model on every place.
BY_DAY = [
    ("mlp", (1, 2), 1, "auto"),
    ("gpt2", (1, 2), 1, "sequence"),
    ("llama", (1, 2), 1, "zero-3"),
    ("mlp", (2, 2), 1, "zero-1"),
    ("gpt2", (2, 2), 1, "megatron zero-3"),
    ("llama", (2, 2), 1, "sequence"),
    ("mlp", (2, 2), 4, "megatron"),
    ("gpt2", (2, 2), 4, "zero-2"),
    ("llama", (2, 2), 4, "ddp"),
    ("mlp", (1, 4), 4, "zero-3"),
    ("gpt2", (1, 4), 4, "auto"),
    ("llama", (1, 4), 4, "megatron"),
]


@one_in(6)
@pytest.mark.parametrize(("model", "sizes", "n_microbatches", "recipe"), sampled(CASES, BY_DAY))
def test_plan(model: str, sizes: tuple[int, ...], n_microbatches: int, recipe: str) -> None:
    """The plan follows its recipe and is right; forbidden, reduce_scatters are absent."""
    planned = plan(model_case(model), sizes, n_microbatches, recipe)
    check_recipe(planned, recipe)
    if "sequence" in RECIPES[recipe].forbid:
        assert planned.reduce_scatters == []
    check_step(planned)


def check_step(planned: Planned) -> None:
    case, cost = planned.case, abstract_cost(planned.sizes)
    step = thread_step(case.analysis, cost, planned.strategy, case.batch(3), 3)
    assert step.wrong == {}
    assert Counter(step.calls) == Counter(step.foretold)


@one_in(3)
@pytest.mark.parametrize("recipe", ["tensor", "zero-3 over all"])
@pytest.mark.parametrize("kind", ["frozen batch norms", "down and up"])
def test_every_convolution_is_sharded(kind: str, recipe: str) -> None:
    """Where sharding always pays, and over 4 ranks."""
    case = Case(named_analysis(kind), partial(named_batch, kind))
    planned = plan(case, (4,), 2, recipe)
    lines = planned.program.body
    flops = sum(line.flops for line in lines if isinstance(line, CallLine))
    assert flops == sum(operator_flops(case.analysis)) / (4 * 2)
    check_step(planned)
