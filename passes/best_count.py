"""How many microbatches: the best of candidates that differ in nothing else."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from autopar.errors import InfeasibleError
from autopar.passes.evaluate import Evaluator, Scored
from autopar.passes.layout import Candidate
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
    start = next((i for i, c in enumerate(tries) if evaluator.may_fit(c)), len(tries) - 1)
    low, high, bound_s = start, len(tries), 0.0
    if high - low > 1 and math.isfinite(least_s):
        free_s = evaluator.scored(tries[start], None).score_s
        if free_s > least_s:
            return free_s
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
        if best is not None and bought.score_s >= best.score_s:
            break
        best, bound_s = bought, 0.0
    assert best is not None
    place = tries.index(best.candidate)
    return replace(best, others=tuple(tries[place + 1 :]))


def best_recomputed(
    evaluator: Evaluator, tries: Sequence[Candidate], least_s: float
) -> Scored | None:
    """The best of such candidates that recompute makes fit, or faster, and better than `least_s`.

    The fewer microbatches, the more must run again: they are tried from the most that do not fit as
    they are on down, while they get faster. None is faster than if activations needed no bytes.
    """
    best: Scored | None = None
    for i, candidate in reversed(list(enumerate(tries))):
        try:
            free = evaluator.scored(candidate, None)
        except InfeasibleError:
            continue
        if within(evaluator.budget_bytes, free.size_bytes):
            continue
        limit_s = least_s if best is None else best.score_s
        worth_s = limit_s * (1 - WORTH_REL)
        try:
            if free.score_s >= worth_s:
                continue
            if evaluator.without_activations(candidate, worth_s).score_s >= worth_s:
                continue
            found = evaluator.scored(candidate, evaluator.budget_bytes, limit_s)
        except InfeasibleError:
            continue
        if best is not None and found.score_s >= best.score_s:
            break
        if found.score_s < least_s:
            best = replace(found, others=tuple(tries[i + 1 :]))
    return best
