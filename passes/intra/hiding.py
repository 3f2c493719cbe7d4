"""What a step takes if compute hides communication, and how the solver weighs it.

A choice of placements has, in seconds of a step on one stage,

    c    compute: the operators
    z    of ZeRO-3's gathers and reductions, and of gradients returned per microbatch, what may run
         beside compute
    s    of gradients returned once a step, the same
    r    all else, which compute waits for

What may run beside compute is known before anything is placed (`passes/analysis/gathering.py`). A
hidden second still costs p = f / (1 + f), because it slows compute by f (`cost/simulate/times.py`).
Sync hides in the last of m backwards, which takes at most b = 4/5 of a microbatch: with recompute,
an operator that takes 1 forward takes at most 1 + 3 backward (a matmul of three operands). So a
step takes at least

    all hidden   A = r + c + p z + p s
    exposed      x = max(0, (1 - p) z - c)                               (`exposed_blocks_s`)
                 y = max(0, (1 - p) s - b (r + c) / m)                     (`exposed_sync_s`)
    step         T = A + x + y                                           (`step_s`)

Proof: a part of a step with compute c and overlapped o takes max(o, c + p o). Sync starts o after
the last backward does, which takes at least o, and ends s later. So from the start of a backward
that computes and waits for d, o + s or more pass; without sync it would take max(o, d + p o), which
is at most o + d. Only the last bucket is in r, if it must be.

A is a sum over choices. The problem's numbers are those of A, so where all is hidden, its optimum
is that of T. Else x and y have a price, as bytes have. For t in [0, 1]

    T >= A + t ((1 - p) z - c)        T >= A + t ((1 - p) s - b (A - p z - p s) / m)

Both are sums over choices again (`Hiding.weights`). `least_exposed` solves them for a few t, and
keeps the least T and the greatest bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

# A plan this close to its bound (relative) is not weighed again, and how often it is at most.
EXPOSED_GAP_GOAL, MOST_PRICES = 1e-2, 2
# The most of a microbatch that its backward takes: b of the docstring.
_BACKWARD = 4 / 5
Array = NDArray[np.float64]
C = TypeVar("C")


class Hidable(NamedTuple):
    """Seconds of a step that compute may hide: gradients returned once, and all others."""

    sync_s: Array
    blocks_s: Array


# Those of a parameter's conversions in one case, [storages, uses].
HidableCosts = Callable[[int], Hidable]


class Parts(NamedTuple):
    """A choice's A, c, s and z of the docstring, in seconds of a step."""

    hidden_s: float
    compute_s: float
    sync_s: float
    blocks_s: float


class Weights(NamedTuple):
    """What is added to A: so many times A, c, s and z."""

    hidden: float
    compute: float
    sync: float
    blocks: float


@dataclass(frozen=True)
class Hiding:
    """The law of the docstring; `slowdown` is f."""

    slowdown: float

    @property
    def price(self) -> float:
        """Seconds that a hidden second costs: p."""
        return 1 - self._saved

    @cached_property
    def _saved(self) -> float:
        """1 - p"""
        return 1 / (1 + self.slowdown)

    def exposed_blocks_s(self, parts: Parts) -> float:
        return max(0.0, self._saved * parts.blocks_s - parts.compute_s)

    def exposed_sync_s(self, parts: Parts, n_microbatches: int) -> float:
        waited_s = parts.hidden_s - self.price * (parts.sync_s + parts.blocks_s)
        return max(0.0, self._saved * parts.sync_s - _BACKWARD * waited_s / n_microbatches)

    def step_s(self, parts: Parts, n_microbatches: int) -> float:
        exposed_s = self.exposed_blocks_s(parts) + self.exposed_sync_s(parts, n_microbatches)
        return parts.hidden_s + exposed_s

    def weights(self, price: float, of_sync: bool, n_microbatches: int) -> Weights:
        """What is added to A at a price t of what is exposed."""
        if of_sync:
            beside = price * _BACKWARD / n_microbatches
            paid = beside * self.price
            return Weights(-beside, 0.0, price * self._saved + paid, paid)
        return Weights(0.0, -price, 0.0, price * self._saved)


# Compute hides no second that it does not lose.
NOTHING_HIDDEN = Hiding(math.inf)


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
