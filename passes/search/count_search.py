"""How many microbatches: the best of candidates that differ in nothing else."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from autopar.errors import InfeasibleError
from autopar.passes.inter import Candidate
from autopar.passes.search.evaluator import Evaluator, Scored
from autopar.passes.solvers.problem import within

# A gain (relative) that is worth solving one more problem under a budget.
WORTH_REL = 0.01


def best_count(
    evaluator: Evaluator, tries: Sequence[Candidate], least_s: float = math.inf
) -> Scored | InfeasibleError | float:
    """The best of candidates that differ in their microbatches, given in rising order; the
    least score that any of them may have without a budget, where that alone is above `least_s`.

    Where memory does not bind, the fewest microbatches are fastest, because more of them only
    cost time: the first such count is found by bisection. Fewer than that are bought with slower
    placements; they are tried one by one while they are faster, or may be.
    """
    may_fit = (i for i, c in enumerate(tries[:-1]) if evaluator.may_fit(c))
    start = next(may_fit, len(tries) - 1)
    low, high, bound_s = start, len(tries), 0.0
    if high - low > 1 and math.isfinite(least_s):
        free = evaluator.scored(tries[start], None, least_s)
        if free.score_s > least_s:
            return free.score_s
        if evaluator.bound_over_budget_s(tries[start]) is None:
            high = start
    if low == high - 1:  # nothing to choose from: the budget may as well be there at once
        low = high
    while low < high:
        middle = (low + high) // 2
        over_s = evaluator.bound_over_budget_s(tries[middle])
        if over_s is None:
            high = middle
        else:
            bound_s, low = over_s, middle + 1
    best = evaluator.scored(tries[low], None) if low < len(tries) else None
    open_s = math.inf
    for candidate in reversed(tries[start:low]):
        if best is not None and best.score_s * (1 - WORTH_REL) <= bound_s:
            break
        limit_s = min(least_s, math.inf if best is None else best.score_s)
        try:
            bought = evaluator.scored(candidate, evaluator.budget_bytes, limit_s)
        except InfeasibleError as error:
            if best is None:
                return error
            break
        open_s = min(open_s, bought.open_s)
        if best is not None and bought.score_s >= best.score_s:
            break
        best, bound_s = bought, 0.0
    assert best is not None
    place = tries.index(best.candidate)
    return replace(best, others=tuple(tries[place + 1 :]), open_s=open_s)


def best_recomputed(
    evaluator: Evaluator, tries: Sequence[Candidate], least_s: float
) -> Scored | None:
    """The best of such candidates that recompute makes fit, or faster, and better than `least_s`.

    The fewer microbatches, the more must run again: they are tried from the most that do not fit as
    they are on down, while they get faster. None is faster than if activations needed no bytes.
    """
    best: Scored | None = None
    for candidate in reversed(_promising(evaluator, tries, least_s)):
        if within(evaluator.budget_bytes, evaluator.scored(candidate, None).size_bytes):
            continue
        limit_s = least_s if best is None else best.score_s
        if not _may_be_worth(evaluator, candidate, limit_s):
            continue
        try:
            found = evaluator.scored(candidate, evaluator.budget_bytes, limit_s)
        except InfeasibleError:
            continue
        if best is not None and found.score_s >= best.score_s:
            break
        if found.score_s < least_s:
            best = replace(found, others=tuple(tries[tries.index(candidate) + 1 :]))
    return best


def _promising(evaluator: Evaluator, tries: Sequence[Candidate], limit_s: float) -> list[Candidate]:
    """Those that may be below `limit_s` if activations needed no bytes. Where one is not, none is
    whose microbatches are parts of its: they allow no more placements, and only cost time."""
    found, hopeless = list[Candidate](), list[int]()
    for candidate in tries:
        if any(candidate.n_microbatches % m == 0 for m in hopeless):
            continue
        if _may_be_worth(evaluator, candidate, limit_s):
            found.append(candidate)
        else:
            hopeless.append(candidate.n_microbatches)
    return found


def _may_be_worth(evaluator: Evaluator, candidate: Candidate, limit_s: float) -> bool:
    """Would a candidate be solved for less than `limit_s`, if activations needed no bytes?"""
    worth_s = limit_s * (1 - WORTH_REL)
    try:
        if evaluator.scored(candidate, None, worth_s).score_s >= worth_s:
            return False
        return evaluator.without_activations(candidate, worth_s).score_s < worth_s
    except InfeasibleError:
        return False
