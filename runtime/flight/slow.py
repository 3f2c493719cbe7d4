"""Which ranks are slow: own seconds (`pace.py`), compared over ranks.

Ranks of one stage do the same work, so a rank is compared with the median of the others. A rank
that is alone in its stage has no peer: it is compared with its own fastest times, and is slow where
it became slower than the others became. It is named if it takes `RATIO` times as long, and
`LEAST_S` longer: steps of few milliseconds vary by more, and the last of two ranks that cut rows of
a causal query has 3 times the visible keys of the first, in attention alone.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.units import format_seconds

RATIO, LEAST_S = 1.5, 5e-3


@dataclass(frozen=True)
class OwnTimes:
    """What one rank computed in its stage: action -> own seconds of a step."""

    stage: int
    actions: Mapping[str, float]

    @property
    def step_s(self) -> float:
        return sum(self.actions.values())


class Comparison:
    """Compares ranks again and again; it remembers the fastest step of each."""

    def __init__(self) -> None:
        self._fastest_s: dict[int, float] = {}

    def slow(self, ranks: Sequence[OwnTimes]) -> list[str]:
        """A sentence for each slow rank."""
        for rank, own in enumerate(ranks):
            self._fastest_s[rank] = min(own.step_s, self._fastest_s.get(rank, own.step_s))
        found = []
        for rank, own in enumerate(ranks):
            peers = [o for r, o in enumerate(ranks) if o.stage == own.stage and r != rank]
            said = _compare(own, peers) if peers else self._compare_itself(rank, ranks)
            if said is not None:
                found.append(f"rank {rank} (stage {own.stage}) is slow: {said}")
        return found

    def _compare_itself(self, rank: int, ranks: Sequence[OwnTimes]) -> str | None:
        own_s, fastest_s = ranks[rank].step_s, self._fastest_s[rank]
        slower = [
            r.step_s / max(self._fastest_s[k], 1e-9) for k, r in enumerate(ranks) if k != rank
        ]
        usual = statistics.median(slower) if slower else 1.0
        if not _is_slow(own_s, fastest_s * usual):
            return None
        return (
            f"it computes {format_seconds(own_s)} of a step, {own_s / fastest_s:.1f} times as long "
            f"as in its fastest steps; the others {usual:.1f} times"
        )


def _compare(own: OwnTimes, peers: Sequence[OwnTimes]) -> str | None:
    usual_s = statistics.median(peer.step_s for peer in peers)
    if not _is_slow(own.step_s, usual_s):
        return None
    usual = {a: statistics.median(p.actions.get(a, 0.0) for p in peers) for a in own.actions}
    worst = max(own.actions, key=lambda a: own.actions[a] - usual[a])
    others = "the other rank" if len(peers) == 1 else "the median of the other ranks"
    return (
        f"it computes {format_seconds(own.step_s)} of a step, {others} of its stage "
        f"{format_seconds(usual_s)}; most of that in action {worst}, "
        f"{format_seconds(own.actions[worst])} beside {format_seconds(usual[worst])}"
    )


def _is_slow(own_s: float, usual_s: float) -> bool:
    return own_s > RATIO * usual_s and own_s - usual_s > LEAST_S
