"""The joint search, refined: its best plans are solved, and correct its estimates.

    1. The few plans with the best estimates are solved exactly.
    2. The solved times of their stages replace the estimates. They also correct the estimates of
       other stages on the same view (`passes/inter/estimates.py`).
    3. This repeats with plans whose estimates are now below the best solved plan, until there are
       none.

Estimates of unsolved stages are optimistic, so small models are searched to the end.
`EXTRA_OPERATORS` limits the plans solved after the first round: the time of a solve grows with the
operators of the model, and estimates of large models are within a percent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from autopar.passes.inter import Candidate, JointSearch, SearchedPlan, StageSeconds, different
from autopar.passes.search.evaluator import Scored

# Limit on the operators of all plans that are solved after the first round.
EXTRA_OPERATORS = 1000
# A plan is pruned if its estimate exceeds this multiple of the best one.
PRUNE_RATIO = 1.05
# None: the candidate does not fit, or was pruned.
Score = Callable[[Candidate], Scored | None]


def refined_candidates(
    search: JointSearch,
    n_stages: int | None,
    n_best: int,
    score: Score,
    limit_s: Callable[[], float] = lambda: math.inf,
) -> Iterator[Candidate]:
    """The most promising plans with at least two stages, or with exactly `n_stages`.

    First the `n_best` by estimate, then those that the corrected estimates promote. Each is
    yielded, then `score` is called with it. Plans whose estimates exceed `limit_s` may be missing.

    Raises `BatchError` if the number of microbatches asked for does not divide the batch.
    """
    solved: set[SearchedPlan] = set()
    best_s = math.inf
    n_extra = EXTRA_OPERATORS // len(search.analysis.operators)
    n_next = n_best
    while n_next > 0:
        fresh = [plan for plan in search.plans(n_stages, limit_s()) if plan not in solved]
        most_s = best_s if solved else PRUNE_RATIO * min((p.estimate_s for p in fresh), default=0.0)
        batch = different([p for p in fresh if p.estimate_s <= most_s], n_next)
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
        for plan, seconds in learned:
            search.learn(plan, seconds)
        n_extra -= len(batch) if len(solved) > n_best else 0
        n_next = min(n_best, n_extra)
