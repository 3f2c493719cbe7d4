"""What the joint search learns from stages that are solved."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cached_property

import numpy as np
import pytest

from autopar.mesh import Link
from autopar.options import Options
from autopar.passes.inter.attribution import Traffic
from autopar.passes.inter.candidate import Candidate
from autopar.passes.inter.estimates import Estimates
from autopar.passes.inter.joint import JointSearch, joint_search
from autopar.passes.inter.score import StageSeconds
from autopar.passes.inter.stage_search import SearchedPlan
from autopar.passes.inter.submeshes import places_of
from autopar.passes.inter.tables import StageTable
from autopar.passes.search.refined import refined_candidates
from tests.helpers.every_plan import Choices, analysis_of
from tests.helpers.machines import SLOW, cluster, two_tiers

REL = 1e-9
M = 16


class Searched(Choices):
    """An MLP on two nodes of four devices."""

    @cached_property
    def search(self) -> JointSearch:
        on = self.analysis, self.mesh, self.hardware, self.options
        found = joint_search(*on, self.hardware.memory_limit_bytes, None)
        assert found is not None
        return found


@pytest.fixture(scope="module")
def searched() -> Searched:
    return Searched(analysis_of("mlp"), two_tiers((2, 4), SLOW, 1e10), Options.of(microbatches=M))


def expected(costs: StageTable, search: JointSearch, at: tuple[int, int]) -> StageSeconds:
    return StageSeconds(*(float(costs.ranges(part)[at]) for part in ("time", "once")))


def test_what_was_solved_is_known_and_others_of_its_view_are_expected_to_be_like_it(
    searched: Searched,
) -> None:
    search = searched.search
    configs = search.tables(M)
    estimates, c = Estimates(), next(i for i in range(len(configs)))
    costs, other = configs[c], next(k for k in configs if k.view != configs[c].view)
    before = expected(costs, search, (1, 2))
    assert estimates.of(M, costs, 1, 2) == pytest.approx(before, rel=REL)
    faster = StageSeconds(0.8 * before.time_s, 0.8 * before.once_s)
    estimates.learn(M, configs, c, (1, 2), faster)
    assert estimates.of(M, costs, 1, 2) == faster
    alike = expected(costs, search, (1, 1))
    known = estimates.of(M, costs, 1, 1)
    assert known[:2] == pytest.approx([0.8 * x for x in alike[:2]], rel=REL)
    assert estimates.of(M, other, 1, 1) == pytest.approx(expected(other, search, (1, 1)), rel=REL)


def test_conversions_are_expected_once_they_were_paid(searched: Searched) -> None:
    """By the least share that was paid, so that estimates of what is not solved stay optimistic."""
    search = searched.search
    configs = search.tables(M)
    c = next(i for i, k in enumerate(configs) if k.conversions()[1, 1] > 0)
    costs, estimates = configs[c], Estimates()
    for share, at in ((0.7, (1, 1)), (0.4, (1, 2)), (0.9, (2, 2))):
        base = expected(costs, search, at)
        paid_s = share * float(costs.conversions()[at])
        estimates.learn(M, configs, c, at, StageSeconds(base.time_s + paid_s, base.once_s))
    base = expected(costs, search, (0, 1))
    time_s = base.time_s + 0.4 * float(costs.conversions()[0, 1])
    assert estimates.of(M, costs, 0, 1).time_s == pytest.approx(time_s, rel=REL)


def test_what_is_slower_than_a_limit_even_without_a_limit_of_memory_is_not_searched(
    searched: Searched,
) -> None:
    said: list[str] = []
    search = replace(searched.search, report=said.append)
    bound_s = search.bound_s(M, None)
    (free,) = search.plans(None, 0.99 * bound_s)
    assert free.estimate_s >= bound_s and not said
    found = search.plans(None, 1.01 * bound_s)
    assert said == [f"searching stages with {M} microbatches"]
    assert found == replace(searched.search).plans(None)


def test_the_search_ends_with_a_plan_that_nothing_unsolved_looks_better_than(
    searched: Searched,
) -> None:
    search, solved = searched.search, dict[str, float]()

    def score(candidate: Candidate) -> object:
        scored = searched.evaluator.scored(candidate, None)
        solved[plan_key(candidate)] = scored.score_s
        return scored

    given = list(refined_candidates(search, None, 2, score))  # type: ignore[arg-type]
    assert len(given) == len({plan_key(c) for c in given}) > 1
    best_s = min(solved.values())
    rest = [p for p in search.plans(None) if plan_key(search.candidate(p)) not in solved]
    assert all(plan.estimate_s > best_s for plan in rest)
    every = [c for c in searched.candidates() if len(c.stages) > 1]
    assert best_s <= min(searched.evaluator.scored(c, None).score_s for c in every) * (1 + REL)
    known = next(p for p in search.plans(None) if plan_key(search.candidate(p)) in solved)
    assert isinstance(known, SearchedPlan)
    score_s = solved[plan_key(search.candidate(known))]
    assert known.estimate_s == pytest.approx(score_s, rel=0.05)


def plan_key(candidate: Candidate) -> str:
    return f"{candidate.name} {candidate.ends}"


def test_places_in_a_node_say_which_links_messages_cross() -> None:
    hardware = Searched(
        analysis_of("mlp"), two_tiers((2, 4), (1e-8, 1e-10), 1e10), Options.of()
    ).hardware
    across, inside = hardware.links
    mesh = cluster(2, 4)
    assert [(sorted(p.offsets or ()), *p[1:]) for p in places_of(mesh, hardware, 1)] == [
        ([0], across, inside),
        ([3], inside, across),
        ([1, 2], inside, inside),
    ]
    assert [sorted(p.offsets or ()) for p in places_of(mesh, hardware, 2)] == [[0], [2], [1]]
    assert [tuple(p) for p in places_of(mesh, hardware, 4)] == [(None, across, across)]
    alone = cluster(4)
    assert [tuple(p) for p in places_of(alone, hardware, 2)] == [(None, inside, inside)]


def test_traffic_is_priced_on_any_link() -> None:
    """Two values of 30 bytes in all, of which one of 10 has a gradient."""
    traffic = Traffic(np.array([[2.0], [30.0], [1.0], [10.0]]))
    link = Link(1.0, 0.5)
    assert math.isclose(traffic.forward_s(link)[0], 17.0)
    assert math.isclose(traffic.backward_s(link)[0], 6.0)
