"""The tables of the page as rows of values: parameters, collectives, what crosses, devices."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from autopar.mesh import Mesh
from autopar.placement import COLLECTIVES
from autopar.program.communication import Collective
from autopar.program.lines import starred
from autopar.report.page.subject import Subject
from autopar.report.stages import crossing_rows, tie_text
from autopar.report.tables import parameter_rows


def parameter_table(subject: Subject) -> list[dict[str, Any]]:
    """Parameters that are stored and used alike, by pattern; bytes are of a rank, all together."""
    return [
        {
            "stage": stage, "parameter": row.pattern, "count": row.count, "blocks": row.blocks,
            "shape": list(first.shape), "stored": str(first.stored.spec),
            "used": ", ".join(map(str, program.used_specs[first.name])) or "not used",
            "period": first.period, "axes": " ".join(program.axis_names),
            "stored_bytes": sum(p.stored.size_bytes for p in row.members),
            "dtype": str(first.stored.dtype).removeprefix("torch."),
        }
        for stage, program in enumerate(subject.pipeline.stages)
        for row in parameter_rows(program)
        for first in row.members[:1]
    ]  # fmt: skip


def collective_table(subject: Subject) -> list[dict[str, Any]]:
    """Collectives of a step on one rank, of equal tensors together, most expensive first.

    `time_s` is alone, hidden or not; None of messages, which the timeline has.
    """
    groups: dict[tuple[Any, ...], list[Collective]] = {}
    for c in subject.collectives:
        first, *others = c.tensor.split(", ")
        what = starred(first) + (f" and {len(others)} more" if others else "")
        groups.setdefault((c.stage, c.phase, c.kind, c.axes_text, what), []).append(c)
    rows = []
    for (stage, phase, kind, axis, what), members in groups.items():
        times_s = [_time_s(subject, c) for c in members]
        rows.append(
            {
                "stage": stage, "phase": phase, "collective": kind, "axis": axis, "tensor": what,
                "calls": sum(c.count for c in members),
                "size_bytes": sum(c.count * c.size_bytes for c in members),
                "time_s": None if None in times_s else sum(t for t in times_s if t is not None),
            }
        )  # fmt: skip
    return sorted(rows, key=lambda row: -(row["time_s"] or 0.0))


def _time_s(subject: Subject, c: Collective) -> float | None:
    if c.kind not in COLLECTIVES or c.axis in ("pp", "world"):
        return None
    names = subject.pipeline.stages[c.stage].axis_names
    axes = tuple(map(names.index, c.axes))
    return c.count * subject.costs[c.stage].primitive_time_s(c.kind, c.size_bytes, axes)  # type: ignore[arg-type]


def crossing_table(subject: Subject) -> list[dict[str, Any]]:
    return [asdict(row) for row in crossing_rows(subject.pipeline)]


def tie_texts(subject: Subject) -> list[str]:
    return [tie_text(subject.pipeline, tie) for tie in subject.pipeline.ties]


def device_groups(subject: Subject) -> list[dict[str, Any]]:
    """Of every stage: its ranks, and on each axis the groups that work together, with their link.

    `first` are the ranks of the first group; the others are as far apart.
    """
    machine, links = Mesh(subject.data.mesh.shape), subject.hardware.links
    found = []
    for program, mesh in zip(subject.pipeline.stages, subject.pipeline.meshes, strict=True):
        axes = []
        for axis, (name, size) in enumerate(
            zip(program.axis_names, program.axis_sizes, strict=True)
        ):
            if size == 1:
                continue
            at = {rank: mesh.coordinate(rank) for rank in mesh.ranks}
            first = [r for r, c in at.items() if not any(c[:axis]) and not any(c[axis + 1 :])]
            n_nodes = len({machine.node_of(rank) for rank in first})
            link = links[machine.link_axis(first[0], first[-1])]
            axes.append(
                {"name": name, "size": size, "groups": len(at) // size, "first": first,
                 "n_nodes": n_nodes,
                 "bytes_per_s": 1 / link.s_per_byte if link.s_per_byte else None}
            )  # fmt: skip
        found.append({"ranks": [mesh.ranks[0], mesh.ranks[-1]], "axes": axes})
    return found
