"""The tables of a plan as rows of values, which `explain` and the page print their own way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.collective import Collective
from autopar.plan_data import PlanData
from autopar.stage_program import StageProgram, StoredParameter


@dataclass(frozen=True)
class ParameterRow:
    """Parameters that are kept and used alike; `pattern` has `*` for numbers."""

    pattern: str
    count: int
    stored: str
    used: str
    shape: str


@dataclass(frozen=True)
class TrafficRow:
    """Collectives alike in one step on one rank: `calls`, and the bytes of all of them."""

    phase: str
    kind: str
    axis: str
    calls: int
    size_bytes: int


def headline(data: PlanData) -> str:
    """`Model on (dp=2 x tp=2), 1 microbatch: search`."""
    axes = " x ".join(f"{axis}={size}" for axis, size in data.axes.items())
    batches = "microbatch" if data.microbatches == 1 else "microbatches"
    return f"{data.model} on ({axes}), {data.microbatches} {batches}: {data.chosen}"


def idle_warning(data: PlanData) -> str:
    """Says which axes of several ranks shard nothing; empty when there are none."""
    idle = _idle_axes(data)
    if not idle:
        return ""
    return f"axis {', '.join(idle)} does the same work on every rank: splitting costs more"


def parameter_rows(program: StageProgram) -> list[ParameterRow]:
    """Parameters grouped by how they are kept: `h.*.mlp.c_fc.weight`."""
    groups: dict[tuple[str, str, str, str], list[StoredParameter]] = {}
    for parameter in program.parameters:
        uses = ", ".join(dict.fromkeys(str(u.local.spec) for u in parameter.uses)) or "each use"
        pattern = ".".join("*" if part.isdigit() else part for part in parameter.name.split("."))
        key = (pattern, str(list(parameter.shape)), str(parameter.stored.spec), uses)
        groups.setdefault(key, []).append(parameter)
    rows = []
    for (pattern, shape, stored, uses), members in groups.items():
        period = members[0].period
        kept = stored if period == "step" else f"{stored} {period}"
        rows.append(ParameterRow(pattern, len(members), kept, uses, shape))
    return rows


def traffic_rows(collectives: Sequence[Collective]) -> list[TrafficRow]:
    """Collectives summed by phase, kind and axis."""
    sums: dict[tuple[str, str, str], list[int]] = {}
    for c in collectives:
        axis = c.axis if isinstance(c.axis, str) else "+".join(c.axis)
        total = sums.setdefault((c.phase, c.kind, axis), [0, 0])
        total[0] += c.count
        total[1] += c.count * c.size_bytes
    return [TrafficRow(*key, count, size_bytes) for key, (count, size_bytes) in sums.items()]


def _idle_axes(data: PlanData) -> list[str]:
    """Axes of several ranks on which nothing is sharded."""
    out = []
    for position, (axis, size) in enumerate(data.axes.items()):
        texts = (*data.operators.values(), *data.parameters.values())
        sharded = any(
            _placement(spec, position).startswith("S") for text in texts for spec in _specs(text)
        )
        if size > 1 and not sharded:
            out.append(axis)
    return out


def _specs(text: str) -> list[str]:
    body = text.partition(";")[0]
    return [s.strip() for side in body.split("->") for s in side.split(",") if s.strip()]


def _placement(spec: str, position: int) -> str:
    words = spec.split(" order ")[0].split()
    return words[position] if position < len(words) else ""
