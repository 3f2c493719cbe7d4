"""What the picture of a plan shows: the lines of a stage program, grouped until they are few.

    node    a run of operators of one module; a reshard inside the run cuts it. Then
              a run of views alone joins the node whose result it views;
              a run of elementwise operators joins the elementwise run just before it.
            Both joins stay inside one repeated block, so that blocks keep their own nodes.
    edge    a tensor from node to node, with the reshards on its way. Edges of one `value`
            share their reshard: it happens once.

What crosses between stages is a node of its own on both sides: `received` is read like an input,
`sent` reads what is sent, after its reshard to the layout in which it crosses. Reshards that every
reader of a received value wants come first, into a node `arrived`: the stage's first block then
reads like those that follow it.

Constants, masks made of them and divisors are left out: they are made once and belong to no
module.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from autopar.program import CallLine, DetachLine, Local, MoveLine, StageProgram, reads
from autopar.report.kinds import ParameterUsed, parameter_variables, shard_kinds

_MATMULS = frozenset({"mm", "bmm", "addmm", "matmul", "linear", "baddbmm", "convolution"})
_NORMS = frozenset({"layer_norm", "rms_norm", "group_norm", "batch_norm", "rsqrt"})
_LOSSES = frozenset({"cross_entropy_loss", "nll_loss", "mse_loss"})
VIEWS = frozenset({
    "alias", "chunk", "clone", "contiguous", "expand", "flatten", "permute", "reshape", "select",
    "slice", "split", "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unflatten",
    "unsqueeze", "view",
})  # fmt: skip


@dataclass(frozen=True)
class Block:
    """One of a list of modules, as `transformer.h` and `0` of `transformer.h.0.attn`."""

    prefix: str = ""
    index: str = ""

    @property
    def path(self) -> str:
        return f"{self.prefix}.{self.index}" if self.prefix else self.index

    def relative(self, name: str) -> str:
        """`name` as seen from the block; the block itself is `""`."""
        return name[len(self.path) :].removeprefix(".") if self.contains(name) else name

    def contains(self, name: str) -> bool:
        return bool(self.path) and (name == self.path or name.startswith(f"{self.path}."))

    @staticmethod
    def of(module: str) -> Block:
        """The outermost repeated block that a module path lies in; the empty block if none."""
        parts = module.split(".")
        for i, part in enumerate(parts):
            if part.isdigit():
                return Block(".".join(parts[:i]), part)
        return Block()


@dataclass(frozen=True)
class Node:
    """Operators drawn as one box; an input, the loss or what crosses has no lines and a `name`.

    kind      input, received, arrived, sent, loss value; or projection, attention, embedding,
              norm, loss, view, elementwise
    name      of what crosses, its value: the same on both sides
    shards    per mesh axis, one of `KINDS`, of `result`
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
    """A tensor that one node makes and another reads. Nodes are positions in the picture."""

    source: int
    target: int
    value: str
    moves: tuple[MoveLine, ...]


@dataclass(frozen=True)
class Picture:
    """Nodes in the order of execution, and edges from earlier to later ones."""

    nodes: tuple[Node, ...]
    edges: tuple[PictureEdge, ...]


@dataclass(frozen=True)
class _Read:
    """A variable as an operator reads it: what it came from, and the moves in between."""

    value: str
    root: str
    moves: tuple[MoveLine, ...]


@dataclass
class _NodeDraft:
    """A node being made."""

    module: str
    lines: list[CallLine] = field(default_factory=list)

    @property
    def block(self) -> Block:
        return Block.of(self.module)


def operator_name(line: CallLine) -> str:
    """`aten.add.Tensor` -> `add`."""
    parts = line.target.split(".")
    return parts[1].strip("_") if len(parts) > 1 else line.target


def is_reshard(line: MoveLine) -> bool:
    """Does it do anything, forward or backward?"""
    return line.move.forward != "identity" or (line.has_grad and line.move.backward != "identity")


def kind_of(lines: Iterable[CallLine]) -> str:
    """What a run of operators is, by its heaviest one."""
    names = {operator_name(line) for line in lines}
    if "scaled_dot_product_attention" in names or ("softmax" in names and names & _MATMULS):
        return "attention"
    for kind, members in (("loss", _LOSSES), ("projection", _MATMULS)):
        if names & members or (kind == "projection" and any(n.startswith("conv") for n in names)):
            return kind
    if "embedding" in names:
        return "embedding"
    if names & _NORMS:
        return "norm"
    return "view" if names <= VIEWS else "elementwise"


def picture(program: StageProgram, batch_size: int | None = None) -> Picture:
    """The nodes and edges of one stage.

    batch_size: rows of a microbatch, where the stage itself may take no batch.
    """
    parameters = parameter_variables(program)
    found = _reads(program)
    groups = _joined(_runs(program, found), found)
    shards = shard_kinds(program, batch_size)
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
        nodes.append(Node(kind, name, Block(), (), None, ()))
    kept = {(e.source, e.target, e.value): e for e in edges if e.source != e.target}
    return Picture(tuple(nodes), tuple(kept.values()))


def _sources(
    program: StageProgram,
    found: Mapping[str, tuple[_Read, ...]],
    shards: Mapping[str, tuple[str, ...]],
) -> tuple[list[Node], dict[str, int]]:
    """Nodes of inputs that are read and of values from other stages; variable -> its node."""
    used = {read.root for reading in found.values() for read in reading}
    sources = [
        ("input", d.source, d.local)
        for d in program.delivered
        if d.kind == "input" and d.local.name in used
    ]
    sources += [("received", r.value, r.local) for r in program.received]
    nodes = [
        Node(kind, name, Block(), (), local, shards[local.name]) for kind, name, local in sources
    ]
    return nodes, {local.name: i for i, (_, _, local) in enumerate(sources)}


def _arrivals(
    nodes: list[Node], home: dict[str, int], found: dict[str, tuple[_Read, ...]]
) -> tuple[list[PictureEdge], dict[str, tuple[_Read, ...]]]:
    """The first reshard of each received value as a node, and reads that start from it.

    It is the part that all readers share. Adds to `nodes` and `home`.
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
        nodes.append(Node("arrived", node.name, Block(), (), None, ()))
        found = {
            key: tuple(
                _Read(r.value, value, r.moves[len(common) :]) if r.root == root else r
                for r in reading
            )
            for key, reading in found.items()
        }
    return edges, found


def _common(chains: Sequence[tuple[MoveLine, ...]]) -> tuple[MoveLine, ...]:
    """The moves that all chains begin with: the same lines, not only the same moves."""
    if not chains:
        return ()
    same = itertools.takewhile(
        lambda moves: all(move is moves[0] for move in moves), zip(*chains, strict=False)
    )
    return tuple(moves[0] for moves in same)


def _reads(program: StageProgram) -> dict[str, tuple[_Read, ...]]:
    """Operator key -> what it reads, traced through reshards.

    `sent VALUE` is what is sent, `loss value loss` the loss.
    """
    came: dict[str, _Read] = {}
    out: dict[str, tuple[_Read, ...]] = {}

    def trace(name: str) -> _Read:
        return came.get(name, _Read(name, name, ()))

    for line in program.body:
        if isinstance(line, CallLine):
            out[line.key] = tuple(trace(name) for name in dict.fromkeys(reads(line)))
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
    """Operators of one module that follow each other, cut where they reshard in between."""
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
    """Views with what they view; elementwise runs with the elementwise run before them."""
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
    """The node that `group` joins; None when it is one of its own."""
    kind = kind_of(group.lines)
    moved = {read.root for read in outer if read.moves}
    # Edges keep pointing forward: a view has this one source, and a run joins the node just before.
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
) -> Node:
    core = [line for line in group.lines if operator_name(line) not in VIEWS] or group.lines
    result = core[-1].outs[0]
    used = {
        name: parameters[name] for line in group.lines for name in reads(line) if name in parameters
    }
    # Of several modules, the last one made the result.
    module = core[-1].key.rpartition("/")[0]
    kind = kind_of(group.lines)
    name = group.block.relative(module)
    lines = tuple(group.lines)
    return Node(kind, name, group.block, lines, result, shards[result.name], tuple(used.values()))
