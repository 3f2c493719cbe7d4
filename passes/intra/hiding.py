"""What a step takes if compute hides communication, and how the solver weighs it.

A choice of placements has, in seconds of a step on one stage,

    c    compute: the operators
    z    of ZeRO-3's gathers and reductions, and of gradients returned per microbatch, what may run
         beside compute
    s    of gradients returned once a step, the same
    r    all else, which compute waits for

What may run beside compute is known before anything is placed (`passes/analysis/gathering.py`). A
hidden second still costs p = f / (1 + f), because it slows compute by f (`cost/simulate/times.py`);
one of sync costs q = p / (1 + p) at least. Sync hides in the last of m backwards, which has at most
a share b of a microbatch's compute (`backward_share` of `intra_op.py`). So a step takes at least

    all hidden   A = r + c + p z + q s
    exposed      x = max(0, (1 - p) z - c)                               (`exposed_blocks_s`)
                 y = max(0, (1 - q) s - (r + b c) / m)                     (`exposed_sync_s`)
    step         T = A + x + y                                           (`step_s`)

Proof: a part of a step with compute c and overlapped o takes max(o, c + p o). Sync starts o after
the last backward does, which takes at least o, and ends s later. So from the start of a backward
that computes and waits for d, o + s or more pass; without sync it would take max(o, d + p o), which
is at most o + d. If h of sync is beside that backward, max(s - h, p h) is left, which is q s or
more.

A is a sum over choices. The problem's numbers are those of A, so where all is hidden, its optimum
is that of T. Else x and y have prices, as bytes have. For t and u in [0, 1]

    T >= A + t ((1 - p) z - c) + u ((1 - q) s - (A - (1 - b) c - p z - q s) / m)

It is a sum over choices again (`Hiding.weights`). `least_exposed` solves it for a few prices, and
keeps the least T and the greatest bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from autopar.arrays import Array
from autopar.passes.solvers.problem import Solution
from autopar.passes.solvers.repeats import RepeatedChoice

# A plan this close to its bound (relative) is not weighed again, and how often it is at most.
EXPOSED_GAP_GOAL, MOST_PRICES = 2e-3, 3


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


class ExposureWeights(NamedTuple):
    """What is added to A: so many times A, c, s and z."""

    hidden: float
    compute: float
    sync: float
    blocks: float


class ExposurePrices(NamedTuple):
    """The prices u and t of exposed sync and of all else that is exposed."""

    sync: float
    blocks: float


@dataclass(frozen=True)
class Hiding:
    """The law of the docstring: a hidden second costs q of sync, else p; backward has b of c."""

    sync_price: float
    blocks_price: float
    backward_share: float = 1.0

    @staticmethod
    def of(slowdown: float, backward_share: float) -> Hiding:
        """The law for a slowdown f."""
        price = slowdown / (1 + slowdown)
        return Hiding(price / (1 + price), price, backward_share)

    def exposed_blocks_s(self, parts: Parts) -> float:
        return max(0.0, (1 - self.blocks_price) * parts.blocks_s - parts.compute_s)

    def exposed_sync_s(self, parts: Parts, n_microbatches: int) -> float:
        hidden_s = self.sync_price * parts.sync_s + self.blocks_price * parts.blocks_s
        beside_s = parts.hidden_s - hidden_s - (1 - self.backward_share) * parts.compute_s
        return max(0.0, (1 - self.sync_price) * parts.sync_s - beside_s / n_microbatches)

    def exposed_s(self, parts: Parts, n_microbatches: int) -> ExposurePrices:
        """Seconds that are exposed, by what prices are for."""
        return ExposurePrices(
            self.exposed_sync_s(parts, n_microbatches), self.exposed_blocks_s(parts)
        )

    def step_s(self, parts: Parts, n_microbatches: int) -> float:
        return parts.hidden_s + sum(self.exposed_s(parts, n_microbatches))

    def weights(self, prices: ExposurePrices, n_microbatches: int) -> ExposureWeights:
        """What is added to A at these prices of what is exposed."""
        beside = prices.sync / n_microbatches
        return ExposureWeights(
            -beside,
            beside * (1 - self.backward_share) - prices.blocks,
            prices.sync * (1 - self.sync_price) + beside * self.sync_price,
            prices.blocks * (1 - self.blocks_price) + beside * self.blocks_price,
        )


NOTHING_HIDDEN = Hiding(1.0, 1.0)


class LeastExposed(NamedTuple):
    """The best choice, its parts, and a lower bound on every choice's step."""

    choice: RepeatedChoice
    size_bytes: float
    parts: Parts
    bound_s: float


def least_exposed(
    first: Solution[RepeatedChoice],
    parts_of: Callable[[RepeatedChoice], Parts],
    solve: Callable[[ExposureWeights], Solution[RepeatedChoice] | None],
    hiding: Hiding,
    n_microbatches: int,
    limit_s: float = math.inf,
) -> LeastExposed:
    """The choice of the least step, from the `first`, which is the least if all is hidden.

    `solve` solves the same problem with weights; None: it stopped. Once the bound is at least
    `limit_s`, nothing more is solved.
    """
    best = LeastExposed(first.choice, first.totals.bytes, parts_of(first.choice), first.bound_s)
    exposed_s = hiding.exposed_s(best.parts, n_microbatches)
    if max(exposed_s) <= EXPOSED_GAP_GOAL * best.parts.hidden_s or first.bound_s >= limit_s:
        return best
    best_s = hiding.step_s(best.parts, n_microbatches)
    # Per price, an interval; a price is 0 until something is exposed.
    intervals: list[tuple[float, float] | None] = [None, None]
    for _ in range(MOST_PRICES):
        for k, seconds in enumerate(exposed_s):
            if intervals[k] is None and seconds > 0:
                intervals[k] = 0.0, 1.0
        prices = ExposurePrices(*(sum(of) / 2 if of else 0.0 for of in intervals))
        found = solve(hiding.weights(prices, n_microbatches))
        if found is None:
            break
        parts, bound_s = parts_of(found.choice), max(best.bound_s, found.bound_s)
        step_s = hiding.step_s(parts, n_microbatches)
        if step_s < best_s:
            best, best_s = LeastExposed(found.choice, found.totals.bytes, parts, bound_s), step_s
        best = best._replace(bound_s=bound_s)
        if best_s * (1 - EXPOSED_GAP_GOAL) <= bound_s or bound_s >= limit_s:
            break
        exposed_s = hiding.exposed_s(parts, n_microbatches)
        for k, (price, seconds) in enumerate(zip(prices, exposed_s, strict=True)):
            of = intervals[k]
            if of is not None:
                intervals[k] = (price, of[1]) if seconds else (of[0], price)
    return best
