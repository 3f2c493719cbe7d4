"""Which repeated blocks of a picture are equal, so that they are drawn once.

Consecutive blocks fold into one with `x N` if, node by node, they have the same operators,
parameters, specs and reshards, and if their edges correspond:

    block i+1 reads node k of block i   where   block i reads node k of block i-1
                                        or, in the first block of the fold, anything outside
    both read the same node outside     (an encoder's output, an input)
    block i feeds only itself and block i+1, unless it is the last of the fold

Blocks that differ in anything are drawn separately; nothing is approximated.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from autopar.placement import COLLECTIVES
from autopar.program.lines import MoveLine
from autopar.report.blocks import Block
from autopar.report.picture.nodes import Picture, PictureEdge, PictureNode, operator_name


@dataclass(frozen=True)
class Section:
    """Nodes drawn together: `nodes` of the first of `copies` equal blocks.

    `copies` lists the nodes of every block of the fold; equal positions correspond. A section
    outside any block has one copy.
    """

    blocks: tuple[Block, ...]
    copies: tuple[tuple[int, ...], ...]

    @property
    def nodes(self) -> tuple[int, ...]:
        return self.copies[0]


class _Look(NamedTuple):
    """What is drawn of a run of nodes, and where each edge into them starts: at a node of the run,
    of the block before it, or outside of both."""

    drawn: tuple[object, ...]
    starts: tuple[tuple[str, int], ...]


def fold(picture: Picture) -> tuple[tuple[Section, ...], tuple[PictureEdge, ...]]:
    """The sections in order, and the edges between the nodes that are drawn."""
    nodes, folds = picture.nodes, list[list[tuple[int, ...]]]()
    into: dict[int, list[PictureEdge]] = defaultdict(list)
    read_until: dict[int, int] = {}
    for edge in picture.edges:
        into[edge.target].append(edge)
        read_until[edge.source] = max(edge.target, read_until.get(edge.source, 0))
    before = _Look((), ())
    for block, members in groupby(range(len(nodes)), lambda i: nodes[i].block):
        run, last = tuple(members), folds[-1][-1] if folds else ()
        look = _look(nodes, into, run, last)
        if (
            last
            and block.index
            and block.prefix == nodes[last[0]].block.prefix
            and all(read_until.get(i, 0) <= run[-1] for i in last)
            and _are_equal(before, look, is_first=len(folds[-1]) == 1)
        ):
            folds[-1].append(run)
        else:
            folds.append([run])
            look = _look(nodes, into, run, ())
        before = look
    sections = tuple(
        Section(tuple(nodes[copy[0]].block for copy in copies), tuple(copies)) for copies in folds
    )
    return sections, _drawn(picture.edges, sections)


def _look(
    nodes: Sequence[PictureNode],
    into: Mapping[int, Sequence[PictureEdge]],
    run: Sequence[int],
    before: Sequence[int],
) -> _Look:
    """A run's look after the block `before`."""
    places = {i: ("before", k) for k, i in enumerate(before)}
    places |= {i: ("inside", k) for k, i in enumerate(run)}
    edges = [[*into.get(i, ())] for i in run]
    every = [edge for own in edges for edge in own]
    reshards: dict[str, int] = {}  # numbered, since edges may share one
    for edge in every:
        if edge.moves:
            reshards.setdefault(edge.value, len(reshards))
    drawn = [
        (_signature(nodes[i]), *((moves_text(e.moves), reshards.get(e.value)) for e in own))
        for i, own in zip(run, edges, strict=True)
    ]
    starts = (places.get(edge.source, ("outside", edge.source)) for edge in every)
    return _Look(tuple(drawn), tuple(starts))


def _are_equal(a: _Look, b: _Look, is_first: bool) -> bool:
    """Does a block look like the one before it, which is the first of its fold?"""
    return a.drawn == b.drawn and all(
        start == other or (is_first and start[0] == "outside" and other[0] == "before")
        for start, other in zip(a.starts, b.starts, strict=True)
    )


def _signature(node: PictureNode) -> tuple[object, ...]:
    """Everything that is drawn of a node, with names relative to its block."""
    return (
        node.kind,
        node.name,
        node.shards,
        tuple(
            (operator_name(line), tuple((str(o.spec), o.shape) for o in line.outs),
             line.lowered, line.inner)
            for line in node.lines
        ),
        tuple(
            (node.block.relative(p.parameter.name), p.parameter.shape, p.parameter.period,
             str(p.parameter.stored.spec), str(p.spec), moves_text(p.gathers))
            for p in node.parameters
        ),
    )  # fmt: skip


def moves_text(moves: Sequence[MoveLine]) -> tuple[str, ...]:
    """Reshards as text: equal texts mean equal reshards."""
    return tuple(
        f"{m.move} {m.forward_bytes} {m.backward_bytes} {m.has_grad} {m.out.spec}" for m in moves
    )


def _drawn(edges: Sequence[PictureEdge], sections: Sequence[Section]) -> tuple[PictureEdge, ...]:
    """Edges between drawn nodes; an edge that leaves a fold starts at its last copy."""
    shown: dict[int, int] = {}
    for section in sections:
        shown.update((i, i) for i in section.nodes)
        shown.update(zip(section.copies[-1], section.nodes, strict=True))
    copied = {i for s in sections for copy in s.copies[1:] for i in copy}
    return tuple(
        PictureEdge(shown[edge.source], edge.target, edge.value, edge.moves)
        for edge in edges
        if edge.target not in copied and edge.source in shown
    )


def is_collective(moves: Sequence[MoveLine]) -> bool:
    """Does any of these reshards communicate, forward or backward?"""
    return any(
        m.move.forward in COLLECTIVES or (m.has_grad and m.move.backward in COLLECTIVES)
        for m in moves
    )
