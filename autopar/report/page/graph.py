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
from typing import Any

from autopar.cost.price import backward_lines, forward_lines
from autopar.plans import RunnerUp, operator_text, storage_text
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
        _StageGraph(program, subject.pipeline, k, subject.runners_up[k], files[k]).data()
        for k, program in enumerate(subject.pipeline.stages)
    ]


class _StageGraph:
    def __init__(
        self,
        program: StageProgram,
        pipeline: Pipeline,
        stage: int,
        runners_up: Mapping[str, Sequence[RunnerUp]],
        source: tuple[str, str],
    ) -> None:
        self.program, self.runners_up = program, runners_up
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
        seconds = [self.seconds.get(line.key, (0.0, 0.0)) for line in node.lines]
        n = self.n_microbatches
        core = [x for x in node.lines if operator_name(x) not in VIEWS] or list(node.lines)
        names = Counter(operator_name(line) for line in core)
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
            "forward_s": n * sum(f for f, _ in seconds),
            "backward_s": n * sum(b for _, b in seconds),
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


def _line_seconds(program: StageProgram) -> dict[str, tuple[float, float]]:
    """Key of an operator -> its seconds in one microbatch: forward; backward and again."""
    found: dict[str, tuple[float, float]] = {}
    for number, lines in enumerate((forward_lines(program), backward_lines(program))):
        for time in lines:
            line = program.body[time.position]
            if isinstance(line, CallLine):
                forward_s, backward_s = found.get(line.key, (0.0, 0.0))
                more_s = time.n * time.time_s
                found[line.key] = (
                    (forward_s + more_s, backward_s)
                    if number == 0
                    else (forward_s, backward_s + more_s)
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
