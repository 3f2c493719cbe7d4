"""What the picture of a plan shows: the lines of a stage program, grouped into few nodes.

    node    a run of operators of one module; a reshard inside the run cuts it. Then
              a run of views alone joins the node whose result it views;
              a run of elementwise operators joins the elementwise run just before it.
            Both joins stay inside one repeated block, so that blocks keep their own nodes.
    edge    a tensor from node to node, with its reshards. Edges with the same `value`
            share their reshard: it happens once.

A value that crosses between stages is a node on both sides. `received` is read like an input.
`sent` reads the value after its reshard to the sharding in which it crosses. Reshards that all
readers of a received value share become a node `arrived`. The stage's first block then reads like
the blocks after it.

Constants, masks computed from them and divisors are left out: they are computed once and belong to
no module.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from autopar.program.lines import CallLine, DetachLine, Local, MoveLine, StageProgram
from autopar.report.blocks import Block
from autopar.report.picture.kinds import ParameterUsed, parameter_variables, shard_kinds

_MATMULS = frozenset({"mm", "bmm", "addmm", "matmul", "linear", "baddbmm", "convolution"})
_NORMS = frozenset({"layer_norm", "rms_norm", "group_norm", "batch_norm", "rsqrt"})
_LOSSES = frozenset({"cross_entropy_loss", "nll_loss", "mse_loss"})
VIEWS = frozenset({
    "alias", "chunk", "clone", "contiguous", "expand", "flatten", "permute", "reshape", "select",
    "slice", "split", "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unflatten",
    "unsqueeze", "view",
})  # fmt: skip


@dataclass(frozen=True)
class PictureNode:
    """Operators drawn as one box; an input, the loss or a crossing has a `name` but no lines.

    kind      input, received, arrived, sent, loss value; or projection, attention, embedding,
              norm, loss, view, elementwise
    name      for a crossing its value, which is the same on both sides
    shards    how `result` is sharded: a `ShardKind` per mesh axis
    """

    kind: str
    name: str
    block: Block
    lines: tuple[CallLine, ...]
    result: Local | None
    shards: tuple[str, ...]
    parameters: tuple[ParameterUsed, ...] = ()


@dataclass(frozen=True)
class PictureEdge:
    """A tensor that one node makes and another reads; both are positions in `Picture.nodes`."""

    source: int
    target: int
    value: str
    moves: tuple[MoveLine, ...]


@dataclass(frozen=True)
class Picture:
    """Nodes in execution order, and edges from earlier to later nodes."""

    nodes: tuple[PictureNode, ...]
    edges: tuple[PictureEdge, ...]


@dataclass(frozen=True)
class _Read:
    """A variable as an operator reads it: the variable it came from, and the moves in between."""

    value: str
    root: str
    moves: tuple[MoveLine, ...]


@dataclass
class _NodeDraft:
    """A node under construction."""

    module: str
    lines: list[CallLine] = field(default_factory=list)

    @property
    def block(self) -> Block:
        prefix, _, index = (self.lines[0].block or "").rpartition(".")
        return Block(prefix, index)


def operator_name(line: CallLine) -> str:
    """`aten.add.Tensor` -> `add`."""
    parts = line.target.split(".")
    return parts[1].strip("_") if len(parts) > 1 else line.target


def is_reshard(line: MoveLine) -> bool:
    """Does the move do anything, forward or backward?"""
    return line.move.forward != "identity" or (line.has_grad and line.move.backward != "identity")


def kind_of(lines: Iterable[CallLine]) -> str:
    """The kind of a run of operators: that of its heaviest operator."""
    lines = list(lines)
    names = {operator_name(line) for line in lines}
    if any(line.is_attention for line in lines) or ("softmax" in names and names & _MATMULS):
        return "attention"
    for kind, members in (("loss", _LOSSES), ("projection", _MATMULS)):
        if names & members or (kind == "projection" and any(n.startswith("conv") for n in names)):
            return kind
    if "embedding" in names:
        return "embedding"
    if names & _NORMS:
        return "norm"
    return "view" if names <= VIEWS else "elementwise"


def picture(program: StageProgram) -> Picture:
    """The nodes and edges of one stage."""
    parameters = parameter_variables(program)
    found = _reads(program)
    groups = _joined(_runs(program, found), found)
    shards = shard_kinds(program)
    nodes, home = _sources(program, found, shards)
    arrivals, found = _arrivals(nodes, home, found)
    for group in groups:
        for line in group.lines:
            home.update((out.name, len(nodes)) for out in line.outs)
        nodes.append(_node(group, shards, parameters))
    edges = arrivals
    edges += [
        PictureEdge(home[read.root], home[line.outs[0].name], read.value, read.moves)
        for group in groups
        for line in group.lines
        for read in found[line.key]
        if read.root in home
    ]
    ends = [("sent", s.value) for s in program.sent]
    if program.loss is not None:
        ends.append(("loss value", "loss"))
    for kind, name in ends:
        last = found[f"{kind} {name}"][0]
        if last.root in home:
            edges.append(PictureEdge(home[last.root], len(nodes), last.value, last.moves))
        nodes.append(PictureNode(kind, name, Block(), (), None, ()))
    kept = {(e.source, e.target, e.value): e for e in edges if e.source != e.target}
    return Picture(tuple(nodes), tuple(kept.values()))


def _sources(
    program: StageProgram,
    found: Mapping[str, tuple[_Read, ...]],
    shards: Mapping[str, tuple[str, ...]],
) -> tuple[list[PictureNode], dict[str, int]]:
    """Nodes of the inputs that are read and of received values; and variable -> its node."""
    used = {read.root for reading in found.values() for read in reading}
    sources = [
        ("input", d.source, d.local)
        for d in program.delivered
        if d.kind == "input" and d.local.name in used
    ]
    sources += [("received", r.value, r.local) for r in program.received]
    nodes = [
        PictureNode(kind, name, Block(), (), local, shards[local.name])
        for kind, name, local in sources
    ]
    return nodes, {local.name: i for i, (_, _, local) in enumerate(sources)}


def _arrivals(
    nodes: list[PictureNode], home: dict[str, int], found: dict[str, tuple[_Read, ...]]
) -> tuple[list[PictureEdge], dict[str, tuple[_Read, ...]]]:
    """Make the reshards that all readers of a received value share a node of their own.

    Returns the edges into these nodes, and the reads, which start at them. Adds to `nodes` and
    `home`.
    """
    edges: list[PictureEdge] = []
    for position, node in enumerate(list(nodes)):
        root = node.result.name if node.kind == "received" and node.result else ""
        chains = [r.moves for reading in found.values() for r in reading if r.root == root]
        common = _common(chains)
        if not any(is_reshard(move) for move in common):
            continue
        value = common[-1].out.name
        edges.append(PictureEdge(position, len(nodes), value, common))
        home[value] = len(nodes)
        nodes.append(PictureNode("arrived", node.name, Block(), (), None, ()))
        found = {
            key: tuple(
                _Read(r.value, value, r.moves[len(common) :]) if r.root == root else r
                for r in reading
            )
            for key, reading in found.items()
        }
    return edges, found


def _common(chains: Sequence[tuple[MoveLine, ...]]) -> tuple[MoveLine, ...]:
    """The moves that all chains begin with: identical lines, not only equal moves."""
    if not chains:
        return ()
    same = itertools.takewhile(
        lambda moves: all(move is moves[0] for move in moves), zip(*chains, strict=False)
    )
    return tuple(moves[0] for moves in same)


def _reads(program: StageProgram) -> dict[str, tuple[_Read, ...]]:
    """Operator key -> what it reads, traced back through reshards.

    The key of a sent value is `sent VALUE`, that of the loss is `loss value loss`.
    """
    came: dict[str, _Read] = {}
    out: dict[str, tuple[_Read, ...]] = {}

    def trace(name: str) -> _Read:
        return came.get(name, _Read(name, name, ()))

    for line in program.body:
        if isinstance(line, CallLine):
            out[line.key] = tuple(trace(name) for name in dict.fromkeys(line.reads))
        elif isinstance(line, MoveLine):
            before = trace(line.source)
            came[line.out.name] = _Read(line.out.name, before.root, (*before.moves, line))
        elif isinstance(line, DetachLine):
            came[line.out.name] = trace(line.source)
    if program.loss is not None:
        out["loss value loss"] = (trace(program.loss),)
    out.update((f"sent {s.value}", (trace(s.local.name),)) for s in program.sent)
    return out


def _runs(program: StageProgram, found: Mapping[str, tuple[_Read, ...]]) -> list[_NodeDraft]:
    """Runs of consecutive operators of one module, cut at reshards inside them."""
    groups: list[_NodeDraft] = []
    made: set[str] = set()
    for line in program.body:
        if not isinstance(line, CallLine):
            continue
        module = line.key.rpartition("/")[0]
        cut = any(read.moves and read.root in made for read in found[line.key])
        if not groups or groups[-1].module != module or cut:
            groups.append(_NodeDraft(module))
            made = set()
        groups[-1].lines.append(line)
        made |= {out.name for out in line.outs}
    return groups


def _joined(groups: list[_NodeDraft], found: Mapping[str, tuple[_Read, ...]]) -> list[_NodeDraft]:
    """Join views with what they view, and elementwise runs with the elementwise run before."""
    out: list[_NodeDraft] = []
    home: dict[str, _NodeDraft] = {}
    for group in groups:
        own = {o.name for line in group.lines for o in line.outs}
        outer = [r for line in group.lines for r in found[line.key] if r.root not in own]
        host = _host(group, outer, out, home)
        if host is None:
            out.append(group)
            host = group
        else:
            host.lines += group.lines
        home.update(dict.fromkeys(own, host))
    return out


def _host(
    group: _NodeDraft, outer: list[_Read], before: list[_NodeDraft], home: Mapping[str, _NodeDraft]
) -> _NodeDraft | None:
    """The node that `group` joins; None if it stays a node of its own."""
    kind = kind_of(group.lines)
    moved = {read.root for read in outer if read.moves}
    # Edges must point forward. So a view needs a single source, and a run joins the last node.
    if kind == "view" and len({read.root for read in outer}) == 1 and not moved:
        host = home.get(outer[0].root)
    elif kind == "elementwise" and before and kind_of(before[-1].lines) == "elementwise":
        host = before[-1]
        made = {o.name for line in host.lines for o in line.outs}
        if made & moved or not any(read.root in made for read in outer):
            return None
    else:
        return None
    return host if host is not None and host.block == group.block else None


def _node(
    group: _NodeDraft,
    shards: Mapping[str, tuple[str, ...]],
    parameters: Mapping[str, ParameterUsed],
) -> PictureNode:
    core = [line for line in group.lines if operator_name(line) not in VIEWS] or group.lines
    result = core[-1].outs[0]
    used = {
        name: parameters[name] for line in group.lines for name in line.reads if name in parameters
    }
    # If the node covers several modules, the last one made the result.
    module = core[-1].key.rpartition("/")[0]
    kind = kind_of(group.lines)
    name = group.block.relative(module)
    lines = tuple(group.lines)
    return PictureNode(
        kind, name, group.block, lines, result, shards[result.name], tuple(used.values())
    )
