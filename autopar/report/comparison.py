"""Plans side by side: their decisions, costs and collectives, and where they differ.

    collectives    by phase and kind: calls and bytes of a step, on one rank of the stage that
                   moves the most bytes of that phase and kind
    placements     of stored parameters and of modules' results, where the plans differ; JSON has
                   those of every operator. A placement lists the axes that shard a tensor or
                   leave it partial. An axis with one rank does not, so plans on different
                   meshes agree where tensors are whole

Plans of different graphs (another model, batch or precision) are compared too, and the comparison
says so. Costs need plans that are bound to their model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from autopar.errors import PlanError
from autopar.placement import Spec
from autopar.plans import PlanData, Predicted, StageRecord, parse_operator, parse_storage
from autopar.program.communication import Collective
from autopar.program.lines import starred
from autopar.report.page import page_html
from autopar.report.stages import axes_text
from autopar.report.tables import interval_text, is_within_error, traffic_rows
from autopar.units import format_bytes, format_count, format_seconds

# Differences that the text lists; pages and JSON list all.
N_DIFFERENCES = 25
UNKNOWN = "–"

_COSTS: dict[str, Callable[[Predicted], str]] = {
    "step time": lambda p: format_seconds(p.step_time_s),
    "80% of steps": lambda p: interval_text(p) or UNKNOWN,
    "compute": lambda p: format_seconds(p.compute_time_s),
    "communication": lambda p: format_seconds(p.comm_time_s),
    "communication not hidden": lambda p: format_seconds(p.exposed_comm_s),
    "optimizer": lambda p: format_seconds(p.optimizer_time_s),
    "pipeline bubble": lambda p: f"{p.bubble:.1%}",
    "peak memory per rank": lambda p: format_bytes(p.peak_bytes),
    "model FLOPs utilisation": lambda p: f"{p.mfu:.1%}",
    "samples/s": lambda p: format_count(p.samples_per_s) if p.samples_per_s else UNKNOWN,
}
_DECISIONS: dict[str, Callable[[PlanData], str]] = {
    "chosen as": lambda d: d.chosen or UNKNOWN,
    "mesh": lambda d: f"{' x '.join(map(str, d.mesh.shape))} of {d.mesh.hardware}",
    "stages": lambda d: str(len(d.stages)),
    "microbatches": lambda d: str(d.microbatches),
    "schedule": lambda d: d.schedule if len(d.stages) > 1 else UNKNOWN,
    "precision": lambda d: d.precision,
    "optimizer": lambda d: d.optimizer,
    "priced under": lambda d: d.software,
}


@dataclass(frozen=True)
class ComparedPlan:
    """One plan; what follows `data` is None if it is not bound to its model.

    bars     what time and memory are made of (`page/bars.py`)
    """

    data: PlanData
    predicted: Predicted | None = None
    collectives: tuple[Collective, ...] | None = None
    bars: Mapping[str, Any] | None = None

    @cached_property
    def traffic(self) -> dict[tuple[str, str], tuple[int, int]]:
        """(phase, kind) -> (calls, bytes) of a step, on the stage that moves the most bytes."""
        by_stage: dict[tuple[str, str], dict[int, tuple[int, int]]] = {}
        for row in traffic_rows(self.collectives or ()):
            stages = by_stage.setdefault((row.phase, row.kind), {})
            calls, size_bytes = stages.get(row.stage, (0, 0))
            stages[row.stage] = (calls + row.calls, size_bytes + row.size_bytes)
        return {
            key: max(stages.values(), key=lambda found: found[1])
            for key, stages in by_stage.items()
        }

    @cached_property
    def parameters(self) -> dict[str, str]:
        """Parameter -> its placement as it is stored."""
        found: dict[str, str] = {}
        for stage in self.data.stages:
            for name, text in stage.parameters.items():
                stored = parse_storage(text, name)
                often = "" if stored.period == "step" else f"; each {stored.period}"
                found.setdefault(name, _cuts(stored.spec, stage.axes) + often)
        return found

    @cached_property
    def operators(self) -> dict[str, str]:
        """Operator -> the placements of its results; equal ones are listed once."""
        found = {}
        for stage in self.data.stages:
            for key, text in stage.operators.items():
                results = parse_operator(text, key)[1]
                found[key] = "; ".join(dict.fromkeys(_cuts(spec, stage.axes) for spec in results))
        return found

    @cached_property
    def modules(self) -> dict[str, str]:
        """Module -> the placements of the results of its last operator."""
        return {key.rpartition("/")[0] or key: text for key, text in self.operators.items()}


@dataclass(frozen=True)
class Table:
    """A title, column heads and rows of text; the first column names the row."""

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def text(self, most: int | None = None) -> str:
        """The title and aligned columns, with at most `most` rows; without rows, the title."""
        if not self.rows:
            return self.title
        shown = self.rows[:most]
        widths = [max(map(len, column)) for column in zip(self.heads, *shown, strict=True)]
        lines = [
            "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in (self.heads, *shown)
        ]
        if left := len(self.rows) - len(shown):
            lines.append(f"and {left} more")
        return "\n".join([self.title, *(f"  {line}" for line in lines)])


@dataclass(frozen=True)
class Comparison:
    """Plans side by side, under their names."""

    names: tuple[str, ...]
    plans: tuple[ComparedPlan, ...]

    def text(self) -> str:
        """The comparison as text for a terminal."""
        tables = [
            *(table.text() for table in self._summaries()),
            *(table.text(N_DIFFERENCES) for table in self._differences()),
        ]
        return "\n\n".join(["\n".join(self._notes()), *tables]).lstrip("\n")

    def html(self) -> str:
        """A self-contained HTML page: bars of all plans on one scale, then the tables."""
        named = zip(self.names, self.plans, strict=True)
        facts = {
            "format": "autopar comparison",
            "names": self.names,
            "notes": self._notes(),
            "bars": [{"name": name, **(plan.bars or {})} for name, plan in named],
            "tables": [asdict(table) for table in (*self._summaries(), *self._differences())],
        }
        return page_html(" and ".join(self.names), json.dumps(facts, allow_nan=False))

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1, ensure_ascii=False, allow_nan=False)

    def to_dict(self) -> dict[str, Any]:
        """What `to_json` writes."""
        named = zip(self.names, self.plans, strict=True)
        return {
            "same_graph": self.same_graph,
            "notes": self._notes(),
            "plans": [_plan_dict(name, plan) for name, plan in named],
            "parameters": dict(_differing([plan.parameters for plan in self.plans])),
            "operators": dict(_differing([plan.operators for plan in self.plans])),
        }

    @property
    def same_graph(self) -> bool:
        return len({plan.data.graph_hash for plan in self.plans}) == 1

    def _notes(self) -> list[str]:
        notes = []
        if not self.same_graph:
            what = "; ".join(
                f"{name}: {_subject(plan.data)}"
                for name, plan in zip(self.names, self.plans, strict=True)
            )
            notes.append(f"these are plans of different graphs. {what}")
        named = zip(self.names, self.plans, strict=True)
        if unbound := [name for name, plan in named if plan.predicted is None]:
            notes.append(f"costs need the model, which is not given for {', '.join(unbound)}")
        return notes

    def _summaries(self) -> Iterator[Table]:
        yield self._table("decided", _rows(_DECISIONS, [plan.data for plan in self.plans]))
        yield self._table("stages", self._stage_rows())
        if any(plan.predicted for plan in self.plans):
            costs = _rows(_COSTS, [plan.predicted for plan in self.plans])
            yield self._table("predicted, per step", [*costs[:2], self._relative_row(), *costs[2:]])
            rows = self._traffic_rows()
            yield self._table("communication of a step, on the rank with most of each kind", rows)

    def _table(self, title: str, rows: Iterable[tuple[str, ...]]) -> Table:
        return Table(title, ("", *self.names), tuple(rows))

    def _stage_rows(self) -> Iterator[tuple[str, ...]]:
        for k in range(max(len(plan.data.stages) for plan in self.plans)):
            yield f"stage {k}", *(_stage_text(plan, k) for plan in self.plans)

    def _relative_row(self) -> tuple[str, ...]:
        first = next(plan for plan in self.plans if plan.predicted is not None)
        return "step time, relative", *(_relative_text(plan, first) for plan in self.plans)

    def _traffic_rows(self) -> Iterator[tuple[str, ...]]:
        for key in dict.fromkeys(key for plan in self.plans for key in plan.traffic):
            yield " ".join(key), *(_traffic_text(plan, key) for plan in self.plans)

    def _differences(self) -> Iterator[Table]:
        for what, of in (
            ("parameters, as they are stored", [plan.parameters for plan in self.plans]),
            ("results of modules", [plan.modules for plan in self.plans]),
        ):
            n_names = len({name for placed in of for name in placed})
            differing = dict(_differing(of))
            title = f"{what}: {len(differing)} of {n_names} differ"
            yield self._table(title, _folded(differing))


def _rows(measures: Mapping[str, Callable[[Any], str]], of: Sequence[Any]) -> list[tuple[str, ...]]:
    """A row per measure; `UNKNOWN` where an item is None."""
    return [
        (name, *(UNKNOWN if item is None else measure(item) for item in of))
        for name, measure in measures.items()
    ]


def _relative_text(plan: ComparedPlan, first: ComparedPlan) -> str:
    """`x 1.03`, and whether that is less than predictions of such a pair err."""
    if plan.predicted is None or first.predicted is None or not first.predicted.step_time_s:
        return UNKNOWN
    own_s, first_s = plan.predicted.step_time_s, first.predicted.step_time_s
    is_pair = plan is not first and _setting(plan) == _setting(first)
    is_within = is_pair and is_within_error(first.predicted, first_s, own_s)
    return f"x {own_s / first_s:.3g}{', within the error' if is_within else ''}"


def _setting(plan: ComparedPlan) -> tuple[object, ...]:
    """What two plans share where the error between them is known."""
    ratio = plan.predicted.interval_ratio if plan.predicted else None
    data = plan.data
    return data.graph_hash, data.mesh, data.software, data.imbalance, data.lengths, ratio


def _stage_text(plan: ComparedPlan, stage: int) -> str:
    """`dp=1 x tp=2, 503.1 KiB, from transformer.wte/embedding`."""
    if stage >= len(plan.data.stages):
        return UNKNOWN
    record: StageRecord = plan.data.stages[stage]
    axes = axes_text(tuple(record.axes), tuple(record.axes.values()))
    peaks = plan.predicted.peak_bytes_per_stage if plan.predicted else ()
    peak = [format_bytes(peaks[stage])] if peaks else []
    return ", ".join([axes, *peak, f"from {record.begins_at}"])


def _traffic_text(plan: ComparedPlan, key: tuple[str, str]) -> str:
    if plan.collectives is None:
        return UNKNOWN
    calls, size_bytes = plan.traffic.get(key, (0, 0))
    if not calls:
        return "none"
    return f"{calls} call{'s' if calls > 1 else ''}, {format_bytes(size_bytes)}"


def _cuts(spec: Spec, axes: Mapping[str, int]) -> str:
    """Where a tensor is cut (`Spec.on`). Raises `PlanError` for a spec of other axes."""
    if len(spec.placements) != len(axes):
        raise PlanError(f"{spec} places a tensor on {len(spec.placements)} axes, not {dict(axes)}")
    return spec.on(axes)


def _differing(of: Sequence[Mapping[str, str]]) -> Iterator[tuple[str, list[str]]]:
    """Names that the plans place differently, and the placement in each plan."""
    for name in dict.fromkeys(name for placed in of for name in placed):
        texts = [placed.get(name, UNKNOWN) for placed in of]
        if len(set(texts)) > 1:
            yield name, texts


def _folded(differing: Mapping[str, Sequence[str]]) -> Iterator[tuple[str, ...]]:
    """Rows of differences; names that differ only in numbers share a row if placements agree."""
    counts: dict[tuple[str, ...], int] = {}
    for name, texts in differing.items():
        key = (starred(name), *texts)
        counts[key] = counts.get(key, 0) + 1
    for (pattern, *texts), count in counts.items():
        yield (f"{pattern} ({count})" if count > 1 else pattern), *texts


def _subject(data: PlanData) -> str:
    inputs = ", ".join(f"{i.path} {i.dtype}{list(i.shape)}" for i in data.inputs)
    padded = f", {len(data.padded)} padded" if data.padded else ""
    return f"{data.model} on {inputs}, precision {data.precision}{padded}"


def _plan_dict(name: str, plan: ComparedPlan) -> dict[str, Any]:
    data = plan.data
    traffic = [
        {"phase": phase, "kind": kind, "calls": calls, "size_bytes": size_bytes}
        for (phase, kind), (calls, size_bytes) in plan.traffic.items()
    ]
    return {
        "name": name,
        "model": data.model,
        "graph_hash": data.graph_hash,
        "chosen": data.chosen,
        "mesh": list(data.mesh.shape),
        "hardware": data.mesh.hardware,
        "microbatches": data.microbatches,
        "schedule": data.schedule,
        "stages": [{"axes": dict(s.axes), "begins_at": s.begins_at} for s in data.stages],
        "predicted": None if plan.predicted is None else asdict(plan.predicted),
        "collectives": None if plan.collectives is None else traffic,
    }
