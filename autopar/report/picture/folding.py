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
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.placement import COLLECTIVES
from autopar.program import MoveLine
from autopar.report.blocks import Block
from autopar.report.picture.nodes import Node, Picture, PictureEdge, operator_name


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


def fold(picture: Picture) -> tuple[tuple[Section, ...], tuple[PictureEdge, ...]]:
    """The sections in order, and the edges between the nodes that are drawn."""
    into: dict[int, list[PictureEdge]] = defaultdict(list)
    out_of: dict[int, list[PictureEdge]] = defaultdict(list)
    for edge in picture.edges:
        into[edge.target].append(edge)
        out_of[edge.source].append(edge)
    folds: list[list[tuple[int, ...]]] = []
    for run in _runs(picture.nodes):
        if folds and _continues(picture, into, out_of, folds[-1], run):
            folds[-1].append(run)
        else:
            folds.append([run])
    sections = tuple(
        Section(tuple(picture.nodes[copy[0]].block for copy in copies), tuple(copies))
        for copies in folds
    )
    return sections, _drawn(picture.edges, sections)


def _runs(nodes: Sequence[Node]) -> list[tuple[int, ...]]:
    """Positions of consecutive nodes of the same block."""
    runs: list[list[int]] = []
    for i, node in enumerate(nodes):
        if runs and nodes[runs[-1][0]].block == node.block:
            runs[-1].append(i)
        else:
            runs.append([i])
    return [tuple(run) for run in runs]


def _continues(
    picture: Picture,
    into: dict[int, list[PictureEdge]],
    out_of: dict[int, list[PictureEdge]],
    copies: list[tuple[int, ...]],
    run: tuple[int, ...],
) -> bool:
    """Is `run` one more copy of the fold?"""
    last = copies[-1]
    first, second = picture.nodes[last[0]].block, picture.nodes[run[0]].block
    if not first.index or first.prefix != second.prefix or first == second:
        return False
    if [_signature(picture.nodes[i]) for i in last] != [_signature(picture.nodes[i]) for i in run]:
        return False
    inside = {*last, *run}
    if any(edge.target not in inside for i in last for edge in out_of[i]):
        return False
    before = copies[-2] if len(copies) > 1 else None
    pairs = list(zip(last, run, strict=True))
    return all(_same_inputs(into[a], into[b], last, run, before) for a, b in pairs) and (
        _share_alike([(a, b) for i, j in pairs for a, b in zip(into[i], into[j], strict=True)])
    )


def _share_alike(pairs: list[tuple[PictureEdge, PictureEdge]]) -> bool:
    """Do the edges of both blocks share reshards in the same places?"""
    values = {(a.value, b.value) for a, b in pairs if a.moves}
    return len({a for a, _ in values}) == len(values) == len({b for _, b in values})


def _same_inputs(
    first: list[PictureEdge],
    second: list[PictureEdge],
    last: tuple[int, ...],
    run: tuple[int, ...],
    before: tuple[int, ...] | None,
) -> bool:
    """Do a node of block i and its counterpart in block i+1 read the same?"""
    if len(first) != len(second):
        return False
    for a, b in zip(first, second, strict=True):
        if moves_text(a.moves) != moves_text(b.moves):
            return False
        if b.source in run:
            alike = a.source in last and last.index(a.source) == run.index(b.source)
        elif b.source in last:
            outer = a.source not in last
            alike = outer and (
                before is None
                or (a.source in before and before.index(a.source) == last.index(b.source))
            )
        else:
            alike = a.source == b.source
        if not alike:
            return False
    return True


def _signature(node: Node) -> tuple[object, ...]:
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
