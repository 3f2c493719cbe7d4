"""Summaries of errors; numbers only.

error      predicted / published - 1
mape       mean of |error|; `max_error` is its maximum
ordering   of the pairs in a group with different published times, those that the predictions put
           in the same order; a predicted tie is wrong
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any


@dataclass(frozen=True)
class ErrorSummary:
    """The summary of `n` errors; `worst` is the name of the largest, `bias` their mean."""

    mape: float | None
    max_error: float | None
    n: int
    worst: str | None
    bias: float | None = None


def errors_of(named: Iterable[tuple[str, float | None]]) -> ErrorSummary:
    """The summary of named errors; None is left out."""
    signed = [(error, name) for name, error in named if error is not None]
    if not signed:
        return ErrorSummary(None, None, 0, None)
    n, known = len(signed), [(abs(error), name) for error, name in signed]
    max_error, worst = max(known)
    mean, bias = (sum(error for error, _ in errors) / n for errors in (known, signed))
    return ErrorSummary(mean, max_error, n, worst, bias)


@dataclass(frozen=True)
class Ordering:
    """`right` of `pairs` are in the published order; `missing`: members without both times."""

    right: int
    pairs: int
    missing: tuple[str, ...] = ()

    @property
    def fraction(self) -> float | None:
        return self.right / self.pairs if self.pairs else None

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"fraction": self.fraction}


def ordering(members: Sequence[str], times: Mapping[str, tuple[float, float]]) -> Ordering:
    """How predictions order the members of a group; times are (published, predicted)."""
    right = pairs = 0
    known = [times[name] for name in members if name in times]
    for (published, predicted), (other_published, other_predicted) in combinations(known, 2):
        gap = published - other_published
        pairs += gap != 0
        right += gap * (predicted - other_predicted) > 0
    return Ordering(right, pairs, tuple(name for name in members if name not in times))


@dataclass(frozen=True)
class AccuracyTarget:
    """A value and its limit. unit: `%` for a fraction, or `points`."""

    name: str
    value: float
    limit: float
    at_most: bool = True
    unit: str = "%"

    @property
    def is_met(self) -> bool:
        return self.value <= self.limit if self.at_most else self.value >= self.limit

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"met": self.is_met}
