"""Predictions of a file's runs beside the published values, and the targets they must meet.

A run that cannot be read or predicted is skipped with the reason, and counts in no mean. A run
without a published value is predicted and has no error. In numbers:

error      predicted / published - 1
mape       mean of |error|; `max_error` is its maximum
ordering   of the pairs in a group with different published times, those that the predictions put
           in the same order; a predicted tie is wrong
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from statistics import fmean
from typing import Any

from autopar.cost.memory import Footprint
from autopar.cost.published.fit import leave_one_out
from autopar.cost.published.rows import PublishedRun, read_row
from autopar.cost.published.runs import RunsFile
from autopar.cost.published.settle import settle
from autopar.cost.published.tables import Cell, activation_memory, layer_times
from autopar.errors import AutoparError, NotSupportedError

MAX_MAPE, MAX_GROUP_MAPE, MAX_TIME_ERROR, MIN_ORDERING = 0.05, 0.10, 0.25, 0.90
MAX_MEMORY_MAPE, MAX_MEMORY_ERROR, MAX_ACTIVATION_POINTS, MAX_SKIPPED = 0.05, 0.07, 5.0, 0.05
# The paper states the memory of these runs; they are no allocator readings (arXiv 2205.05198,
# figure 1).
_STATED_MEMORY = "seqsel_f1_"


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
    known = [(error, name) for name, error in named if error is not None]
    if not known:
        return ErrorSummary(None, None, 0, None)
    max_error, worst = max((abs(error), name) for error, name in known)
    mean, bias = fmean(abs(error) for error, _ in known), fmean(error for error, _ in known)
    return ErrorSummary(mean, max_error, len(known), worst, bias)


@dataclass(frozen=True)
class Ordering:
    """`right` of `pairs` are in the published order; `missing`: members without both times."""

    right: int
    pairs: int
    fraction: float | None
    missing: tuple[str, ...] = ()


def ordering(members: Sequence[str], times: Mapping[str, tuple[float, float]]) -> Ordering:
    """How predictions order the members of a group; times are (published, predicted)."""
    known = [times[name] for name in members if name in times]
    gaps = [(a[0] - b[0], a[1] - b[1]) for a, b in combinations(known, 2) if a[0] != b[0]]
    right = sum(published * predicted > 0 for published, predicted in gaps)
    missing = tuple(name for name in members if name not in times)
    return Ordering(right, len(gaps), right / len(gaps) if gaps else None, missing)


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


@dataclass(frozen=True)
class PublishedFigure:
    """One quantity of a run: seconds or bytes."""

    published: float | None
    predicted: float

    @property
    def error(self) -> float | None:
        return None if self.published is None else self.predicted / self.published - 1

    def to_json(self) -> dict[str, float | None]:
        return asdict(self) | {"error": self.error}


@dataclass(frozen=True)
class Entry:
    """One run. `row`: the run as it was read; `skipped`: why there is no prediction."""

    id: str
    profile: str | None
    row: PublishedRun | None = None
    time: PublishedFigure | None = None
    memory: PublishedFigure | None = None
    footprint: Footprint | None = None
    skipped: str | None = None

    @property
    def interval_s(self) -> tuple[float, float] | None:
        """80% of published steps of the same software and device lie between these seconds."""
        if self.time is None or self.row is None:
            return None
        ratio = self.row.software.interval_ratio(self.row.profile.name)
        return self.time.predicted / ratio, self.time.predicted * ratio

    def to_json(self) -> dict[str, Any]:
        """The run as JSON; bytes are its metric only if it has no step time."""
        first = self.time or self.memory
        low, high = self.interval_s or (None, None)
        figure = first.to_json() if first else dict.fromkeys(("published", "predicted", "error"))
        data: dict[str, Any] = {
            "id": self.id,
            "paper": self.row and self.row.paper,
            "profile": self.profile,
            "metric": "step_time_s" if first is self.time else "memory_bytes",
            **figure,
            "skipped": self.skipped,
            "assumed": list(self.row.assumed) if self.row else [],
            "software": self.row and self.row.software.name,
            "low": low,
            "high": high,
        }
        if self.time is not None and self.memory is not None:
            data["memory"] = self.memory.to_json()
        if self.footprint is not None:
            data["footprint"] = asdict(self.footprint)
        return data


@dataclass(frozen=True)
class Score:
    """All entries of a file and its tables, with their errors and targets."""

    entries: tuple[Entry, ...]
    rank_groups: Mapping[str, Sequence[str]]
    activation: Sequence[Cell]
    layer: Sequence[Cell]

    @property
    def time(self) -> ErrorSummary:
        return _time_errors(self.entries)

    @property
    def groups(self) -> dict[str, ErrorSummary]:
        """Errors of step times by device and software."""
        found = defaultdict[str, list[Entry]](list)
        for entry in self.entries:
            if entry.row is not None and entry.time is not None and entry.time.error is not None:
                found[f"{entry.row.profile.name}, {entry.row.software.name}"].append(entry)
        return {name: _time_errors(entries) for name, entries in found.items()}

    def count_in_interval(self) -> tuple[int, int]:
        """How many published step times lie in their interval, and of how many."""
        held = [
            entry.interval_s[0] <= entry.time.published <= entry.interval_s[1]
            for entry in self.entries
            if entry.interval_s and entry.time and entry.time.published is not None
        ]
        return sum(held), len(held)

    @property
    def ordering(self) -> dict[str, Ordering]:
        times = {
            entry.id: (entry.time.published, entry.time.predicted)
            for entry in self.entries
            if entry.time is not None and entry.time.published is not None
        }
        return {name: ordering(ids, times) for name, ids in self.rank_groups.items()}

    @property
    def memory(self) -> ErrorSummary:
        """Errors of memory, without values that a paper only states."""
        return errors_of(
            (entry.id, entry.memory.error)
            for entry in self.entries
            if entry.memory is not None and not entry.id.startswith(_STATED_MEMORY)
        )

    @property
    def n_skipped(self) -> int:
        return sum(entry.skipped is not None for entry in self.entries)

    def targets(self) -> list[AccuracyTarget]:
        """The targets for which the file has numbers."""
        time, memory, activation = self.time, self.memory, _cell_errors(self.activation)
        rows: list[tuple[Any, ...]] = [
            ("step time, mean", time.mape, MAX_MAPE),
            *((f"step time on {k}, mean", e.mape, MAX_GROUP_MAPE) for k, e in self.groups.items()),
            (f"step time, worst: {time.worst}", time.max_error, MAX_TIME_ERROR),
            ("memory, mean", memory.mape, MAX_MEMORY_MAPE),
            (f"memory, worst: {memory.worst}", memory.max_error, MAX_MEMORY_ERROR),
            ("runs skipped", self.n_skipped / len(self.entries), MAX_SKIPPED),
            (f"activation memory, worst: {activation.worst}", activation.max_error,
             MAX_ACTIVATION_POINTS, True, "points"),
            *((f"order of {k}", o.fraction, MIN_ORDERING, False) for k, o in self.ordering.items()),
        ]  # fmt: skip
        return [AccuracyTarget(*row) for row in rows if row[1] is not None]

    def leave_one_out(self) -> dict[str, ErrorSummary]:
        """Errors of each paper's step times after a fit to all other papers; takes minutes."""
        rows = [entry.row for entry in self.entries if entry.row and entry.time]
        left_out = leave_one_out(rows, self.rank_groups.values())
        return {paper: errors_of(errors.items()) for paper, errors in left_out.items()}

    def to_json(self) -> dict[str, Any]:
        time = self.time
        return {
            "rows": [entry.to_json() for entry in self.entries],
            "mape": time.mape,
            "max_error": time.max_error,
            "groups": {name: asdict(errors) for name, errors in self.groups.items()},
            "in_interval": dict(zip(("held", "n"), self.count_in_interval(), strict=True)),
            "ordering": {name: asdict(order) for name, order in self.ordering.items()},
            "memory": asdict(self.memory),
            "activation_memory_pct": _table_json(self.activation),
            "layer_microbench": _table_json(self.layer),
            "skipped": self.n_skipped,
            "targets": [asdict(target) | {"met": target.is_met} for target in self.targets()],
        }


def score(file: RunsFile, progress: Callable[[str], None] = lambda run_id: None) -> Score:
    """Read and predict every run of a file; `progress` is called with the id of each."""
    entries = []
    for run in file.runs:
        progress(str(run["id"]))
        entries.append(entry_of(run))
    activation = activation_memory(file.activation_memory_pct)
    return Score(tuple(entries), file.rank_groups, activation, layer_times(file.layer_microbench))


def entry_of(run: Mapping[str, Any]) -> Entry:
    """One run, predicted or skipped. A value of the wrong type skips it, too."""
    row = None
    try:
        try:
            row = settle(read_row(run))
        except (TypeError, ValueError) as error:
            raise NotSupportedError(f"malformed: {error}") from error
        return predicted(row)
    except AutoparError as error:
        reason = "; ".join(line.strip() for line in str(error).splitlines())
        return Entry(str(run["id"]), run.get("profile"), row, skipped=reason)


def predicted(row: PublishedRun) -> Entry:
    """The model's prediction of a run, beside the published values."""
    step, time, memory, takes = row.step(), None, None, None
    if row.step_time_s is not None or row.memory_bytes is None:
        time = PublishedFigure(row.step_time_s, step.step_time_s())
    if row.memory_bytes is not None:
        takes = step.footprint(row.memory_rank, row.setting)
        is_reserved = row.memory_kind == "reserved"
        found = takes.reserved_bytes if is_reserved else takes.allocated_bytes
        memory = PublishedFigure(row.memory_bytes, found)
    return Entry(row.id, row.profile.name, row, time, memory, takes)


def _time_errors(entries: Iterable[Entry]) -> ErrorSummary:
    return errors_of((entry.id, entry.time.error) for entry in entries if entry.time is not None)


def _cell_errors(cells: Sequence[Cell]) -> ErrorSummary:
    return errors_of((cell.name, cell.error) for cell in cells)


def _table_json(cells: Sequence[Cell]) -> dict[str, Any]:
    return {"rows": [asdict(cell) for cell in cells], **asdict(_cell_errors(cells))}
