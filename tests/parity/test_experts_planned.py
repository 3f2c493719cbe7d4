"""Mixtures of experts: every legal placement is right, and plans are as expected."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.capture import capture
from autopar.codegen import emit
from autopar.cost.laws import CostModel
from autopar.errors import NotSupportedError
from autopar.mesh import Device, Link, LogicalMesh
from autopar.passes.analysis import Analysis
from autopar.passes.backward import differentiate
from autopar.passes.intra import AxisPin, Constraints, PlacementRequest, choose, intra_op_problem
from autopar.passes.lowering import lower
from autopar.placement import S
from autopar.program.communication import step_calls
from autopar.program.lines import StageProgram, Strategy
from tests.helpers.harness import (
    Case,
    Step,
    abstract_cost,
    generated_code,
    random_strategy,
    random_tokens,
    thread_step,
)
from tests.helpers.models.moe_models import moe_model
from tests.helpers.nightly import nightly
from tests.helpers.random_programs import (
    RandomProgram,
    faults,
    named_analysis,
    random_program,
)
from tests.parity.zoo.entries import HIDDEN, ROWS, SEQUENCE
from tests.parity.zoo.plain import GatedExperts

__all__ = ["generated_code"]

NO_ZERO = frozenset({"zero1", "zero2", "zero3"})
FREE, MIXTRAL = Constraints(), "mixtral, one layer"
EXCHANGE, OWN_ROWS = "expert_exchange_mlp", "expert_parallel_mlp"


@lru_cache
def mixtral() -> Case:
    return Case(named_analysis(MIXTRAL), random_tokens)


def on_axis(case: Case, axis: int) -> Constraints:
    """Constraints: the experts' matrices are sharded by experts on one axis."""
    parameters = case.analysis.program.parameters
    pin = (AxisPin(None, S(0), axis),)
    return Constraints(pins={n: pin for n, p in parameters.items() if len(p.shape) == 3})


def lowered(strategy: Strategy) -> set[str]:
    return {o.lowered.function for o in strategy.operators.values() if o.lowered}


def test_experts_sharded_on_an_axis_are_exchanged_or_own_their_rows() -> None:
    """Random placements otherwise; `test_random_programs.py` has those that are not pinned."""
    functions = set[str]()
    for seed, shapes in ((3, ((2,),)), (3, ((2, 2),))):
        pinned = on_axis(mixtral(), len(shapes[0]) - 1)
        program = random_program(MIXTRAL, seed, shapes, pinned)
        assert faults(program) == {}, program.text
        functions |= {name for name in (EXCHANGE, OWN_ROWS) if name in code_of(program)}
    assert functions == {EXCHANGE, OWN_ROWS}


def code_of(program: RandomProgram) -> str:
    return "".join(emit(differentiate(stage)) for stage in program.pipeline.stages)


@nightly
def test_a_balancing_loss_is_exact_in_one_microbatch() -> None:
    """A product of means over the batch; microbatches are refused, since it is no sum over rows."""
    model = moe_model("mixtral", output_router_logits=True)
    case = Case(Analysis.of(capture(model, random_tokens(0), precision="fp64")), random_tokens)
    assert random_step(case, (2,)).wrong == {}
    with pytest.raises(NotSupportedError, match="not a sum or mean over rows"):
        case.analysis.batch.check_divides(2)


def random_step(case: Case, sizes: tuple[int, ...], seed: int = 0) -> Step:
    """A random legal assignment, in one microbatch."""
    cost = abstract_cost(sizes)
    problem = intra_op_problem(case.analysis, cost, 1, FREE, "adamw")
    strategy = random_strategy(case.analysis, problem, 1, random.Random(seed))
    return thread_step(case.analysis, cost, strategy, case.batch(0), 0)


class Experts(nn.Module):
    """A layer, two matmuls with top-2 experts beside it, and a loss."""

    def __init__(self, width: int, inner: int, n_experts: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width, bias=False)
        self.router = nn.Linear(width, n_experts, bias=False)
        self.up = nn.Parameter(torch.randn(n_experts, inner, width))
        self.down = nn.Parameter(torch.randn(n_experts, width, inner))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        gates, ids = self.router(x).softmax(-1).topk(2)
        rows = x.repeat_interleave(2, dim=0)
        inner = self.product(rows, self.up, ids.flatten()).relu()
        out = self.product(inner, self.down, ids.flatten()) * gates.reshape(-1, 1)
        return (x + out.view(len(x), 2, -1).sum(1)).pow(2).mean()

    def product(self, rows: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
        return torch.bmm(weight[ids], rows.unsqueeze(-1)).squeeze(-1)


class Dropping(nn.Module):
    """Switch's experts: each takes the first rows that chose it, up to a capacity; others are 0."""

    def __init__(self, width: int, n_experts: int, capacity: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.router = nn.Linear(width, n_experts, bias=False)
        self.up = nn.Parameter(torch.randn(n_experts, width, 2 * width))
        self.down = nn.Parameter(torch.randn(n_experts, 2 * width, width))
        self.capacity = capacity

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        gates, ids = self.router(x).softmax(-1).max(-1)
        chosen = F.one_hot(ids, len(self.up))
        places = (chosen.cumsum(0) * chosen).sum(-1) - 1
        slots = F.one_hot(places.clamp(max=self.capacity), self.capacity + 1)[:, :-1]
        sent = (chosen[:, :, None] * slots[:, None, :]).to(x.dtype)
        rows = torch.einsum("nec,ni->eci", sent, x)
        out = torch.bmm(torch.bmm(rows, self.up).relu(), self.down)
        return torch.einsum("nec,eci->ni", sent * gates[:, None, None], out).pow(2).mean()


class Gated(nn.Module):
    """A layer, experts as a dim of einsums, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(HIDDEN, HIDDEN)
        self.experts = GatedExperts()

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(self.first(x)).pow(2).mean()


@dataclass(frozen=True)
class Planned:
    strategy: Strategy
    program: StageProgram

    def calls(self, word: str) -> Counter[tuple[str, str]]:
        """(kind, phase) of the collectives of activations whose operator has `word` in its name."""
        calls = (c for c in step_calls(self.program) if c.phase in ("forward", "backward"))
        return Counter((c.kind, c.phase) for c in calls if word in c.tensor)

    def uses(self, name: str) -> set[str]:
        """How a parameter is used on the second axis."""
        (parameter,) = (p for p in self.program.parameters if p.name == name)
        return {str(use.local.spec.placements[1]) for use in parameter.uses}


def plan(case: Case, n_ranks: int, *forbid: str, by: int | None = None) -> Planned:
    """The best right plan without ZeRO; `by`: the axis that must shard matrices by experts."""
    device = Device(1, 1e30, 1e15, 0)
    mesh = LogicalMesh((1, n_ranks), ("node", "device"), (Link(1, 1),) * 2, device)
    cost = CostModel(mesh, torch.float64)
    pins = on_axis(case, by).pins if by is not None else {}
    limits = Constraints(NO_ZERO | set(forbid), pins=pins)
    strategy = choose(case.analysis, PlacementRequest(cost, 1, limits), "adamw", None).strategy
    step = thread_step(case.analysis, cost, strategy, case.batch(0), seed=0)
    assert step.wrong == {}
    assert Counter(step.calls) == Counter(step.foretold)
    return Planned(strategy, lower(case.analysis, strategy, cost))


def case_of(model: nn.Module, *shape: int) -> Case:
    """The case of a model with one input."""
    x = torch.randn(shape, dtype=torch.float64)
    analysis = Analysis.of(capture(model.double(), (x,)))
    (name,) = (info.path for info in analysis.program.inputs.values())
    return Case(analysis, lambda seed: {name: x})


@lru_cache
def few_experts() -> Case:
    """3 and 9 features: no number of ranks here divides them."""
    return case_of(Experts(9, 3, 8), 16, 9)


@lru_cache
def gated_experts() -> Case:
    return case_of(Gated(), ROWS, SEQUENCE, HIDDEN)


@lru_cache
def dropping_experts() -> Case:
    torch.manual_seed(0)
    return case_of(Dropping(8, 4, 3), 16, 8)


@nightly
@pytest.mark.parametrize("seed", range(1, 9))
def test_rows_beyond_a_capacity_are_dropped_as_on_one_process(seed: int) -> None:
    """Four of 16 rows at least. Which ones depends on all rows before: there is one microbatch."""
    case = dropping_experts()
    assert random_step(case, (2,) if seed % 2 else (2, 2), seed).wrong == {}
    with pytest.raises(NotSupportedError, match="not a sum or mean over rows"):
        case.analysis.batch.check_divides(2)


def test_many_small_experts_are_sent_their_rows() -> None:
    """A mixture gathers row counts, and exchanges rows and results, both ways."""
    planned = plan(case_of(Experts(32, 8, 32), 64, 32), 8)
    assert lowered(planned.strategy) == {EXCHANGE}
    assert planned.uses("up") == planned.uses("down") == {"S(0)"}
    assert planned.calls("expert_mlp") == {
        ("all_gather", "forward"): 1, ("all_to_all", "forward"): 2, ("all_to_all", "backward"): 2,
    }  # fmt: skip


@nightly
def test_a_large_exchange_is_two_beside_matmuls() -> None:
    """Each rank has 8 MiB of rows; a step is that of one process, with the calls foretold."""
    planned = plan(case_of(Experts(512, 8, 8), 2048, 512), 2, by=1)
    assert planned.calls("expert_mlp") == {
        ("all_gather", "forward"): 1, ("all_to_all", "forward"): 4, ("all_to_all", "backward"): 4,
    }  # fmt: skip
    calls = [c for c in step_calls(planned.program).forward if "expert_mlp" in c.tensor]
    assert [c.size_bytes for c in calls if c.kind == "all_to_all"] == [4 << 20] * 4
    assert any(c.beside_s > 0 for c in calls)


def test_experts_that_no_feature_divides_compute_their_own_rows() -> None:
    planned = plan(few_experts(), 4, "data", "sequence")
    assert OWN_ROWS in lowered(planned.strategy)
    assert EXCHANGE not in lowered(planned.strategy)


@pytest.mark.parametrize("n_ranks", [4, 8])
def test_experts_are_whole_where_that_is_asked_for(n_ranks: int) -> None:
    planned = plan(few_experts(), n_ranks, "expert")
    assert lowered(planned.strategy) == set()
    assert "S(0)" not in planned.uses("up") | planned.uses("down")


def test_without_data_parallelism_the_matrices_are_sharded() -> None:
    case = mixtral()
    cost = abstract_cost((2,), Device(1e-3, 1e30, 1e15, 0.0))
    limits = Constraints(frozenset({"data", "sequence"}))
    chosen = choose(case.analysis, PlacementRequest(cost, 1, limits), "adamw", None)
    program = lower(case.analysis, chosen.strategy, cost)
    matrices = [p for p in program.parameters if len(p.shape) == 3]
    assert len(matrices) == 2
    for parameter in matrices:
        assert all(use.local.spec.placements[0].is_shard for use in parameter.uses), parameter


@nightly
def test_einsums_over_experts_are_reached_by_all_to_all() -> None:
    """An all_to_all from sharded tokens to sharded experts and one back, in both directions."""
    planned = plan(gated_experts(), 4, by=1)
    assert planned.uses("experts.up") == planned.uses("experts.down") == {"S(0)"}
    assert planned.calls("experts/einsum") == {
        ("all_to_all", "forward"): 2, ("all_to_all", "backward"): 2,
    }  # fmt: skip


def test_experts_of_einsums_are_whole_where_that_is_asked_for() -> None:
    free = plan(gated_experts(), 4, "data", "sequence")
    whole = plan(gated_experts(), 4, "data", "sequence", "expert")
    assert free.uses("experts.up") == free.uses("experts.down") == {"S(0)"}
    assert "S(0)" not in whole.uses("experts.up") | whole.uses("experts.down")
