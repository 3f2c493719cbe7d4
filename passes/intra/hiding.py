"""What a step takes if compute hides communication, and how the solver weighs it.

A choice of placements has, in seconds of a step on one stage,

    c    compute: the operators
    z    ZeRO-3's gathers and reductions, and gradients returned per microbatch
    s    gradients returned once a step
    r    all else, which compute waits for

Of z a share a may run beside compute, of s a share h beside the last of m backwards, which is two
thirds of a microbatch (`hidden_shares` of `cost/price/overlap.py`). A hidden second still costs p =
f / (1 + f), because it slows compute by f (`cost/simulate/times.py`). So a step takes

    all hidden   A = r + c + (1 - a (1 - p)) z + (1 - h (1 - p)) s             (`Hiding.*_price`)
    exposed      x = max(0, a (1 - p) z - c)                                   (`exposed_blocks_s`)
                 y = (1 - p) h max(0, s - 2/3 max(0, c - (1 - p) a z) / m)       (`exposed_sync_s`)
    step         T = A + x + y                                                          (`step_s`)

A is a sum over choices, and a lower bound on T. The problem's numbers are those of A, so where all
is hidden, its optimum is that of T. Else x and y have a price, as bytes have. For t in [0, 1]

    T >= A + t (a (1 - p) z - c)        T >= A + t (1 - p) h (s - 2/3 c / m)      (`Hiding.weights`)

Both are sums over choices again. `least_exposed` solves them for a few t, and keeps the least T and
the greatest bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from autopar.cost.price import HiddenShares

# A plan this close to its bound (relative) is not weighed again, and how often it is at most.
EXPOSED_GAP_GOAL, MOST_PRICES = 1e-2, 2
# A backward takes two thirds of a microbatch's compute (`passes/inter/score.py`).
_BACKWARD = 2 / 3
Array = NDArray[np.float64]
C = TypeVar("C")


class Hidable(NamedTuple):
    """Seconds of a step that compute may hide: gradients returned once, and all others."""

    sync_s: Array
    blocks_s: Array


# Those of a parameter's conversions in one case, [storages, uses].
HidableCosts = Callable[[int], Hidable]


class Parts(NamedTuple):
    """A choice's seconds of a step if all is hidden; of them, compute; s and z of the docstring."""

    hidden_s: float
    compute_s: float
    sync_s: float
    blocks_s: float


class Weights(NamedTuple):
    """What is added to A: so many times compute, s and z."""

    compute: float
    sync: float
    blocks: float


@dataclass(frozen=True)
class Hiding:
    """The law of the docstring for one program: what may be hidden, and the slowdown f."""

    shares: HiddenShares
    slowdown: float

    @cached_property
    def _saved(self) -> float:
        """1 - p"""
        return 1 / (1 + self.slowdown)

    @property
    def sync_price(self) -> float:
        return 1 - self.shares.sync * self._saved

    @property
    def blocks_price(self) -> float:
        return 1 - self.shares.blocks * self._saved

    def exposed_blocks_s(self, parts: Parts) -> float:
        return max(0.0, self.shares.blocks * self._saved * parts.blocks_s - parts.compute_s)

    def exposed_sync_s(self, parts: Parts, n_microbatches: int) -> float:
        beside_s = max(0.0, parts.compute_s - self._saved * self.shares.blocks * parts.blocks_s)
        left_s = parts.sync_s - _BACKWARD * beside_s / n_microbatches
        return self._saved * self.shares.sync * max(0.0, left_s)

    def step_s(self, parts: Parts, n_microbatches: int) -> float:
        exposed_s = self.exposed_blocks_s(parts) + self.exposed_sync_s(parts, n_microbatches)
        return parts.hidden_s + exposed_s

    def weights(self, price: float, of_sync: bool, n_microbatches: int) -> Weights:
        """What is added to A at a price t of what is exposed."""
        if of_sync:
            price *= self._saved * self.shares.sync
            return Weights(-price * _BACKWARD / n_microbatches, price, 0.0)
        return Weights(-price, 0.0, price * self._saved * self.shares.blocks)


NOTHING_HIDDEN = Hiding(HiddenShares(0.0, 0.0), 0.0)


class Found(NamedTuple, Generic[C]):
    """A choice within the budget, and a lower bound on the problem that it solves."""

    choice: C
    bound_s: float
    size_bytes: float


class LeastExposed(NamedTuple, Generic[C]):
    """The best choice, its parts, and a lower bound on every choice's step."""

    choice: C
    size_bytes: float
    parts: Parts
    bound_s: float


def least_exposed(
    first: Found[C],
    parts_of: Callable[[C], Parts],
    solve: Callable[[Weights], Found[C] | None],
    hiding: Hiding,
    n_microbatches: int,
    limit_s: float = math.inf,
) -> LeastExposed[C]:
    """The choice of the least step, from the `first`, which is the least if all is hidden.

    `solve` solves the same problem with weights; None: it stopped. Once the bound is at least
    `limit_s`, nothing more is solved.
    """
    best = LeastExposed(first.choice, first.size_bytes, parts_of(first.choice), first.bound_s)
    parts = best.parts
    exposed_s = hiding.exposed_blocks_s(parts), hiding.exposed_sync_s(parts, n_microbatches)
    if max(exposed_s) <= EXPOSED_GAP_GOAL * parts.hidden_s or first.bound_s >= limit_s:
        return best
    of_sync, low, high = exposed_s[1] > exposed_s[0], 0.0, 1.0
    best_s = hiding.step_s(parts, n_microbatches)
    for _ in range(MOST_PRICES):
        price = (low + high) / 2
        found = solve(hiding.weights(price, of_sync, n_microbatches))
        if found is None:
            break
        parts, bound_s = parts_of(found.choice), max(best.bound_s, found.bound_s)
        step_s = hiding.step_s(parts, n_microbatches)
        if step_s < best_s:
            best, best_s = LeastExposed(found.choice, found.size_bytes, parts, bound_s), step_s
        best = best._replace(bound_s=bound_s)
        if best_s * (1 - EXPOSED_GAP_GOAL) <= bound_s or bound_s >= limit_s:
            break
        left_s = (
            hiding.exposed_sync_s(parts, n_microbatches)
            if of_sync
            else hiding.exposed_blocks_s(parts)
        )
        low, high = (price, high) if left_s else (low, price)
    return best
