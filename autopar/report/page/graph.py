"""The graph of each stage as data: nodes, edges, and which blocks are equal.

The page lays it out. Nodes, edges and equal blocks are those of `autopar/report/picture`. What a
node is is said once for all copies of its block (`details`):

    nodes      how many there are; they go by number
    sections   blocks: paths of equal blocks, [""] outside of them; copies: nodes of each block
    details    number of a node of a first copy -> what it is (`_detail`)
    edges      [source, target, value, label]; edges of one source and value share their reshard
    labels     what a reshard says, its seconds a step, and whether it communicates
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from autopar.cost.price import backward_lines, forward_lines
from autopar.plans import RunnerUp, operator_text, storage_text
from autopar.program.communication import Collective
from autopar.program.lines import CallLine, Local, Pipeline, StageProgram, Storage, starred
from autopar.report.page.subject import Subject
from autopar.report.picture import (
    VIEWS,
    ParameterUsed,
    PictureEdge,
    PictureNode,
    fold,
    is_collective,
    operator_name,
    picture,
    traffic,
)

_HEADING = re.compile(r"\s*# (\S+)  \((.+)\)")


def graphs(subject: Subject) -> list[dict[str, Any]]:
    """The graph of every stage."""
    files = list(subject.sources.items())
    return [
        _StageGraph(
            program, subject.pipeline, subject.runners_up[k], files[k],
            _parameter_traffic(program, [c for c in subject.collectives if c.stage == k]),
        ).data()
        for k, program in enumerate(subject.pipeline.stages)
    ]  # fmt: skip


def _parameter_traffic(
    program: StageProgram, collectives: Sequence[Collective]
) -> dict[str, list[dict[str, Any]]]:
    """Parameter -> its gathers and gradient sync of a step; a fused call is shared out by size."""
    size_of = {p.name: p.stored.size_bytes for p in program.parameters}
    found: dict[str, dict[tuple[str, str], float]] = {}
    for c in collectives:
        names = [name for name in c.tensor.split(", ") if name in size_of]
        whole_bytes = sum(size_of[name] for name in names)
        for name in names if c.phase in ("param_gather", "grad_sync") else ():
            sums, key = found.setdefault(name, {}), (c.phase, c.axes_text)
            more_bytes = c.count * c.size_bytes * size_of[name] / whole_bytes
            sums[key] = sums.get(key, 0.0) + more_bytes
    return {
        name: [
            {"phase": phase, "axes": axes, "size_bytes": size}
            for (phase, axes), size in sums.items()
        ]
        for name, sums in found.items()
    }


class _StageGraph:
    def __init__(
        self,
        program: StageProgram,
        pipeline: Pipeline,
        runners_up: Mapping[str, Sequence[RunnerUp]],
        source: tuple[str, str],
        moved: Mapping[str, list[dict[str, Any]]],
    ) -> None:
        self.program, self.runners_up, self.moved = program, runners_up, moved
        self.n_microbatches = pipeline.n_microbatches
        self.file, text = source
        self.headings = _headings(text)
        self.seconds = _line_seconds(program)
        self.kept = {name for x in program.body if isinstance(x, CallLine) for name in x.keeps}
        self.axes = [i for i, size in enumerate(program.axis_sizes) if size > 1]

    def data(self) -> dict[str, Any]:
        shown = picture(self.program)
        sections, _ = fold(shown)
        labels: dict[str, int] = {}
        edges: list[list[Any]] = []
        texts: list[dict[str, Any]] = []
        for edge in shown.edges:
            label = self._label(edge)
            if label is None:
                edges.append([edge.source, edge.target, edge.value, -1])
                continue
            key = repr(label)
            if key not in labels:
                labels[key] = len(texts)
                texts.append(label)
            edges.append([edge.source, edge.target, edge.value, labels[key]])
        return {
            "axes": [
                {"name": name, "size": size}
                for name, size in zip(self.program.axis_names, self.program.axis_sizes, strict=True)
            ],
            "n_nodes": len(shown.nodes),
            "sections": [
                {"blocks": [b.path for b in s.blocks], "copies": [list(c) for c in s.copies]}
                for s in sections
            ],
            "details": {
                i: self._detail(shown.nodes[i]) for section in sections for i in section.nodes
            },
            "edges": edges,
            "labels": texts,
        }

    def _label(self, edge: PictureEdge) -> dict[str, Any] | None:
        lines = traffic(edge.moves, self.program)
        if not lines:
            return None
        n = self.n_microbatches
        return {
            "lines": lines,
            "communicates": is_collective(edge.moves),
            "time_s": n
            * sum(m.forward_s + (m.backward_s if m.has_grad else 0.0) for m in edge.moves),
        }

    def _detail(self, node: PictureNode) -> dict[str, Any]:
        """What a node is: where it comes from, what it costs, what it was chosen over."""
        seconds = [self.seconds.get(line.key, _NO_TIME) for line in node.lines]
        n = self.n_microbatches
        core = [x for x in node.lines if operator_name(x) not in VIEWS] or list(node.lines)
        # The dearest first, attention before all, for there may be no room for all.
        dearest = sorted(
            core, key=lambda x: (not x.is_attention, -sum(self.seconds.get(x.key, _NO_TIME)[:2]))
        )
        names = Counter(operator_name(line) for line in dearest)
        module = core[-1].key.rpartition("/")[0] if core else ""
        return {
            "kind": node.kind,
            "name": node.name,
            "module": module,
            "operators": [f"{name} ×{k}" if k > 1 else name for name, k in names.items()],
            "placements": self._placements(node),
            "shape": _shape(node.result),
            "global_shape": _global_shape(node.result),
            "dtype": str(node.result.dtype).removeprefix("torch.") if node.result else "",
            "forward_s": n * sum(s.forward_s for s in seconds),
            "backward_s": n * sum(s.backward_s for s in seconds),
            "again_s": n * sum(s.again_s for s in seconds),
            "kept_bytes": sum(
                line.saved_bytes + sum(o.size_bytes for o in line.outs if o.name in self.kept)
                for line in node.lines
            ),
            "collectives": self._inner(node),
            "parameters": [self._parameter(used) for used in node.parameters],
            "where": list(dict.fromkeys(line.where for line in core if line.where)),
            "generated": self._generated(module),
            "runners_up": self._runners_up(core[-1].key) if core else [],
        }

    def _placements(self, node: PictureNode) -> list[dict[str, Any]]:
        if node.result is None:
            return []
        return [
            {
                "axis": self.program.axis_names[axis],
                "placement": str(node.result.spec.placements[axis]),
                "kind": node.shards[axis],
            }
            for axis in self.axes
        ]

    def _parameter(self, used: ParameterUsed) -> dict[str, Any]:
        p = used.parameter
        return {
            "name": p.name,
            "shape": list(p.shape),
            "stored": str(p.stored.spec),
            "used": str(used.spec),
            "period": p.period,
            "stored_bytes": p.stored.size_bytes,
            "gathers": traffic(used.gathers, self.program),
            "moved": self.moved.get(p.name, []),
            "runners_up": self._runners_up(p.name),
        }

    def _inner(self, node: PictureNode) -> list[dict[str, Any]]:
        """Collectives inside operators that have their own lowering."""
        return [
            {
                "kind": call.kind,
                "axes": "+".join(self.program.axis_names[axis] for axis in line.lowered_axes),
                "size_bytes": call.size_bytes,
            }
            for line in node.lines
            for call in line.inner
            for _ in range(call.count)
        ]

    def _generated(self, module: str) -> dict[str, Any] | None:
        """The file and line where the operators of a module are printed."""
        for name in (module, starred(module)):
            if name in self.headings:
                return {"file": self.file, "line": self.headings[name]}
        return None

    def _runners_up(self, name: str) -> list[dict[str, Any]]:
        return [
            {"option": _option(option), "extra_s": option.extra_s}
            for option in self.runners_up.get(name, ())
        ]


def _option(option: RunnerUp) -> str:
    if isinstance(option.decided, Storage):
        return storage_text(option.decided)
    return operator_text(option.decided.inputs, option.decided.outputs)


class _Seconds(NamedTuple):
    """Of an operator in one microbatch. Backward has what runs again, which is `again_s`."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    again_s: float = 0.0


_NO_TIME = _Seconds()


def _line_seconds(program: StageProgram) -> dict[str, _Seconds]:
    """Key of an operator -> its seconds."""
    found: dict[str, _Seconds] = {}
    for is_backward, lines in enumerate((forward_lines(program), backward_lines(program))):
        for time in lines:
            line = program.body[time.position]
            if isinstance(line, CallLine):
                was, more_s = found.get(line.key, _NO_TIME), time.n * time.time_s
                found[line.key] = _Seconds(
                    was.forward_s + (0.0 if is_backward else more_s),
                    was.backward_s + (more_s if is_backward else 0.0),
                    was.again_s + (more_s if time.again else 0.0),
                )
    return found


def _headings(source: str) -> dict[str, int]:
    """Module -> the line of a generated file where its operators begin."""
    found: dict[str, int] = {}
    for number, line in enumerate(source.splitlines(), 1):
        match = _HEADING.fullmatch(line)
        if match:
            found.setdefault(match[1], number)
    return found


def _shape(local: Local | None) -> list[int]:
    return list(local.shape) if local else []


def _global_shape(local: Local | None) -> list[int]:
    """Of one microbatch over all ranks."""
    sizes = []
    for factors in local.dims if local else ():
        size = 1
        for factor in factors:
            size *= factor
        sizes.append(size)
    return sizes
