"""Lower bounds on plans with several stages: they hold, and the planner prunes by them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from autopar.errors import InfeasibleError
from autopar.mesh import Mesh
from autopar.options import Options
from autopar.passes.analysis.analysis import Analysis
from autopar.passes.inter.bounds import StageBounds
from autopar.passes.inter.candidate import Candidate
from autopar.passes.inter.joint import JointSearch
from autopar.passes.inter.recipes import recipe_candidates
from autopar.passes.inter.score import MessageSeconds, StageSeconds, score_s
from autopar.passes.search.outcome import PlanningResult
from autopar.passes.search.planner import Planner
from autopar.passes.solvers.stages.problem import StageProblem
from autopar.passes.solvers.stages.tables import least_span_s
from autopar.plans import Alternative
from autopar.schedule import ORDERS
from tests.helpers.candidates import gpt2, joint_search_on, recipes
from tests.helpers.captures import captured
from tests.helpers.every_plan import Choices, choices_of
from tests.helpers.machines import FAST, SLOW, TIERED, cluster, hardware_of
from tests.helpers.models.blocks import Block, Chain

REL = 1e-9
SHAPES = [(4,), (2, 2), (2, 4)]


def search_on(mesh: Mesh) -> JointSearch:
    return joint_search_on(gpt2(), mesh, hardware_of(mesh), Options.of(), 1e9)


def search_of(choices: Choices) -> JointSearch:
    return joint_search_on(choices.analysis, choices.mesh, choices.hardware, choices.options)


def test_the_bound_is_the_least_of_all_plans() -> None:
    """Of three layers on four devices, as stages of one or two devices each."""
    shared = np.triu(np.cumsum([[8.0, 4.0, 16.0]] * 3, axis=1) - [[0.0], [8.0], [12.0]])
    launches = np.triu(np.ones((3, 3)))
    m, bounds = 4, StageBounds(shared, launches)

    def plans() -> Iterator[list[tuple[int, int, int]]]:
        for n_stages in (2, 3):
            for cuts in itertools.combinations((1, 2), n_stages - 1):
                for sizes in itertools.product((1, 2), repeat=n_stages):
                    if sum(sizes) == 4:
                        yield list(zip((0, *cuts), (*cuts, 3), sizes, strict=True))

    def span_s(plan: list[tuple[int, int, int]]) -> float:
        times = [shared[a, b - 1] / (m * n) + 1.0 for a, b, n in plan]
        return max(sum(times[:k]) + m * time_s for k, time_s in enumerate(times))

    found = bounds.step_s(cluster(4), (1, 2), m, None)
    assert found == pytest.approx(min(map(span_s, plans())))
    assert bounds.balanced_s((1, 2), 2, m) == pytest.approx(span_s([(0, 2, 2), (2, 3, 2)]))


@hypothesis.given(
    st.lists(st.floats(0.0, 10.0), min_size=2, max_size=5),
    st.integers(1, 12),
    st.sampled_from(sorted(ORDERS)),
)
def test_no_schedule_is_faster_than_the_span(times: list[float], m: int, schedule: str) -> None:
    """Even if stages differ much: then the closed form is above the simulated step."""
    n, each = len(times), np.full((len(times),) * 2, math.inf)
    np.fill_diagonal(each, times)
    nothing, time_s = np.zeros((n, n, 1)), each[:, :, None]
    problem = StageProblem(time_s, nothing, nothing, nothing, (1,), n, m)
    messages = [MessageSeconds(k, k + 1, 0.0, 0.0) for k in range(n - 1)]
    step_s = score_s(schedule, m, [StageSeconds(t, 0.0) for t in times], messages)
    assert least_span_s(problem) <= step_s * (1 + 1e-9) + 1e-12


@pytest.mark.parametrize("shape", SHAPES)
def test_no_estimate_is_below_its_bound(shape: tuple[int, ...]) -> None:
    mesh = cluster(*shape)
    search = search_on(mesh)
    sizes = [n for n in (1, 2, 4) if n < mesh.n_ranks]
    for m in search.counts():
        bound_s, free_s = search.bounds.step_s(mesh, sizes, m, None), search.bound_s(m, None)
        assert 0 < bound_s <= free_s < math.inf
    assert 0 < search.unlimited_s == min(search.bound_s(m, None) for m in search.counts())
    found = recipes(gpt2(), mesh, hardware_of(mesh), Options.of())
    for candidate in found:
        last = [search.layers.ends.index(end) for end in candidate.ends]
        n_ranks, m = candidate.stages[0].view.n_ranks, candidate.n_microbatches
        assert search.bounds.balanced_s(last, n_ranks, m) <= candidate.estimate_s
        assert search.unlimited_s <= candidate.estimate_s


Case = tuple[str, tuple[int, ...], tuple[float, float], int]
CASES: list[Case] = [
    ("mlp", (4,), TIERED, 16),
    ("mlp", (4,), FAST, 1),
    ("mlp", (2, 2), TIERED, 16),
    ("gpt2", (2,), SLOW, 4),
]


@pytest.mark.parametrize(("model", "shape", "s_per_byte", "m"), CASES)
def test_no_simulated_step_is_below_its_bound(
    model: str, shape: tuple[int, ...], s_per_byte: tuple[float, float], m: int
) -> None:
    """Of every plan with stages: the bound of its cuts, of its number of stages, and of all."""
    choices = choices_of(model, shape, s_per_byte, Options.of(microbatches=m))
    search, nearest, nearest_layered = search_of(choices), 0.0, 0.0
    for candidate in choices.candidates():
        n_stages = len(candidate.stages)
        if n_stages == 1:
            continue
        step_time_s = choices.simulator.solve(candidate).step_time_s
        sizes = sorted({stage.view.n_ranks for stage in candidate.stages})
        on = choices.mesh, sizes, m, n_stages
        bound_s = search.bounds.step_s(*on)
        assert search.least_step_s(None) <= search.least_step_s(n_stages) <= bound_s
        layered_s = search.bounds.step_s(*on, partial(search.own_s, m))
        assert bound_s <= layered_s * (1 + REL) and layered_s <= step_time_s, candidate.name
        assert search.layered_step_s(n_stages, math.inf) <= layered_s * (1 + REL)
        nearest_layered = max(nearest_layered, layered_s / step_time_s)
        if len(sizes) == 1:
            last = [search.layers.ends.index(end) for end in candidate.ends]
            balanced_s = search.bounds.balanced_s(last, sizes[0], m)
            assert bound_s <= balanced_s * (1 + REL)
            bound_s = balanced_s
        assert bound_s <= step_time_s, candidate.name
        nearest = max(nearest, bound_s / step_time_s)
    assert nearest > 0.75 and nearest_layered > 0.75, "the bound says next to nothing"


def test_no_simulated_step_within_little_memory_is_below_its_bound() -> None:
    """Most stages must run again: with gpipe, they keep all microbatches."""
    m, options = 8, {"microbatches": 8, "schedule": "gpipe"}
    free = choices_of("gpt2", (2, 2), TIERED, Options.of(**options))
    few = [c for c in free.candidates() if len(c.stages) > 1][::12]
    limit = int(0.6 * min(free.simulator.solve(c).peak_bytes for c in few))
    choices = choices_of("gpt2", (2, 2), TIERED, Options.of(memory_limit=limit, **options))
    on = choices.analysis, choices.mesh, choices.hardware, choices.options
    search, unlimited = joint_search_on(*on, limit), joint_search_on(*on, 1e12)
    n_fit = n_raised = 0
    for candidate in few:
        sizes = sorted({stage.view.n_ranks for stage in candidate.stages})
        n_stages = len(candidate.stages)
        on_sizes = choices.mesh, sizes, m, n_stages
        bound_s = search.bounds.step_s(*on_sizes, partial(search.own_s, m))
        n_raised += bound_s > unlimited.bounds.step_s(*on_sizes, partial(unlimited.own_s, m))
        try:
            scored = choices.evaluator.scored(candidate, limit)
        except InfeasibleError:
            continue
        n_fit += 1
        assert bound_s <= choices.simulator.as_scored(scored).step_time_s, candidate.name
    assert n_fit >= 2 and n_raised


# -- what the planner leaves out -------------------------------------------------------------------


@dataclass(frozen=True)
class Planned:
    """A plan, what is said of alternatives with stages, and whether such were searched."""

    result: PlanningResult
    of_stages: dict[str, Alternative]
    searched: bool
    recipes: bool

    @property
    def step_time_s(self) -> float:
        return self.result.solved.step_time_s


def planned(choices: Choices) -> Planned:
    said: list[str] = []
    on = choices.analysis, choices.mesh, choices.options
    result = Planner(*on, report=said.append).run()
    return Planned(
        result,
        {row.name: row for row in result.alternatives if "stages" in row.name},
        any(text.startswith("searching stages with") for text in said),
        any(text.startswith("recipe of") for text in said),
    )


def times_with_stages_s(choices: Choices) -> list[float]:
    """Of every plan with stages that fits."""
    found = choices.step_times_s()
    return [time_s for name, time_s in found.items() if " | " in name]


def one_microbatch() -> Choices:
    """Only one stage works at a time; fast links make one stage the best."""
    options = Options.of(microbatches=1, recompute="none")
    return choices_of("mlp", (4,), FAST, options)


def test_no_stages_are_searched_where_bubbles_alone_take_too_long() -> None:
    choices = one_microbatch()
    found = planned(choices)
    assert not found.searched and not found.recipes
    assert set(found.of_stages) == {"several stages", "Megatron of several stages"}
    bound_s = search_of(choices).least_step_s(None)
    assert found.of_stages["several stages"].least_s == bound_s
    assert found.step_time_s < bound_s <= min(times_with_stages_s(choices))


def test_a_plan_says_that_no_stages_were_found() -> None:
    """Both stages have the tied embedding, so none of them fits where shards of it do."""
    options = Options.of(microbatches=4, memory_limit=200_000, recompute="none")
    choices = choices_of("gpt2", (2,), SLOW, options)
    found = planned(choices)
    none = Alternative("several stages", None, "none fits")
    assert not found.searched and found.of_stages["several stages"] == none
    for candidate in choices.candidates():
        if len(candidate.stages) > 1:
            assert choices.evaluator.least_bytes(candidate) > 200_000


def test_recipes_are_priced_where_stages_are_fast() -> None:
    choices = choices_of("mlp", (4,), SLOW, Options.of(microbatches=16))
    found = planned(choices)
    assert found.searched and found.recipes
    assert any("Megatron" in name for name in found.of_stages)
    assert len(found.result.solved.stages) > 1


def test_recipes_that_cannot_be_among_the_best_are_not_priced() -> None:
    """Of four stages of five large blocks, one has two blocks, and the others wait for it."""
    with torch.device("meta"):
        model, batch = Chain([Block(1024) for _ in range(5)]), {"x": torch.empty(2**17, 1024)}
    analysis = Analysis.of(captured(model, batch, precision="model"))
    mesh = Mesh((4,), hardware="a100-80gb")
    hardware = hardware_of(mesh)

    def found(n_most: int | None, limit_s: float) -> tuple[list[Candidate], str]:
        said: list[str] = []
        search = joint_search_on(analysis, mesh, hardware, Options.of(), report=said.append)
        return recipe_candidates(search, None, n_most, limit_s), " ".join(said)

    every, all_said = found(None, math.inf)
    best, best_said = found(1, math.inf)
    assert best == every[:1] and "of 4 stages" in all_said and "of 4 stages" not in best_said
    assert found(None, 1e-9) == ([], "")
