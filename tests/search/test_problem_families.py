"""Problems built for several meshes at once are those of each mesh alone, and candidates scored by
them come out as the simulator says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import autopar.cost.price.prediction
from autopar.capture import capture
from autopar.cost.hardware.hardware import Hardware, resolve
from autopar.cost.laws.model import CostModel
from autopar.cost.price.prediction import link_between, predict
from autopar.errors import BatchError
from autopar.mesh import Link, Mesh, factored_view
from autopar.options import Options
from autopar.passes.analysis.analysis import Analysis
from autopar.passes.analysis.cutting import cut
from autopar.passes.analysis.recompute import Recomputable
from autopar.passes.inter.candidate import Candidate, StageLayout, n_operators
from autopar.passes.inter.recipes import recipe_limits
from autopar.passes.intra import intra_op
from autopar.passes.intra.constraints import Constraints
from autopar.passes.intra.intra_op import (
    ProblemBatch,
    ProblemFamilies,
    intra_op_problem,
    intra_op_problems,
)
from autopar.passes.intra.recipe_machine import recipe_cost
from autopar.passes.lowering import abridger as abridge
from autopar.passes.reshard.costs import priced_alike
from autopar.passes.reshard.move_graph import move_graph
from autopar.passes.reshard.primitive_costs import primitive_lines
from autopar.passes.search.evaluator import Evaluator, Scored
from autopar.passes.search.simulator import SCORE_REL, UNSEEN_REL, Simulator, Solved
from autopar.passes.solvers.choice import solve
from autopar.passes.solvers.problem import Solution
from autopar.placement.moves import COLLECTIVES
from autopar.placement.spec import TensorType
from autopar.plans.predicted import Predicted
from autopar.program.pipeline import Pipeline
from tests.helpers.harness import abstract_cost, model_case

REL = 1e-12
LIMITS = {
    "free": Constraints(),
    "no ZeRO": Constraints(frozenset({"zero1", "zero2", "zero3"})),
    "Megatron": Constraints(frozenset({"sequence"}), ("data", "tensor"), 0),
}


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("model", ["llama", "bert-view", "mlp"])
def test_meshes_together_are_meshes_alone(model: str, limits: str) -> None:
    """Also where a size leaves out what another allows: heads that 4 divides and 8 does not."""
    analysis, constraints = model_case(model).analysis, LIMITS[limits]
    costs = [abstract_cost(sizes) for sizes in ((2, 2), (4, 2), (2, 4), (2, 8))]
    cases = [(cost, 1) for cost in costs]
    together = intra_op_problems(analysis, cases, constraints, "adamw")
    for b, cost in enumerate(costs):
        alone = solve(intra_op_problem(analysis, cost, 1, constraints, "adamw").numbers)
        found = solve(together.of(b).numbers)
        assert isinstance(alone, Solution) and isinstance(found, Solution)
        assert found.objective_s == pytest.approx(alone.objective_s, rel=REL)
        assert found.tie == pytest.approx(alone.tie, rel=1e-6)
        assert found.bytes == pytest.approx(alone.bytes, rel=REL)


def test_those_of_a_family_that_use_the_same_axes_are_built_at_once() -> None:
    """Of all ranks, and of fewer apart."""
    shapes = ((2, 2), (2, 4), (4, 2), (4, 1), (2, 1), (1, 2))
    small, wide, tall, four, two, other = costs = tuple(abstract_cost(s) for s in shapes)
    problems = ProblemFamilies(model_case("mlp").analysis, "adamw", (costs,))

    def of(cost: CostModel, m: int = 1, limits: Constraints = LIMITS["free"]) -> ProblemBatch:
        return problems.of(cost, m, limits)

    assert of(wide) is of(tall) and {c for c, _ in of(wide).cases} == {
        priced_alike(wide), priced_alike(tall)
    }  # fmt: skip
    assert of(four) is of(two) is not of(other)
    assert len(of(small).cases) == 1
    assert of(wide, 2) is not of(wide)
    assert len(of(wide, 1, Constraints(roles=("data", "data"))).cases) == 1


def test_numbers_of_microbatches_together_are_each_alone() -> None:
    """Also those that leave out what others allow: rows that four ranks no longer divide."""
    analysis = model_case("llama").analysis
    cost = abstract_cost((2, 4))
    problems = ProblemFamilies(analysis, "adamw", ((cost,),), (1, 2, 4, 3))
    batch = problems.of(cost, 2, Constraints())
    assert [m for _, m in batch.cases] == [1, 2, 4]
    for m in (1, 2, 4):
        assert problems.of(cost, m, Constraints()) is batch
        found = solve(batch.of(cost, m).numbers)
        alone = solve(intra_op_problem(analysis, cost, m, Constraints(), "adamw").numbers)
        assert isinstance(alone, Solution) and isinstance(found, Solution)
        assert found.objective_s == pytest.approx(alone.objective_s, rel=REL)
        assert found.bytes == pytest.approx(alone.bytes, rel=REL)
    with pytest.raises(BatchError):
        problems.of(cost, 3, Constraints())


@pytest.mark.parametrize("shape", [(1, 8), (4, 8)])
def test_primitives_are_lines_in_their_bytes(shape: tuple[int, int]) -> None:
    """Groups inside a node and across, with a switch that sums and without one."""
    for name in ("a100-80gb", "h100-sxm"):
        mesh = Mesh(shape, hardware=name)
        hardware = resolve(mesh, torch.bfloat16)
        costs = tuple(
            CostModel(
                factored_view(mesh, hardware.links, hardware.device, {"dp": dp, "tp": tp}),
                torch.bfloat16,
            )
            for dp, tp in ((2, 4), (4, 2))
        )
        tensor = TensorType(((64, 64), (64,)), 2, True)
        graph = move_graph(tensor, costs[0].mesh.sizes)
        assert {p.kind for p in graph.primitives} >= COLLECTIVES
        lines = primitive_lines(graph, costs)
        for size_bytes in (1 << 13, 1 << 20, 1 << 28):
            sizes = np.full(len(costs), float(size_bytes))
            seconds, bucketed = lines.seconds(sizes), lines.bucketed(sizes)
            for b, cost in enumerate(costs):
                for p, primitive in enumerate(graph.primitives):
                    local = size_bytes // int(lines.n_shards[b, p])
                    args = primitive.kind, local, primitive.axes
                    assert seconds[b, p] == pytest.approx(cost.primitive_time_s(*args), rel=1e-9)
                    assert bucketed[b, p] == pytest.approx(cost.bucketed_time_s(*args), rel=1e-9)


# -- scores ----------------------------------------------------------------------------------------


@lru_cache
def wide_llama() -> Analysis:
    """Four layers of Llama-3-8B's width: kernels that are worth a GPU's time."""
    config = AutoConfig.for_model(
        "llama", hidden_size=4096, intermediate_size=14336, num_hidden_layers=4,
        num_attention_heads=32, num_key_value_heads=8, vocab_size=32000, use_cache=False,
        max_position_embeddings=4096,
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        ids = torch.empty(32, 4096, dtype=torch.int64)
    return Analysis.of(capture(model, {"input_ids": ids, "labels": ids}))


def test_stages_of_a_program_share_what_their_groups_may_do() -> None:
    """Two halves of a chain of alike blocks, each of which fills buckets of gradients."""
    analysis, mesh = wide_llama(), Mesh((1, 2), hardware="a100-80gb")
    hardware = resolve(mesh, torch.bfloat16)
    view = factored_view(mesh, hardware.links, hardware.device, {"dp": 2, "tp": 1})
    cost, n = CostModel(view, torch.bfloat16), n_operators(analysis.program)
    tables = []
    for program in cut(analysis.program, (n // 2, n)):
        part = analysis.part(program)
        problem = intra_op_problem(part, cost, 1, Constraints(), "adamw")
        tables.append({id(c.table) for c in problem.candidates})
    assert len(tables[0] & tables[1]) > len(tables[0]) // 2


@pytest.mark.parametrize(
    ("n_most", "built"), [(5, ((1, 2, 4, 8, 16),) * 2), (4, ((16,), (1, 2, 4, 8)))]
)
def test_numbers_of_microbatches_of_several_stages_begin_where_searches_do(
    monkeypatch: pytest.MonkeyPatch, n_most: int, built: tuple[tuple[int, ...], ...]
) -> None:
    """Unless all are built at once; one stage is asked for with all of them."""
    monkeypatch.setattr(intra_op, "MOST_CASES", n_most)
    counts, whole, part = (1, 2, 4, 8, 16), abstract_cost((4, 1)), abstract_cost((2, 1))
    problems = ProblemFamilies(wide_llama(), "adamw", ((whole, part),), counts)

    def built_with(cost: CostModel, m: int) -> tuple[int, ...]:
        return tuple(n for _, n in problems.of(cost, m, Constraints()).cases)

    assert built_with(whole, 2) == counts[:n_most]
    assert (built_with(part, 16), built_with(part, 4)) == built


def test_numbers_of_microbatches_with_recompute_begin_with_the_first_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of one stage, fewer are built at once."""
    monkeypatch.setattr(intra_op, "MOST_CASES_OF_ONE", 2)
    monkeypatch.setattr(intra_op, "MOST_CASES_AGAIN", 3)
    analysis, whole, part = wide_llama(), abstract_cost((4, 1)), abstract_cost((2, 1))
    recomputable = Recomputable.of(analysis, Options())
    assert recomputable is not None
    counts = (1, 2, 4, 8, 16)
    families = ProblemFamilies(
        analysis, "adamw", ((whole, part),), counts, recomputable=recomputable
    )

    def built_with(cost: CostModel, m: int) -> tuple[int, ...]:
        return tuple(n for _, n in families.of(cost, m, Constraints()).cases)

    for m, built in ((4, (4, 8)), (8, (4, 8)), (1, (1, 2)), (2, (1, 2)), (16, (16,))):
        assert built_with(whole, m) == built
    assert [built_with(part, m) for m in (2, 1)] == [(2, 4, 8), (1,)]


def simulator_on(mesh: Mesh) -> tuple[Simulator, Hardware]:
    hardware = resolve(mesh, torch.bfloat16)

    def predicted(pipeline: Pipeline, costs: Sequence[CostModel]) -> Predicted:
        return predict(pipeline, costs, "adamw", link_between(mesh, hardware.links))

    options = Options.of()
    return Simulator(Evaluator(wide_llama(), options, hardware, 1e12), predicted), hardware


@pytest.mark.parametrize(
    ("dp", "tp", "pp", "m", "is_recipe"),
    [
        (8, 1, 1, 1, False),
        (4, 2, 1, 2, False),
        (2, 4, 1, 4, True),
        (2, 2, 2, 8, False),
        (1, 4, 2, 8, True),
    ],
)
def test_scores_are_near_what_is_simulated(
    dp: int, tp: int, pp: int, m: int, is_recipe: bool
) -> None:
    mesh = Mesh((1, 8), hardware="a100-80gb")
    simulator, hardware = simulator_on(mesh)
    evaluator = simulator.evaluator
    limits = recipe_limits(evaluator.options, None) if is_recipe else Constraints()
    n, axes = n_operators(wide_llama().program), {"dp": dp, "tp": tp}
    stages = tuple(
        StageLayout(factored_view(mesh, hardware.links, hardware.device, axes, k * dp * tp), limits)
        for k in range(pp)
    )
    ends = (n,) if pp == 1 else (n // 2, n)
    scored = evaluator.scored(Candidate("", ends, stages, m), None)
    assert scored.score_s == pytest.approx(simulator.simulated(scored).step_time_s, rel=SCORE_REL)


def test_stages_that_candidates_share_are_lowered_and_priced_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mesh = Mesh((1, 8), hardware="a100-80gb")
    simulator, hardware = simulator_on(mesh)
    n, asked = n_operators(wide_llama().program), list[str]()

    def count(module: ModuleType, name: str) -> None:
        of = getattr(module, name)

        def counted(*args: Any) -> Any:
            asked.append(name)
            return of(*args)

        monkeypatch.setattr(module, name, counted)

    count(abridge, "lower")
    count(autopar.cost.price.prediction, "peak_memory")

    def scored(first: Mapping[str, int], last: Mapping[str, int]) -> Scored:
        views = [
            factored_view(mesh, hardware.links, hardware.device, axes, first_rank)
            for axes, first_rank in ((first, 0), (last, 4))
        ]
        stages = tuple(StageLayout(view, Constraints()) for view in views)
        return simulator.evaluator.scored(Candidate("", (n // 2, n), stages, 8), None)

    data, both = {"dp": 4, "tp": 1}, {"dp": 2, "tp": 2}
    simulator.simulated(scored(data, data))
    asked.clear()
    found = simulator.simulated(scored(both, data))
    assert sorted(asked) == ["lower", "peak_memory"]
    anew = Simulator(simulator.evaluator, simulator.pricer).simulated(scored(both, data))
    assert found == anew and len(asked) == 2 + 4


def solved(scored: Scored, step_time_s: float, peak_bytes: float) -> Solved:
    """That time, and nothing else of note."""
    nothing = 0.0, 0.0, 0.0, 0.0, 0.0, None, None, 0.0
    predicted = Predicted(step_time_s, peak_bytes, *nothing)
    return Solved(scored.candidate, (), predicted, step_time_s, 0.0)


def test_candidates_are_simulated_until_none_scores_better(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    simulator, _ = simulator_on(Mesh((1, 8), hardware="a100-80gb"))
    # By its score a is 3% slower than it is; that b is 10% slower than its score says nothing of c.
    truth = {"a": 1.0, "b": 1.12, "c": 1.1, "d": 0.1, "e": 0.2, "pipeline": 1.2}
    out_of_reach = 1 + SCORE_REL + 0.03
    scores = {"d": 1.5, "e": out_of_reach, "c": out_of_reach - 1e-3, "a": 1.03, "b": 1.02}
    scored = [Scored(Candidate(name, (1,), (), 1), (), score) for name, score in scores.items()]
    layout = StageLayout(abstract_cost((4, 1)).mesh, Constraints())
    pipeline = Candidate("pipeline", (1, 2), (layout, layout), 1)  # nothing is known of its kind
    scored.append(Scored(pipeline, (), 1 + SCORE_REL + UNSEEN_REL - 1e-3))
    asked: list[str] = []

    def simulated(one: Scored) -> Solved:
        asked.append(one.candidate.name)
        return solved(one, truth[one.candidate.name], 0.0)

    monkeypatch.setattr(simulator, "_simulated", simulated)
    found = simulator.fastest(scored).found
    assert asked == ["b", "a", "c", "pipeline"]
    assert [s.step_time_s for s in found] == [1.12, 1.0, 1.1, 1.2]


def test_smaller_budgets_are_left_where_what_fits_is_slower(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every candidate needs a byte more than is counted, and 10 bytes are allowed."""
    simulator, _ = simulator_on(Mesh((1, 8), hardware="a100-80gb"))
    off = {"best": 1.0, "slower": 1.0, "steep": 0.97, "flat": 0.97}  # simulated, of the score
    score_s = {
        ("best", 9.0): 1.0,
        ("slower", 10.0): 1.01,
        ("steep", 10.0): 1.011, ("steep", 9.0): 1.3, ("steep", 9.5): 1.2,
        ("flat", 10.0): 1.015, ("flat", 9.0): 1.03, ("flat", 9.5): 1.02,
    }  # fmt: skip
    asked: list[tuple[str, float]] = []

    def scored(candidate: Candidate, size_bytes: float) -> Scored:
        chosen: Any = SimpleNamespace(size_bytes=size_bytes, gap=0.0)
        return Scored(candidate, (chosen,), score_s[candidate.name, size_bytes])

    def simulated(one: Scored) -> Solved:
        asked.append((one.candidate.name, one.size_bytes))
        return solved(one, one.score_s * off[one.candidate.name], one.size_bytes + 1.0)

    monkeypatch.setattr(simulator.evaluator, "budget_bytes", 10.0)
    monkeypatch.setattr(simulator.evaluator, "scored", scored)
    monkeypatch.setattr(simulator, "_simulated", simulated)
    monkeypatch.setattr(simulator, "_smaller_budgets", lambda candidate: [9.5, 9.0])
    sizes_bytes = {"best": 9.0, "slower": 10.0, "steep": 10.0, "flat": 10.0}
    simulations = simulator.fastest(
        [scored(Candidate(name, (1,), (), 1), held) for name, held in sizes_bytes.items()]
    )
    tried = [("flat", 10.0), ("flat", 9.0), ("flat", 9.5)]
    assert asked == [("best", 9.0), ("slower", 10.0), ("steep", 10.0), *tried]
    assert [s.candidate.name for s in simulations.found] == ["best", "flat"]
    assert simulations.slower_s == pytest.approx({"slower": 1.01, "steep": 1.2 * 0.97})
    assert not simulations.failed


def test_machines_of_several_families_offer_the_same_choices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Meshes that differ in their links alone are one abstract machine; problems are built for as
    many numbers of microbatches all the same."""
    mesh, (slow, fast) = Mesh((2, 4), hardware="cpu-local"), (Link(1e-5, 1e-9), Link(1e-6, 1e-10))
    analysis, hardware = model_case("llama").analysis, resolve(mesh, torch.float64)
    shapes = [{"dp": 2, "tp": 4}, {"dp": 4, "tp": 2}]
    real = [
        CostModel(factored_view(mesh, links, hardware.device, axes), torch.float64)
        for axes in shapes
        for links in ((slow, fast), (fast, slow))
    ]
    abstract = tuple(map(recipe_cost, real))
    monkeypatch.setattr(intra_op, "MOST_CASES", 8)  # of two numbers of microbatches
    problems = ProblemFamilies(analysis, "adamw", (tuple(real), abstract), (1, 2, 4))
    for cost, other in zip(real, abstract, strict=True):
        for m in (1, 2, 4):
            found = [problems.of(c, m, Constraints()) for c in (cost, other)]
            counts = [{n for _, n in batch.cases} for batch in found]
            assert counts[0] == counts[1] == ({4} if m == 4 else {1, 2})
            assert found[0].of(cost, m).structure == found[1].of(other, m).structure
