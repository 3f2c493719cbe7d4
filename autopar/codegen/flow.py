"""Which values the functions of equal pieces take, from whom, and hand on to whom.

A name that a piece does not define itself is

    shared       the same in all blocks              rotary tables, a mask
    a parameter  an item of `parameters`             one stride further in each block
    handed on    by the piece that had it before     the hidden state, a handle, a gradient

Values are handed on in lists. A *channel* is the list of what one function hands on to another, and
the function that takes it clears it. So one place holds a value, which ends where it is freed. What
forward saves goes to backward the same way, in a list for each block:

    forward     carried, saved_1[i] = layers_forward(i, carried, parameters[9 * i : 9 + 9 * i], env)
    backward    carried = layers_backward(i, carried, saved_1[i], ready, env)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from autopar.codegen.blocks import Piece, Statement, Template
from autopar.program import identifier


class Slice(NamedTuple):
    """Of block i, parameters `start + stride * i` to `stop + stride * i`; `of` are the positions of
    their names in a piece."""

    start: int
    stop: int
    stride: int
    of: tuple[int, ...]


@dataclass(eq=False)
class BlockFunction:
    """The function of equal pieces.

    Numbers are positions of names in a piece: what it takes from others, what it hands on, what is
    shared, and what are parameters.
    """

    name: str
    template: Template
    taken: tuple[int, ...]
    given: tuple[int, ...]
    shared: tuple[int, ...]
    of_parameters: tuple[int, ...]
    slices: tuple[Slice, ...]
    inputs: list[Channel] = field(default_factory=list)
    outputs: list[Channel] = field(default_factory=list)

    @property
    def shared_names(self) -> list[str]:
        return [self.template.first.names[k] for k in self.shared]


@dataclass(eq=False)
class Channel:
    """A list of values that `maker` hands on at some positions, and `taker` takes.

    None stands for the statements between the calls. `distance` is how many blocks further the
    taker is. What is saved has a list for each block.
    """

    maker: BlockFunction | None
    made: tuple[int, ...]
    taker: BlockFunction | None
    taken: tuple[int, ...]
    distance: int = 0
    is_saved: bool = False
    variable: str = ""


class Place(NamedTuple):
    """Name `k` of the piece of `function` in block `i`."""

    function: BlockFunction
    i: int
    k: int


@dataclass
class Part:
    """Forward, or backward: statements, and which of them are pieces of which function.

    `sources` and `targets` say where the values of a piece come from, and where they go next: None
    stands for the statements between the calls.
    """

    statements: Sequence[Statement]
    functions: list[BlockFunction]
    sources: dict[Place, Place | None] = field(default_factory=dict)
    targets: dict[Place, Place | None] = field(default_factory=dict)

    def calls(self) -> list[tuple[Piece, BlockFunction]]:
        """The pieces with their functions, in order."""
        found = [(piece, f) for f in self.functions for piece in f.template.pieces]
        return sorted(found, key=lambda call: call[0].start)


def block_functions(
    statements: Sequence[Statement],
    found: Sequence[Template],
    parameters: Mapping[str, int],
    word: str,
) -> list[BlockFunction]:
    """The functions of templates; `word` is "forward" or "backward"."""
    functions: list[BlockFunction] = []
    for template in sorted(found, key=lambda t: t.pieces[0].start):
        name = _name(template, statements, word)
        functions.append(_function(name, template, statements, parameters))
    return functions


def _name(template: Template, statements: Sequence[Statement], word: str) -> str:
    words = [w for w in template.stem.split(".") if w and not w.isdigit()]
    stem = identifier("_".join(words) or "block")
    if template.work == "compute":
        return f"{stem}_{word}"
    first = statements[template.first.start]
    is_begun = any(".start" in row for row in first.rows)
    return f"{stem}_{template.work if is_begun else template.work.rstrip('e') + 'ed'}"


def _function(
    name: str,
    template: Template,
    statements: Sequence[Statement],
    parameters: Mapping[str, int],
) -> BlockFunction:
    first = template.first
    alive, before, written = set[str](), set[str](), set[str]()
    for s in statements[first.start : first.stop]:
        before.update(n for n in s.reads if n not in written)
        written.update(s.writes)
        alive.update(s.writes)
        alive.difference_update(s.frees)
    freed = {n for s in statements[first.start : first.stop] for n in s.frees}
    taken, given, shared, own = list[int](), list[int](), list[int](), list[int]()
    for k, n in enumerate(first.names):
        if n in written and n not in before:
            given += [k] if n in alive else []
        elif len({piece.names[k] for piece in template.pieces}) == 1:
            shared.append(k)
        elif n in parameters:
            own.append(k)
        else:
            taken.append(k)
            given += [k] if n in alive or n not in freed else []
    return BlockFunction(
        name, template, tuple(taken), tuple(given), tuple(shared), tuple(own),
        _slices(template, own, parameters),
    )  # fmt: skip


def _slices(
    template: Template, positions: Sequence[int], parameters: Mapping[str, int]
) -> tuple[Slice, ...]:
    """The slices of the parameters at some positions: those that move on together, side by side."""
    a, b, *_ = template.pieces
    places: list[tuple[int, int, int]] = []
    for k in positions:
        at, after = parameters[a.names[k]], parameters[b.names[k]]
        stride = (after - at) // (b.number - a.number)
        places.append((at - stride * a.number, stride, k))
    found: list[Slice] = []
    for start, stride, k in sorted(places):
        near = (s for s in found if s.stride == stride and start - s.stop < abs(stride))
        own = next(near, None)
        if own is None:
            found.append(Slice(start, start + 1, stride, (k,)))
        else:
            found[found.index(own)] = own._replace(stop=start + 1, of=(*own.of, k))
    return tuple(found)


def route(
    part: Part, holder: dict[str, Place | None], returned: Iterable[str] = ()
) -> dict[str, Place]:
    """Find where the values of all pieces come from and go; returns who has which in the end.

    `holder` has the values that backward is given by pieces of forward. The results of the
    function, `returned`, go to its own statements.
    """

    def hand_on(names: Iterable[str], target: Place | None = None) -> None:
        for name in names:
            source = holder.get(name)
            if source is not None:
                part.targets[source] = target
            holder[name] = target

    at = 0
    for piece, f in part.calls():
        for s in part.statements[at : piece.start]:
            hand_on((*s.reads, *s.writes, *s.late))
        hand_on(piece.names[k] for k in f.shared)
        for k in f.taken:
            place = Place(f, piece.i, k)
            part.sources[place] = holder.get(piece.names[k])
            hand_on([piece.names[k]], place)
        holder |= {piece.names[k]: Place(f, piece.i, k) for k in f.given}
        for s in part.statements[piece.start : piece.stop]:
            hand_on(s.late)
        at = piece.stop
    for s in part.statements[at:]:
        hand_on((*s.reads, *s.writes, *s.late))
    hand_on(returned)
    return {name: place for name, place in holder.items() if place is not None}


class _Way(NamedTuple):
    """From a place of a piece to one of another, `distance` blocks further."""

    function: BlockFunction
    k: int
    distance: int


def link(forward: Part, backward: Part, saved: Collection[Place]) -> None:
    """Make the channels: what goes where in most pieces. `saved` goes from forward to backward."""
    functions = [*forward.functions, *backward.functions]
    sources = forward.sources | backward.sources
    targets = forward.targets | backward.targets
    to = {f: _usual(f, f.given, targets) for f in functions}
    of = {f: _usual(f, f.taken, sources) for f in functions}
    for f in functions:
        ways: dict[tuple[BlockFunction, int], list[tuple[int, int]]] = {}
        alone: dict[bool, list[int]] = {}
        for k in f.given:
            way = to[f].get(k)
            if way is not None and of[way.function].get(way.k) == _Way(f, k, -way.distance):
                ways.setdefault((way.function, way.distance), []).append((k, way.k))
            else:
                pieces = [p for p in f.template.pieces if Place(f, p.i, k) in saved]
                n_saved = sum(piece.stands_for for piece in pieces)
                alone.setdefault(2 * n_saved > f.template.n_blocks, []).append(k)
        for (taker, distance), pairs in ways.items():
            is_saved = f in forward.functions and taker in backward.functions
            made, taken = zip(*pairs, strict=True)
            _add(Channel(f, made, taker, taken, distance, is_saved))
        for is_saved, positions in alone.items():
            _add(Channel(f, tuple(positions), None, (), 0, is_saved))
    for f in functions:
        linked = {k for channel in f.inputs for k in channel.taken}
        rest = tuple(k for k in f.taken if k not in linked)
        if rest:
            _add(Channel(None, (), f, rest))


def _usual(
    f: BlockFunction, positions: Sequence[int], ways: Mapping[Place, Place | None]
) -> dict[int, _Way]:
    """The way of most blocks at these positions."""
    counts = Counter[tuple[_Way | None, ...]]()
    for p in f.template.pieces:
        ends = [ways.get(Place(f, p.i, k)) for k in positions]
        way = tuple(e and _Way(e.function, e.k, e.i - p.i) for e in ends)
        counts[way] += p.stands_for
    ((most, _),) = counts.most_common(1)
    return {k: way for k, way in zip(positions, most, strict=True) if way is not None}


def _add(channel: Channel) -> None:
    if channel.maker is not None:
        channel.maker.outputs.append(channel)
    if channel.taker is not None:
        channel.taker.inputs.append(channel)


_WORDS: dict[tuple[str, str], str] = {
    ("gather", "gather"): "coming",
    ("gather", "compute"): "gathered",
    ("compute", "reduce"): "gradients",
    ("reduce", "reduce"): "reducing",
}


def name_channels(part: Part, saved: Counter[str]) -> None:
    """Give the lists of a part their names; `saved` counts those of forward and backward."""
    used: Counter[str] = Counter()
    for f in part.functions:
        for channel in (*f.inputs, *f.outputs):
            if channel.variable:
                continue
            if channel.is_saved:
                saved["saved"] += 1
                channel.variable = f"saved_{saved['saved']}"
                continue
            maker, taker = channel.maker or channel.taker, channel.taker or channel.maker
            assert maker is not None and taker is not None
            word = _WORDS.get((maker.template.work, taker.template.work), "carried")
            used[word] += 1
            channel.variable = word + (f"_{used[word]}" if used[word] > 1 else "")
