"""Lower bounds on plans with several stages: they hold, and the planner prunes by them."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from autopar.cost.simulate import PartWork, SplitBackward, StageTimes, simulate
from autopar.errors import InfeasibleError
from autopar.mesh import LogicalMesh, Mesh
from autopar.options import Options
from autopar.passes.inter import (
    Candidate,
    PipelineOrder,
    PipelineSpace,
    StagePlan,
    StageSearch,
    equal_pipelines,
    shared_step_bound_s,
    step_bound_s,
)
from autopar.passes.search import Planner, PlanningResult
from autopar.passes.search.several_stages import SeveralStages
from autopar.passes.solvers.stages import StageChoice
from autopar.plans import Alternative
from autopar.schedule import (
    CHUNKS,
    ORDERS,
    SPLITS_BACKWARD,
    Transfer,
    devices_of,
    fewest_microbatches,
    place,
)
from tests.helpers.candidates import gpt2, pipeline_space
from tests.helpers.every_plan import Choices, choices_of
from tests.helpers.machines import FAST, SLOW, TIERED, cluster, hardware_of
from tests.helpers.nightly import nightly, one_in

REL = 1e-9


def space_of(choices: Choices, budget_bytes: float | None = None) -> PipelineSpace:
    on = choices.analysis, choices.mesh, choices.hardware, choices.options
    return pipeline_space(*on, budget_bytes)


@hypothesis.given(
    st.lists(st.tuples(st.floats(0.0, 10.0), st.floats(0.0, 1.0)), min_size=2, max_size=5),
    st.integers(1, 12),
    st.sampled_from(("1f1b", "gpipe")),
    st.floats(0.0, 20.0),
    st.lists(st.floats(0.0, 20.0), min_size=4, max_size=4),
)
def test_no_schedule_is_faster_than_the_span(
    times: list[tuple[float, float]], m: int, schedule: str, once_s: float, sent_s: list[float]
) -> None:
    """However much stages and messages differ, and however their seconds divide into forward and
    backward; with work of once a step on the first."""
    n, each_s = len(times), np.array([time_s for time_s, _ in times])
    script = place(ORDERS[schedule](range(n), m), [Transfer(k, k + 1, True) for k in range(n - 1)])
    stages = [
        StageTimes(
            n_ranks=1, before=PartWork(0.0 if k else once_s / 4),
            forward=PartWork(time_s * share), after=PartWork(0.0 if k else once_s / 4),
            backward=PartWork(time_s * (1 - share)), update_s=0.0 if k else once_s / 2,
        )
        for k, (time_s, share) in enumerate(times)
    ]  # fmt: skip
    step_s = simulate(
        script, stages, lambda send: sent_s[min(send.stage, send.partner.stage)]
    ).step_time_s
    passed_s = np.array([*(2 * s for s in sent_s[: n - 1]), 0.0])
    longest_s = np.maximum(m * each_s, m * passed_s / 2)
    found = step_bound_s(longest_s, m * each_s, m, schedule == "1f1b", once_s, passed_s)
    assert found <= step_s * (1 + 1e-9) + 1e-12


@hypothesis.given(
    st.sampled_from(("interleaved", "zero-bubble", "zero-bubble-v", "dualpipe-v")),
    st.integers(1, 4),
    st.integers(2, 3),
    st.integers(0, 9),
    st.lists(st.tuples(*[st.floats(0.0, 10.0)] * 3), min_size=12, max_size=12),
    st.lists(st.floats(0.0, 5.0), min_size=12, max_size=12),
)
def test_no_order_on_shared_devices_is_faster(
    order: str, p: int, v: int, more: int, times: list[tuple[float, ...]], sent_s: list[float]
) -> None:
    """However much stages, their forwards and both parts of their backwards, and messages
    differ."""
    fewest, most = CHUNKS[order]
    devices = devices_of(order, p, min(max(v, fewest), most or v))
    m, n, splits = fewest_microbatches(order, p) + more, len(devices), order in SPLITS_BACKWARD
    script = place(ORDERS[order](devices, m), [Transfer(k, k + 1, True) for k in range(n - 1)])
    parts_s, no_work = np.array(times[:n]), PartWork(0.0)
    stages = [
        StageTimes(
            n_ranks=1, before=no_work, forward=PartWork(forward_s),
            backward=SplitBackward(PartWork(input_s), PartWork(weight_s)) if splits
            else PartWork(input_s + weight_s),
            after=no_work, update_s=0.0,
        )
        for forward_s, input_s, weight_s in times[:n]
    ]  # fmt: skip
    step_s = simulate(
        script, stages, lambda send: sent_s[min(send.stage, send.partner.stage)]
    ).step_time_s
    is_sent = np.append(np.diff(devices) != 0, False)
    added_s = parts_s[:, 0] if splits else parts_s.sum(axis=1)
    added_s = added_s + is_sent * np.array(sent_s[:n]) * (1 if splits else 2)
    work_s = m * parts_s.sum(axis=1)
    assert shared_step_bound_s(work_s, work_s, added_s, devices) <= step_s * (1 + 1e-9) + 1e-12


@pytest.mark.parametrize(
    ("order", "n_chunks", "bubble_s"),
    [("interleaved", 3, 9.0), ("zero-bubble", 1, 3.0), ("zero-bubble-v", 2, 3.0),
     ("dualpipe-v", 2, 3.0)],
)  # fmt: skip
def test_equal_stages_have_the_bubbles_of_the_papers(
    order: str, n_chunks: int, bubble_s: float
) -> None:
    """4 devices whose stages take a second for a forward and for each part of a backward: the
    bound is the formula of `autopar/schedule/orders.py`."""
    m, devices = 16, devices_of(order, 4, n_chunks)
    work_s, n = np.full(len(devices), 3.0 * m), len(devices)
    added_s = np.full(n, 1.0 if order in SPLITS_BACKWARD else 3.0)
    found_s = shared_step_bound_s(work_s, work_s, added_s, devices)
    assert found_s == pytest.approx(3.0 * m * n_chunks + bubble_s)


@pytest.mark.parametrize("n", [2, 3, 5])
def test_equal_stages_take_their_span(n: int) -> None:
    """m + n - 1 microbatches in 1F1B (Narayanan et al., SC 2021), with more microbatches than
    stages."""
    each_s, m = np.full(n, 3.0), n + 1
    assert step_bound_s(m * each_s, m * each_s, m, True) == pytest.approx((m + n - 1) * 3.0)
    assert step_bound_s(m * each_s, m * each_s, m, False) == pytest.approx((m + n - 1) * 3.0)


@nightly
@pytest.mark.parametrize("shape", [(2, 2), (4,), (2, 4)])
def test_a_recipe_is_bounded_by_its_layers(shape: tuple[int, ...]) -> None:
    """Its own bounds are at least those of all pipelines, and at most its simulated step."""
    mesh = cluster(*shape)
    space = pipeline_space(gpt2(), mesh, hardware_of(mesh), Options.of(recompute="none"))
    choices = Choices(gpt2(), mesh, Options.of(recompute="none"))
    recipes = equal_pipelines(space)
    assert recipes
    for recipe in recipes:
        assert 0 < recipe.shared_s <= recipe.layered_s * (1 + REL) < math.inf
        if recipe.view.n_ranks in space.sizes and recipe.space.layers == space.layers:
            assert space.least_step_s(recipe.n_microbatches) <= recipe.shared_s * (1 + REL)
        placed = choices.evaluator.placed(recipe.candidate, None)
        step_s = choices.simulator.simulate_once(placed).step_time_s
        assert recipe.layered_s <= step_s * (1 + REL), recipe.candidate.name


Case = tuple[str, tuple[int, ...], tuple[float, float], int]
CASES: list[Case] = [
    ("mlp", (4,), TIERED, 16),
    ("mlp", (4,), FAST, 1),
    ("mlp", (2, 2), TIERED, 16),
    ("gpt2", (2,), SLOW, 4),
]


def stages_of(search: StageSearch, candidate: Candidate) -> tuple[StageChoice, ...]:
    """A candidate's stages, as the search knows them."""

    def kind(view: LogicalMesh) -> object:
        return [(view.sizes[a], view.links[a]) for a in view.active_axes]

    kinds = [kind(view) for view in search.space.views]
    lasts = [search.space.layers.ends.index(end) for end in candidate.ends]
    firsts = [0, *(last + 1 for last in lasts)]
    views = [kinds.index(kind(layout.view)) for layout in candidate.stages]
    return tuple(map(StageChoice, firsts, lasts, views))


def planner_of(choices: Choices) -> Planner:
    return Planner(choices.analysis, choices.mesh, choices.hardware, choices.options)


def spans_of(choices: Choices, space: PipelineSpace, candidate: Candidate) -> list[float]:
    """What is known of one pipeline on every level: shared, free, budget, then solved."""
    m = candidate.n_microbatches
    search = StageSearch(space, m, math.inf)
    several = SeveralStages(planner_of(choices).levels, space)
    stages, spans = stages_of(search, candidate), list[float]()
    while True:
        spans.append(search.least_of(stages))
        plan = StagePlan(spans[-1], stages)
        if not search.tighten(plan, several.solved):
            return spans


@one_in(4)
@pytest.mark.parametrize(("model", "shape", "s_per_byte", "m"), CASES)
def test_no_simulated_step_is_below_its_bound(
    model: str, shape: tuple[int, ...], s_per_byte: tuple[float, float], m: int
) -> None:
    """Of every plan with stages, on every level."""
    check_bounds(choices_of(model, shape, s_per_byte, Options.of(microbatches=m)))


@nightly
@pytest.mark.parametrize(("model", "shape", "s_per_byte", "m"), CASES)
def test_no_simulated_compiled_step_is_below_its_bound(
    model: str, shape: tuple[int, ...], s_per_byte: tuple[float, float], m: int
) -> None:
    options = Options.of(microbatches=m, compile="regions")
    check_bounds(choices_of(model, shape, s_per_byte, options))


def check_bounds(choices: Choices) -> None:
    m = choices.options.microbatches
    assert isinstance(m, int)
    space, nearest = space_of(choices), [0.0, 0.0, 0.0]
    for candidate in choices.candidates():
        if len(candidate.stages) == 1:
            continue
        step_time_s = choices.simulated(candidate).step_time_s
        spans = spans_of(choices, space, candidate)
        assert spans == sorted(spans) and len(spans) > 3
        assert space.least_step_s(m) <= spans[0] * (1 + REL)
        assert spans[-1] <= step_time_s * (1 + REL), candidate.name
        for at, span_s in enumerate((spans[0], spans[1], spans[-1])):
            nearest[at] = max(nearest[at], span_s / step_time_s)
    assert 0.75 < nearest[0] <= nearest[1] <= nearest[2] and nearest[2] > 0.9


@nightly
def test_no_simulated_step_within_little_memory_is_below_its_bound() -> None:
    """Most stages must run again: with gpipe, they keep all microbatches."""
    options = {"microbatches": 8, "schedule": "gpipe"}
    free = choices_of("gpt2", (2, 2), TIERED, Options.of(**options))
    few = [c for c in free.candidates() if len(c.stages) > 1][::12]
    limit = int(0.6 * min(free.simulated(c).peak_bytes for c in few))
    choices = choices_of("gpt2", (2, 2), TIERED, Options.of(memory_limit=limit, **options))
    space = space_of(choices, limit)
    n_fit = 0
    for candidate in few:
        spans = spans_of(choices, space, candidate)
        try:
            placed = choices.evaluator.placed(candidate, limit)
        except InfeasibleError:
            assert math.isinf(spans[-1])
            continue
        n_fit += 1
        assert spans[-1] <= choices.simulator.simulate_once(placed).step_time_s, candidate.name
    assert 2 <= n_fit < len(few)


@one_in(3)
@pytest.mark.parametrize(
    "order", [PipelineOrder("interleaved", 2), PipelineOrder("zero-bubble"),
    PipelineOrder("zero-bubble-v", 2)],
)  # fmt: skip
def test_stages_of_a_device_are_bounded_by_its_memory(order: PipelineOrder) -> None:
    """The bounds of every level hold for every pipeline that fits. In a tenth of the memory the
    last one is larger, and the state of one device alone is too much."""
    options = {"microbatches": 8}
    free = choices_of("gpt2", (2, 2), TIERED, Options.of(**options))
    every = equal_pipelines(space_of(free), "search", [order])
    limit = int(0.8 * max(free.simulated(of.candidate).peak_bytes for of in every))
    choices, n_fit = replace(free, options=Options.of(memory_limit=limit, **options)), 0
    tight = equal_pipelines(space_of(choices, limit / 8), "search", [order])
    for of, within in zip(
        equal_pipelines(space_of(choices, limit), "search", [order]), tight, strict=True
    ):
        stage_s = partial(choices.evaluator.priced_stage_s, of.candidate)
        staged_s = of.staged_s(stage_s, math.inf)
        assert not within.may_fit
        assert within.staged_s(stage_s, math.inf) > staged_s * 1.1
        try:
            step_s = choices.simulated(of.candidate).step_time_s
        except InfeasibleError:
            continue
        n_fit += 1
        assert of.may_fit
        for bound_s in (of.shared_s, of.layered_s, staged_s):
            assert 0 < bound_s <= step_s * (1 + REL), of.candidate.name
    assert n_fit


# -- what the planner leaves out -------------------------------------------------------------------


def planned(choices: Choices) -> tuple[PlanningResult, dict[str, Alternative]]:
    """A plan, and what is said of alternatives with stages."""
    result = planner_of(choices).run()
    return result, {row.name: row for row in result.alternatives if "stages" in row.name}


def times_with_stages_s(choices: Choices) -> list[float]:
    """Of every plan with stages that fits."""
    found = choices.step_times_s()
    return [time_s for name, time_s in found.items() if " | " in name]


def test_no_stages_are_searched_where_bubbles_alone_take_too_long() -> None:
    """Only one stage works at a time; fast links make one stage the best."""
    options = Options.of(microbatches=1, recompute="none")
    choices = choices_of("mlp", (4,), FAST, options)
    result, of_stages = planned(choices)
    assert result.stats.n_configurations == 0
    assert set(of_stages) == {"several stages", "Megatron of several stages"}
    bound_s = space_of(choices).least_step_s(1)
    assert of_stages["several stages"].least_s == bound_s
    assert result.solved.step_time_s < bound_s <= min(times_with_stages_s(choices))


@nightly
def test_a_plan_says_that_no_stages_were_found() -> None:
    """Both stages have the tied embedding, so none of them fits where shards of it do."""
    options = Options.of(microbatches=4, memory_limit=200_000, recompute="none")
    choices = choices_of("gpt2", (2,), SLOW, options)
    _, of_stages = planned(choices)
    assert of_stages["several stages"].step_time_s is None
    for candidate in choices.candidates():
        if len(candidate.stages) > 1:
            assert choices.evaluator.least_bytes(candidate) > 200_000


def test_stages_are_found_where_they_are_fast() -> None:
    choices = choices_of("mlp", (4,), SLOW, Options.of(microbatches=16))
    result, of_stages = planned(choices)
    assert result.stats.n_configurations > 0
    assert any("Megatron" in name for name in of_stages)
    assert len(result.solved.stages) > 1


@nightly
def test_recipes_that_cannot_be_among_the_best_are_not_solved() -> None:
    """Four stages of four devices each wait for slow messages between microbatches of one row."""
    mesh = Mesh((4,), hardware="a100-80gb")
    recipes = equal_pipelines(pipeline_space(gpt2(), mesh, hardware_of(mesh), Options.of()))
    result, of_stages = planned(Choices(gpt2(), mesh, Options.of()))
    too_slow = [r for r in recipes if r.shared_s > result.solved.step_time_s * 1.02]
    assert too_slow
    for recipe in too_slow:
        assert recipe.candidate.name not in of_stages
