"""The joint search, made surer by solving what it proposes: proposals, solved, taken into account.

    1. the best few plans by the estimates are solved exactly
    2. what their stages take replaces the estimates, and says how far those of others of the same
       view may be off (`estimates.py`)
    3. again, with plans that are now expected to be faster than the fastest that is solved, until
       there is none

Estimates of what is not solved are hopeful, so small models are searched to the end; how many more
plans are solved than in the first round is limited by `EXTRA_OPERATORS`, because solving takes as
long as a model has operators, and what is expected of large ones is within a percent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from autopar.passes.inter import Candidate, JointSearch, SearchedPlan, StageSeconds, different
from autopar.passes.search.evaluator import Scored

# Of plans that are solved after the first round, all together.
EXTRA_OPERATORS = 1000
# What is expected to take this much longer than the best known is not solved.
HOPELESS = 1.05
# None: what was proposed does not fit after all.
Score = Callable[[Candidate], Scored | None]


def refined_candidates(
    search: JointSearch,
    n_stages: int | None,
    n_best: int,
    score: Score,
    limit_s: Callable[[], float] = lambda: math.inf,
) -> Iterator[Candidate]:
    """The `n_best` most promising plans of at least two stages, or of exactly `n_stages`; then
    those that solving them shows to be as promising. `score` is asked of each after it was given;
    what is expected to take longer than `limit_s` need not be found.

    Raises `BatchError` when the number of microbatches asked for does not divide the batch.
    """
    solved: set[SearchedPlan] = set()
    best_s = math.inf
    n_extra = EXTRA_OPERATORS // len(search.analysis.operators)
    n_wanted = n_best
    while n_wanted > 0:
        fresh = [plan for plan in search.plans(n_stages, limit_s()) if plan not in solved]
        most_s = best_s if solved else HOPELESS * min((p.estimate_s for p in fresh), default=0.0)
        batch = different([p for p in fresh if p.estimate_s <= most_s], n_wanted)
        if not batch:
            return
        learned = []
        for plan in batch:
            candidate = search.candidate(plan)
            yield candidate
            solved.add(plan)
            scored = score(candidate)
            if scored is None:
                continue
            best_s = min(best_s, scored.score_s)
            m = plan.n_microbatches
            learned.append(
                (
                    plan,
                    [
                        StageSeconds((c.objective_s - c.once_s) / m, c.once_s)
                        for c in scored.choices
                    ],
                )
            )
        for plan, worked in learned:
            search.learn(plan, worked)
        n_extra -= len(batch) if len(solved) > n_best else 0
        n_wanted = min(n_best, n_extra)
