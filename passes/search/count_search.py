"""The number of microbatches: the best of candidates that differ in nothing else."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from autopar.errors import InfeasibleError
from autopar.passes.inter import Candidate
from autopar.passes.search.evaluator import Evaluator, Scored
from autopar.passes.solvers.problem import within

# One more problem under a budget is solved only if it may gain this much (relative).
WORTH_REL = 0.01


def is_worth(least_s: float, incumbent_s: float) -> bool:
    """May what takes at least `least_s` be faster than the incumbent by `WORTH_REL`?"""
    return least_s < incumbent_s * (1 - WORTH_REL)


def best_count(
    evaluator: Evaluator, candidates: Sequence[Candidate], incumbent_s: float = math.inf
) -> Scored | InfeasibleError | float:
    """The best of candidates that differ only in their microbatches, fewest first.

    If memory does not bind, more microbatches only cost time. So the fewest whose fastest
    placements fit beat all larger numbers; bisection finds them. Smaller numbers fit only with
    slower placements. They are solved in descending order, until one is no faster than the best
    that may win, or cannot be.

    If no candidate can beat `incumbent_s`, even without a budget, the result is their lower bound,
    a float. If none fits, it is the error.
    """
    may_fit = (i for i, c in enumerate(candidates[:-1]) if evaluator.may_fit(c))
    start = next(may_fit, len(candidates) - 1)
    low, high, bound_s = start, len(candidates), 0.0
    if high - low > 1 and math.isfinite(incumbent_s):
        unlimited = evaluator.scored(candidates[start], None, incumbent_s)
        if unlimited.score_s > incumbent_s:
            return min(unlimited.score_s, unlimited.open_bound_s)
        if evaluator.bound_over_budget_s(candidates[start]) is None:
            high = start
    if low == high - 1:  # a single candidate: solve it under the budget at once
        low = high
    while low < high:
        middle = (low + high) // 2
        over_s = evaluator.bound_over_budget_s(candidates[middle])
        if over_s is None:
            high = middle
        else:
            bound_s, low = over_s, middle + 1
    best = evaluator.scored(candidates[low], None) if low < len(candidates) else None
    open_bound_s = math.inf
    for candidate in reversed(candidates[start:low]):
        if best is not None and best.score_s * (1 - WORTH_REL) <= bound_s:
            break
        limit_s = min(incumbent_s, math.inf if best is None else best.score_s)
        try:
            constrained = evaluator.scored(candidate, evaluator.budget_bytes, limit_s)
        except InfeasibleError as error:
            if best is None:
                return error
            break
        open_bound_s = min(open_bound_s, constrained.open_bound_s)
        if best is not None and constrained.score_s >= best.score_s:
            if best.score_s <= incumbent_s:
                break
            continue  # neither can win: what its solver found when it stopped says nothing
        best, bound_s = constrained, 0.0
    assert best is not None
    index = candidates.index(best.candidate)
    return replace(best, fallbacks=tuple(candidates[index + 1 :]), open_bound_s=open_bound_s)


def best_recomputed(
    evaluator: Evaluator, candidates: Sequence[Candidate], incumbent_s: float
) -> Scored | None:
    """The best of such candidates with recompute, if one is faster than `incumbent_s`.

    Candidates that fit without recompute are skipped. So are those that would lose even if
    activations needed no bytes, a lower bound. Fewer microbatches need more recompute, so the
    others are solved in descending order, until one is no faster.
    """
    best: Scored | None = None
    for candidate in reversed(_promising(evaluator, candidates, incumbent_s)):
        if within(evaluator.budget_bytes, evaluator.scored(candidate, None).size_bytes):
            continue
        limit_s = incumbent_s if best is None else best.score_s
        if not _may_win(evaluator, candidate, limit_s):
            continue
        try:
            found = evaluator.scored(candidate, evaluator.budget_bytes, limit_s)
        except InfeasibleError:
            continue
        if best is not None and found.score_s >= best.score_s:
            break
        if found.score_s < incumbent_s:
            best = replace(found, fallbacks=tuple(candidates[candidates.index(candidate) + 1 :]))
    return best


def _promising(
    evaluator: Evaluator, candidates: Sequence[Candidate], limit_s: float
) -> list[Candidate]:
    """The candidates that may be below `limit_s` if activations needed no bytes.

    If m microbatches cannot win, no multiple of m can: it allows no other placements, and costs
    more time.
    """
    found, pruned = list[Candidate](), list[int]()
    for candidate in candidates:
        if any(candidate.n_microbatches % m == 0 for m in pruned):
            continue
        if _may_win(evaluator, candidate, limit_s):
            found.append(candidate)
        else:
            pruned.append(candidate.n_microbatches)
    return found


def _may_win(evaluator: Evaluator, candidate: Candidate, limit_s: float) -> bool:
    """Can a candidate be below `limit_s` by `WORTH_REL`, if activations needed no bytes?"""
    worth_s = limit_s * (1 - WORTH_REL)
    try:
        if evaluator.scored(candidate, None, worth_s).score_s >= worth_s:
            return False
        return evaluator.without_activations(candidate, worth_s).score_s < worth_s
    except InfeasibleError:
        return False
