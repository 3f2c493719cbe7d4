"""Errors of predictions in numbers, and the intervals that follow from them.

error      predicted / published - 1
mape       mean of |error|; `max_error` is its maximum
ordering   of the pairs in a group with different published times, those that the predictions put
           in the same order; a predicted tie is wrong

How far published steps lie from predictions, by software and device, as a factor:

    ratio = the 80% quantile of |log (predicted / published)|

of runs left out of the fit a paper at a time (`fit.py`), as a user's own run is. Fewer than
`LEAST_RUNS` runs say little about a quantile: they share the ratio of their software, or, if that
has too few, of all runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

import numpy as np

from autopar.cost.published.rows import PublishedRun

HELD = 0.8  # of the runs
LEAST_RUNS = 5


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


def interval_ratios(
    rows: Iterable[PublishedRun], errors: Mapping[str, float]
) -> dict[str, dict[str, tuple[float, int]]]:
    """Software -> device -> (ratio, number of runs it is of); `errors` by id, of left-out runs."""
    logs = [
        (row.software.name, row.profile, abs(math.log(1 + errors[row.id])))
        for row in rows
        if row.id in errors
    ]
    found: dict[str, dict[str, tuple[float, int]]] = {}
    for name, device in dict.fromkeys((name, device) for name, device, _ in logs):
        of_software = [(of, log) for known, of, log in logs if known == name]
        of_device = [log for of, log in of_software if of == device]
        choices = of_device, [log for _, log in of_software]
        every = [log for *_, log in logs]
        used = next((known for known in choices if len(known) >= LEAST_RUNS), every)
        ratio = math.exp(float(np.quantile(used, HELD)))
        found.setdefault(name, {})[device] = ratio, len(used)
    return found
