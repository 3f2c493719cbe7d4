"""The search for the number of microbatches, against solving every number."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import cast

import pytest

from autopar.errors import InfeasibleError
from autopar.passes.inter.candidate import Candidate
from autopar.passes.intra.chooser import Chosen
from autopar.passes.search.count_search import WORTH_REL, best_count, best_recomputed
from autopar.passes.search.evaluator import Evaluator, Scored
from autopar.program.strategy import Strategy

COUNTS = (1, 2, 3, 6, 12, 24)


class Made:
    """An evaluator with drawn costs for every number of microbatches.

    Like the costs of placements, they rise with the number. There are three: without a budget, if
    activations needed no bytes, and within the budget. `solved` is the set of requests."""

    budget_bytes = 1.0

    def __init__(self, seed: int) -> None:
        draw, self.solved = random.Random(seed), set[tuple[str, int]]()
        self.free: dict[int, float] = {}
        self.lean: dict[int, float] = {}
        for m in COUNTS:  # of more rows at once, more placements are allowed
            self.free[m] = max((self.free[k] for k in COUNTS if k < m and m % k == 0), default=1.0)
            self.free[m] += draw.choice((0.0, draw.random()))
            least = max((self.lean[k] for k in COUNTS if k < m and m % k == 0), default=0.0)
            self.lean[m] = max(least, self.free[m] + draw.choice((0.0, draw.random(), math.inf)))
        self.within = {m: self.lean[m] + draw.choice((0.0, 1.0, 9.0, math.inf)) / m for m in COUNTS}
        self.n_fits = draw.choice((3, 6, 12, 24, 99))

    def may_fit(self, candidate: Candidate) -> bool:
        return True

    def size_bytes(self, m: int) -> float:
        return 1.0 if m >= self.n_fits else 2.0

    def bound_over_budget_s(self, candidate: Candidate) -> float | None:
        m = candidate.n_microbatches
        return None if self.size_bytes(m) <= 1.0 else self.free[m]

    def scored(
        self, candidate: Candidate, budget_bytes: float | None, limit_s: float = math.inf
    ) -> Scored:
        m = candidate.n_microbatches
        self.solved.add(("whatever its bytes" if budget_bytes is None else "within", m))
        if budget_bytes is None or self.size_bytes(m) <= budget_bytes:
            return solution(candidate, self.free[m], self.size_bytes(m))
        return self._feasible(candidate, self.within[m])

    def without_activations(self, candidate: Candidate, limit_s: float = math.inf) -> Scored:
        self.solved.add(("without activations", candidate.n_microbatches))
        return self._feasible(candidate, self.lean[candidate.n_microbatches])

    def _feasible(self, candidate: Candidate, cost_s: float) -> Scored:
        if math.isinf(cost_s):
            raise InfeasibleError("too large")
        return solution(candidate, cost_s, 1.0)


def solution(candidate: Candidate, cost_s: float, size_bytes: float) -> Scored:
    def read() -> Strategy:
        raise AssertionError("nobody asks for placements")

    chosen = Chosen(cost_s, 0.0, 0.0, size_bytes, 1, 1, {}, {}, read)
    return Scored(candidate, (chosen,), cost_s)


TRIES = [Candidate("", (1,), (), m) for m in COUNTS]


@pytest.mark.parametrize("limit_s", [1.5, 2.0, 4.0, math.inf])
def test_what_recompute_makes_better_is_found_with_fewer_solves(limit_s: float) -> None:
    n_better = n_saved = 0
    for seed in range(200):
        made = Made(seed)
        best = best_recomputed(cast(Evaluator, made), TRIES, limit_s)
        expected, n_every = every_count(Made(seed), limit_s)
        assert (best and (best.candidate, best.score_s, best.fallbacks)) == expected
        n_better += best is not None
        n_saved += n_every - len(made.solved)
    assert n_better > 5
    assert n_saved > (0 if math.isinf(limit_s) else 200)


def every_count(
    made: Made, least_s: float
) -> tuple[tuple[Candidate, float, tuple[Candidate, ...]] | None, int]:
    """The same result, skipping no number, from the most microbatches down; and the solves."""
    best: tuple[Candidate, float, tuple[Candidate, ...]] | None = None
    for i, candidate in reversed(list(enumerate(TRIES))):
        limit_s = best[1] if best else least_s
        worth_s = limit_s * (1 - WORTH_REL)
        try:
            free = made.scored(candidate, None)
            if free.size_bytes <= 1.0 or free.score_s >= worth_s:
                continue
            if made.without_activations(candidate).score_s >= worth_s:
                continue
            found = made.scored(candidate, made.budget_bytes)
        except InfeasibleError:
            continue
        if best and found.score_s >= best[1]:
            break
        if found.score_s < least_s:
            best = candidate, found.score_s, tuple(TRIES[i + 1 :])
    return best, len(made.solved)


def test_the_fewest_microbatches_that_fit_as_they_are_fastest_need_no_others() -> None:
    made = Made(0)
    made.n_fits = 1
    best = best_count(cast(Evaluator, made), TRIES, incumbent_s=math.nextafter(made.free[1], 9.0))
    assert isinstance(best, Scored)
    assert best.candidate is TRIES[0] and best.fallbacks == tuple(TRIES[1:])
    assert made.solved == {("whatever its bytes", 1)}


class Stopping(Made):
    """Its solver stops at the limit, with any choice it has then; the bound is the limit."""

    def scored(
        self, candidate: Candidate, budget_bytes: float | None, limit_s: float = math.inf
    ) -> Scored:
        found = super().scored(candidate, budget_bytes, limit_s)
        if found.score_s < limit_s or budget_bytes is None:
            return found
        some_s = found.score_s * random.Random(found.score_s).uniform(1.0, 9.0)
        return replace(found, score_s=some_s, open_bound_s=limit_s)


def test_a_solver_that_stops_at_the_limit_hides_nothing_that_wins() -> None:
    n_better = 0
    for seed in range(4000):
        drawn = random.Random(seed)
        incumbent_s = drawn.uniform(1.0, 6.0)
        every = [
            best_count(cast(Evaluator, of(seed)), TRIES, incumbent_s) for of in (Made, Stopping)
        ]
        whole, stopped = every
        if isinstance(whole, Scored) and whole.score_s < incumbent_s:
            assert isinstance(stopped, Scored)
            assert (stopped.candidate, stopped.score_s) == (whole.candidate, whole.score_s)
            n_better += 1
    assert n_better > 20
