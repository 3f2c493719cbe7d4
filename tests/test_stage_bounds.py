"""What rules plans of several stages out before anything is built: never more than they cost."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from autopar.binding import predict_on
from autopar.mesh import Mesh
from autopar.options import Options
from autopar.passes.analysis import Analysis
from autopar.passes.joint import JointSearch
from autopar.passes.layout import Candidate
from autopar.passes.planner import Planner
from autopar.passes.recipes import recipe_candidates
from autopar.passes.stage_bounds import StageBounds
from autopar.passes.stage_costs import CostMaker
from tests.captures import captured
from tests.test_joint import cluster, gpt2, hardware_of
from tests.test_layers import Block, Chain

SHAPES = [(4,), (2, 2), (2, 4)]


def search_on(mesh: Mesh) -> JointSearch:
    return JointSearch.of(gpt2(), mesh, hardware_of(mesh), Options.of(), 1e9)


def test_the_bound_is_that_of_the_closed_form_over_all_plans() -> None:
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

    def cost_s(plan: list[tuple[int, int, int]]) -> float:
        times = [shared[a, b - 1] / (m * n) + 1.0 for a, b, n in plan]
        return sum(times) + (m - 1) * max(times)

    found = bounds.step_s(cluster(4), (1, 2), m, None)
    assert found == pytest.approx(min(map(cost_s, plans())))
    assert bounds.balanced_s((1, 2), 2, m) == pytest.approx(cost_s([(0, 2, 2), (2, 3, 2)]))


@pytest.mark.parametrize("shape", SHAPES)
def test_no_plan_is_faster_than_its_bound(shape: tuple[int, ...]) -> None:
    mesh = cluster(*shape)
    search = search_on(mesh)
    sizes = [n for n in (1, 2, 4) if n < mesh.n_ranks]
    for m in search.counts():
        bound_s, free_s = search.bounds.step_s(mesh, sizes, m, None), search.bound_s(m, None)
        assert 0 < bound_s <= free_s < math.inf
    found = recipe_candidates(gpt2(), mesh, hardware_of(mesh), Options.of())
    for candidate in found:
        last = [search.layers.ends.index(end) for end in candidate.ends]
        n_ranks, m = candidate.stages[0].view.n_ranks, candidate.n_microbatches
        assert search.bounds.balanced_s(last, n_ranks, m) <= candidate.estimate_s


def test_nothing_is_built_where_bubbles_alone_take_too_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mesh = cluster(4)
    search = search_on(mesh)
    least_s = min(search.bounds.step_s(mesh, (1, 2), m, None) for m in search.counts())
    with monkeypatch.context() as patch:
        patch.delattr(CostMaker, "searched")
        assert search.plans(None, least_s * 0.999) == []
    assert search.plans(None, least_s * 1.001) != []


def test_recipes_that_cannot_be_among_the_best_are_not_priced() -> None:
    """Five large blocks: four stages wait for the one that has two."""
    with torch.device("meta"):
        model, batch = Chain([Block(1024) for _ in range(5)]), {"x": torch.empty(2**17, 1024)}
    analysis = Analysis.of(captured(model, batch, precision="model"))
    mesh = Mesh((4,), hardware="a100-80gb")
    hardware, options = hardware_of(mesh), Options.of()

    def recipes(n_most: int | None, limit_s: float) -> tuple[list[Candidate], str]:
        said: list[str] = []
        found = recipe_candidates(
            analysis, mesh, hardware, options, None, said.append, n_most, limit_s
        )
        return found, " ".join(said)

    every, all_said = recipes(None, math.inf)
    best, best_said = recipes(1, math.inf)
    assert best == every[:1] and "of 4 stages" in all_said and "of 4 stages" not in best_said
    assert recipes(None, 1e-9) == ([], "")


def test_a_plan_says_that_no_stages_were_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slower by the bound or, where the bound does not say so, none that fits."""
    monkeypatch.setattr(Planner, "_with_stages", lambda self, n_stages: iter(()))

    def said() -> list[str]:
        mesh = cluster(4)
        predict = predict_on(mesh, gpt2(), "adamw", ())
        planner = Planner(gpt2(), mesh, Options.of(), predict)
        return [row.note for row in planner.run().alternatives if row.name == "several stages"]

    assert said() == ["none found that fits"]
    monkeypatch.setattr(JointSearch, "least_step_s", lambda self, n_stages: 1.0)
    assert said() == ["at least 1 s"]
