"""What rules plans of several stages out before anything is built: never more than they cost."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from autopar.mesh import Mesh
from autopar.options import Options
from autopar.passes.analysis.analysis import Analysis
from autopar.passes.inter.bounds import StageBounds
from autopar.passes.inter.candidate import Candidate
from autopar.passes.inter.joint import JointSearch
from autopar.passes.inter.recipes import recipe_candidates
from autopar.passes.inter.score import MessageSeconds, StageSeconds, score_s
from autopar.passes.inter.tables import TableMaker
from autopar.passes.search.planner import Planner
from autopar.passes.search.simulator import Simulator
from autopar.passes.solvers.stages.problem import StageProblem
from autopar.passes.solvers.stages.tables import least_span_s
from autopar.schedule import ORDERS
from tests.helpers.candidates import gpt2, recipes
from tests.helpers.captures import captured
from tests.helpers.machines import cluster, hardware_of
from tests.helpers.models.blocks import Block, Chain

SHAPES = [(4,), (2, 2), (2, 4)]


def search_on(mesh: Mesh) -> JointSearch:
    return JointSearch.of(gpt2(), mesh, hardware_of(mesh), Options.of(), 1e9)


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
    """Not even where stages differ much: then the closed form is above what is played."""
    n, each = len(times), np.full((len(times),) * 2, math.inf)
    np.fill_diagonal(each, times)
    nothing, time_s = np.zeros((n, n, 1)), each[:, :, None]
    problem = StageProblem(time_s, nothing, nothing, nothing, (1,), n, m)
    messages = [MessageSeconds(k, k + 1, 0.0, 0.0) for k in range(n - 1)]
    step_s = score_s(schedule, m, [StageSeconds(t, 0.0) for t in times], messages)
    assert least_span_s(problem) <= step_s * (1 + 1e-9) + 1e-12


@pytest.mark.parametrize("shape", SHAPES)
def test_no_plan_is_faster_than_its_bound(shape: tuple[int, ...]) -> None:
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


def said_of_stages() -> list[tuple[str, str]]:
    """Of a planned GPT-2 the alternatives of several stages, and what is said of each."""
    mesh = cluster(4)
    planner = Planner(gpt2(), mesh, Options.of())
    rows = planner.run().alternatives
    return [
        (row.name, row.note) for row in rows if "stages" in row.name or "Megatron, " in row.name
    ]


def test_nothing_is_built_where_bubbles_alone_take_too_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A second by the bound: more than one stage takes, where that fits as it is simulated."""
    for name in ("step_s", "balanced_s"):
        monkeypatch.setattr(StageBounds, name, lambda *_: 1.0)
    with monkeypatch.context() as patch:
        patch.delattr(TableMaker, "tables_for")
        patch.delattr(TableMaker, "recipe")
        assert said_of_stages() == [("several stages", "at least 1 s")]
    monkeypatch.setattr(Simulator, "simulated_if_fits", lambda self, scored: None)
    assert ("several stages", "at least 1 s") not in said_of_stages()


def test_recipes_are_left_where_no_stages_would_be_fast_without_a_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("step_s", "balanced_s"):
        monkeypatch.setattr(StageBounds, name, lambda *_: 0.0)
    mesh, said = cluster(4), list[str]()

    def n_priced() -> int:
        said.clear()
        Planner(gpt2(), mesh, Options.of(), report=said.append).run()
        return sum("recipe of" in text for text in said)

    assert n_priced() == 0
    monkeypatch.setattr(JointSearch, "unlimited_s", 0.0)
    assert n_priced() > 0


def test_recipes_that_cannot_be_among_the_best_are_not_priced() -> None:
    """Five large blocks: four stages wait for the one that has two."""
    with torch.device("meta"):
        model, batch = Chain([Block(1024) for _ in range(5)]), {"x": torch.empty(2**17, 1024)}
    analysis = Analysis.of(captured(model, batch, precision="model"))
    mesh = Mesh((4,), hardware="a100-80gb")
    hardware = hardware_of(mesh)

    def told(n_most: int | None, limit_s: float) -> tuple[list[Candidate], str]:
        said: list[str] = []
        budget_bytes = hardware.memory_limit_bytes
        search = JointSearch.of(
            analysis, mesh, hardware, Options.of(), budget_bytes, report=said.append
        )
        return recipe_candidates(search, None, n_most, limit_s), " ".join(said)

    every, all_said = told(None, math.inf)
    best, best_said = told(1, math.inf)
    assert best == every[:1] and "of 4 stages" in all_said and "of 4 stages" not in best_said
    assert told(None, 1e-9) == ([], "")


def test_a_plan_says_that_no_stages_were_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Planner, "_with_stages", lambda self, n_stages: iter(()))
    monkeypatch.setattr(StageBounds, "step_s", lambda *_: 0.0)
    assert said_of_stages() == [("several stages", "none found that fits")]
