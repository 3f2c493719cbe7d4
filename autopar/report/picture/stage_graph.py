"""One stage as a cluster of the graph: its boxes, the frames of its equal blocks, its edges.

The caller draws what crosses between stages, outside the clusters, as one node per crossing. It
also draws the edges to these nodes (`edges_across`): in Graphviz, an edge drawn in a cluster would
pull both of its nodes into the cluster.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cached_property

import graphviz

from autopar.program.lines import MoveLine, StageProgram
from autopar.report.picture.boxes import (
    CROSSING,
    FRAME,
    LOCAL,
    TRAFFIC,
    box_label,
    escaped,
    pill,
    traffic,
)
from autopar.report.picture.folding import Section, fold, is_collective
from autopar.report.picture.nodes import PictureEdge, picture


class StageGraph:
    """Draws one stage.

    received, sent: value -> the nodes of the graph that it comes from, or goes to.
    """

    def __init__(
        self,
        program: StageProgram,
        prefix: str,
        received: Mapping[str, Sequence[str]],
        sent: Mapping[str, Sequence[str]],
    ) -> None:
        self.program, self.prefix = program, prefix
        self.shown = picture(program)
        self.sections, self.edges = fold(self.shown)
        self.edges_across: list[tuple[str, str, dict[str, str]]] = []
        self._across = {
            i: (received if node.kind == "received" else sent)[node.name]
            for i, node in enumerate(self.shown.nodes)
            if node.kind in ("received", "sent")
        }

    def draw(self, cluster: graphviz.Digraph) -> None:
        """Draw boxes and edges into `cluster`, and fill `edges_across`."""
        inner, outer = self._edges_by_frame
        for number, section in enumerate(self.sections):
            if not _is_framed(section):
                self._draw_boxes(cluster, section, framed=False)
                continue
            with cluster.subgraph(name=f"cluster_{self.prefix}block_{number}") as block:
                block.attr(label=_block_title(section), **frame("#eef2f7"))
                self._draw_boxes(block, section, framed=True)
                self._draw_edges(block, inner[number])
        self._draw_edges(cluster, outer)

    def box_with(self, parameter: str) -> str | None:
        """The box that uses a parameter; in equal blocks, the box that is drawn for all."""
        for section in self.sections:
            for copy in section.copies:
                for i, drawn in zip(copy, section.nodes, strict=True):
                    if any(p.parameter.name == parameter for p in self.shown.nodes[i].parameters):
                        return f"{self.prefix}{drawn}"
        return None

    @cached_property
    def _edges_by_frame(self) -> tuple[dict[int, list[PictureEdge]], list[PictureEdge]]:
        """Edges inside one frame, by its section; and the rest, edges outside all frames first."""
        within = {
            i: number for number, s in enumerate(self.sections) if _is_framed(s) for i in s.nodes
        }
        inner: dict[int, list[PictureEdge]] = defaultdict(list)
        outer: list[PictureEdge] = []
        for source, members in _by_value(self.edges).items():
            homes = {within.get(i, -1) for i in (source[0], *(e.target for e in members))}
            # A reshard of one block is drawn inside it.
            (inner[homes.pop()] if len(homes) == 1 else outer).extend(members)
        return inner, [*inner[-1], *outer]

    def _draw_boxes(self, cluster: graphviz.Digraph, section: Section, framed: bool) -> None:
        for i in section.nodes:
            # The caller draws crossings; an arrived value is drawn as its reshard.
            if i not in self._across and self.shown.nodes[i].kind != "arrived":
                label = box_label(self.shown.nodes[i], self.program, framed)
                cluster.node(f"{self.prefix}{i}", label=label)

    def _draw_edges(self, cluster: graphviz.Digraph, edges: Sequence[PictureEdge]) -> None:
        drawn: set[tuple[int, int]] = set()
        for (source, value), members in _by_value(edges).items():
            targets = list(dict.fromkeys(e.target for e in members))
            moves = members[0].moves
            lines = traffic(moves, self.program)
            if not lines:
                for target in targets:
                    if (source, target) not in drawn:
                        self._connect(cluster, source, target, {})
                    drawn.add((source, target))
                continue
            reshard, look = f"{self.prefix}{source}_{value}", _look(moves)
            if self.shown.nodes[targets[0]].kind == "arrived":
                reshard, targets = f"{self.prefix}{targets[0]}", []
            cluster.node(reshard, label=pill(lines, look["color"]))
            self._connect(cluster, source, reshard, {"arrowhead": "none", **look})
            for target in targets:
                self._connect(cluster, reshard, target, look)

    def _connect(
        self, cluster: graphviz.Digraph, source: int | str, target: int | str, look: dict[str, str]
    ) -> None:
        """Draw an edge; an end is a box, given by position, or a reshard, given by name."""
        is_across = source in self._across or target in self._across
        for a in self._names(source):
            for b in self._names(target):
                if is_across:
                    self.edges_across.append((a, b, CROSSING | look))
                else:
                    cluster.edge(a, b, **look)

    def _names(self, end: int | str) -> Sequence[str]:
        """The graph's nodes for one end: several if a value goes to several stages."""
        if isinstance(end, str):
            return [end]
        return self._across.get(end, [f"{self.prefix}{end}"])


def _is_framed(section: Section) -> bool:
    """A block has a frame unless it is a single box that is not repeated."""
    return bool(section.blocks[0].index) and len(section.nodes) + len(section.copies) > 2


def _by_value(edges: Sequence[PictureEdge]) -> dict[tuple[int, str], list[PictureEdge]]:
    """Edges grouped by the source and variable of what they carry."""
    found: dict[tuple[int, str], list[PictureEdge]] = defaultdict(list)
    for edge in edges:
        found[edge.source, edge.value].append(edge)
    return found


def _look(moves: Sequence[MoveLine]) -> dict[str, str]:
    if is_collective(moves):
        return {"color": TRAFFIC, "penwidth": "1.8"}
    return {"color": LOCAL, "style": "dashed"}


def _block_title(section: Section) -> str:
    first, last = section.blocks[0], section.blocks[-1]
    if len(section.blocks) == 1:
        return f"<<B>{escaped(first.path)}</B>>"
    span = f"{first.path} … {last.index}"
    return f'<{escaped(span)} <FONT POINT-SIZE="18"><B> × {len(section.blocks)}</B></FONT>>'


def frame(fill: str) -> dict[str, str]:
    """The look of a cluster."""
    return {"style": "rounded,filled", "color": FRAME, "fillcolor": fill, "fontsize": "13"}
