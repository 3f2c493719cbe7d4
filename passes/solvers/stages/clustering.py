"""Operators grouped into layers, the units that pipeline stages are made of.

n operators in execution order become L layers of consecutive operators; `cut_bytes[i]` crosses the
boundary between operators i and i + 1. Every layer's flops are at most (1 + delta) times the mean,
and the largest cut is minimised. With G(r, k) for the first k operators in r layers:

    G(r, k) = min over i < k, flops(i..k-1) <= (1 + delta) total / L  of
              max(G(r-1, i), cut_bytes[i-1])                                  (`_least_largest`)

Many partitions attain the optimum. The most even of them is taken: the same recurrence, over the
boundaries whose cut is at most the optimum, minimises the sum of squared flops (`_most_even`).
Among equals, the one that cuts earliest from the back is taken. Source: Zheng et al., "Alpa", OSDI
2022, section 5.2.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from autopar.arrays import Array, Codes
from autopar.passes.solvers.problem import BUDGET_REL, Infeasible, ProblemError, compiled


@dataclass(frozen=True)
class Clustering:
    """`ends[l]` is the number of operators in layers 0..l; `largest_cut_bytes` 0 for one layer."""

    ends: tuple[int, ...]
    largest_cut_bytes: float
    largest_flops: float


def cluster_operators(
    flops: Sequence[float], cut_bytes: Sequence[float], n_layers: int, delta: float = 0.5
) -> Clustering | Infeasible:
    """The partition of least largest cut within the limit on flops; `Infeasible` names the least
    delta.

    Raises `ProblemError` for NaN, negative or infinite numbers, a wrong number of cuts, fewer
    operators than layers.
    """
    work, cuts = np.array(flops, dtype=float), np.array(cut_bytes, dtype=float)
    n = len(work)
    if not 1 <= n_layers <= n or len(cuts) != n - 1:
        raise ProblemError(
            f"{n} operators with {len(cuts)} boundaries cannot form {n_layers} layers",
            hint="a layer has at least one operator, a boundary lies between two",
        )
    for name, array in (("flops", work), ("cut_bytes", cuts), ("delta", np.array([delta]))):
        if not (np.isfinite(array).all() and (array >= 0).all()):
            raise ProblemError(f"{name}: a value is NaN, infinite or negative")
    prefix = _prefix(work)
    mean = prefix[-1] / n_layers
    starts = _window(prefix, (1 + delta) * mean * (1 + BUDGET_REL))
    # cuts[i - 1] is paid where a layer begins at operator i; nothing is paid at 0.
    paid = np.concatenate(([0.0], cuts))
    largest = _least_largest(paid, np.array(starts, dtype=np.intp), n_layers)
    if math.isinf(largest):
        least = least_flops(work.tolist(), n_layers)
        return Infeasible(
            f"no {n_layers} layers of at most {1 + delta:g} times the mean of {mean:g} flops;"
            f" the least possible delta is {least / mean - 1:.6g}",
            None,
        )
    ends = _most_even(prefix, paid <= largest, starts, n_layers)
    of_layers = np.diff(prefix[[0, *ends]])
    cut = max((float(cuts[e - 1]) for e in ends[:-1]), default=0.0)
    return Clustering(tuple(ends), cut, float(of_layers.max()))


def least_flops(flops: Sequence[float], n_layers: int) -> float:
    """The least possible flops of the largest of `n_layers` layers, at most as many as operators.

    By bisection on a limit. Filling each layer up to the limit in turn gives the fewest layers.
    Fewer than `n_layers` can be split further.
    """
    prefix = _prefix(np.array(flops, dtype=float))
    low, high = 0.0, float(prefix[-1])
    while low < (limit := low + (high - low) / 2) < high:
        largest = _largest_of_fewest(prefix, limit, n_layers)
        if largest is None:
            low = limit
        else:
            high = largest
    return high


def _prefix(work: Array) -> Array:
    """[operators + 1]: flops of the first k operators, each sum rounded once."""
    exact = itertools.accumulate(map(Fraction, work.tolist()), initial=Fraction(0))
    return np.array([float(total) for total in exact])


def _window(prefix: Array, limit_flops: float) -> list[int]:
    """For each k the least i such that operators i..k-1 stay within the limit."""
    # Flops are not negative, so the least i never decreases.
    out = [0]
    for k in range(1, len(prefix)):
        i = out[-1]
        while prefix[k] - prefix[i] > limit_flops:
            i += 1
        out.append(i)
    return out


@compiled
def _least_largest(paid: Array, starts: Codes, n_layers: int) -> float:
    """G(L, n): the least largest cut; infinite where the limit on flops allows nothing."""
    n = len(paid)
    table = np.full((n + 1, n_layers + 1), np.inf)
    table[0, 0] = 0.0
    for k in range(1, n + 1):
        here = table[k]
        for i in range(starts[k], k):
            before, cut = table[i], paid[i]
            for r in range(n_layers):
                here[r + 1] = min(here[r + 1], max(before[r], cut))
    return table[n, n_layers]


def _most_even(prefix: Array, may_begin: np.ndarray, starts: list[int], n_layers: int) -> list[int]:
    """The ends of the layers of least squared flops that begin only where they may."""
    n = len(may_begin)
    share = prefix / max(prefix[-1], 1.0)
    closed = np.where(may_begin, 0.0, np.inf)
    table = np.full((n_layers + 1, n + 1), np.inf)
    table[0, 0] = 0.0
    for k in range(1, n + 1):
        if (i := starts[k]) < k:
            squares = (share[k] - share[i:k]) ** 2 + closed[i:k]
            table[1:, k] = (table[:-1, i:k] + squares).min(axis=1)
    ends = [n]
    for r in range(n_layers, 1, -1):
        k = ends[0]
        i = starts[k]
        squares = (share[k] - share[i:k]) ** 2 + closed[i:k]
        ends.insert(0, i + int((table[r - 1, i:k] + squares).argmin()))
    return ends


def _largest_of_fewest(prefix: Array, limit_flops: float, n_layers: int) -> float | None:
    """The largest flops among the fewest layers within a limit; None: that takes more than
    `n_layers`."""
    start, largest = 0, 0.0
    for _ in range(n_layers):
        end = int(np.searchsorted(prefix - prefix[start], limit_flops, side="right")) - 1
        if end == start:  # one operator alone is above it
            return None
        largest = max(largest, float(prefix[end] - prefix[start]))
        if end == len(prefix) - 1:
            return largest
        start = end
    return None
