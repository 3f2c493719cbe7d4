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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import zip_longest
from typing import NamedTuple

from autopar.codegen.blocks import Piece, Statement, Template
from autopar.program.lines import identifier


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
    calls: list[Call] = field(default_factory=list)

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


class Way(NamedTuple):
    """To name `k` of the piece of a function, `distance` blocks further."""

    function: BlockFunction
    k: int
    distance: int


@dataclass(eq=False)
class Call:
    """The call of a function for one of its pieces.

    statements        the piece
    is_apart          other statements stand between the call before and this one
    sources, targets  where the value of a name comes from, and where it goes next; none for the
                      statements between the calls
    stored            the names that are saved in a list of the block
    """

    piece: Piece
    function: BlockFunction
    statements: Sequence[Statement]
    is_apart: bool
    sources: dict[int, Way] = field(default_factory=dict)
    targets: dict[int, Way] = field(default_factory=dict)
    stored: set[int] = field(default_factory=set)

    @property
    def computes(self) -> bool:
        return self.function.template.work == "compute"

    @property
    def late(self) -> list[str]:
        """What is freed after the call."""
        return [name for s in self.statements for name in s.late]

    @cached_property
    def packed(self) -> list[Channel]:
        """The lists that statements fill before the call."""
        return [
            c
            for c in self.function.inputs
            if c.maker is None
            or any(
                self.sources.get(b) != Way(c.maker, a, -c.distance)
                for a, b in zip(c.made, c.taken, strict=True)
            )
        ]

    @cached_property
    def unpacked(self) -> list[Channel]:
        """The lists that statements take apart after the call."""
        return [
            c
            for c in self.function.outputs
            if not (self.stored.issuperset(c.made) if c.is_saved else self.hands_on(c))
        ]

    def hands_on(self, channel: Channel) -> bool:
        """Does all that this call puts into the list go to the list's taker?"""
        taker, pairs = channel.taker, zip(channel.made, channel.taken, strict=False)
        return taker is not None and all(
            self.targets.get(a) == Way(taker, b, channel.distance) for a, b in pairs
        )

    @property
    def is_plain(self) -> bool:
        """Nothing stands between this call and those beside it."""
        return not (self.packed or self.unpacked or self.late or self.is_apart)


class Place(NamedTuple):
    """Name `k` of the piece of a call."""

    call: Call
    k: int


class Part:
    """Forward, or backward: statements, and the calls that some of them are."""

    def __init__(self, statements: Sequence[Statement], functions: Sequence[BlockFunction]) -> None:
        self.statements, self.functions = statements, functions
        self.calls: list[Call] = []
        pieces = [(piece, f) for f in functions for piece in f.template.pieces]
        end = 0
        for piece, f in sorted(pieces, key=lambda own: own[0].start):
            is_apart = any(s.rows for s in statements[end : piece.start])
            end = piece.stop
            self.calls.append(Call(piece, f, statements[piece.start : end], is_apart))
            f.calls.append(self.calls[-1])

    def outside(self) -> Iterator[tuple[Sequence[Statement], Call | None]]:
        """The statements before each call, with the call; those after the last one, with None."""
        end = 0
        for call in self.calls:
            yield self.statements[end : call.piece.start], call
            end = call.piece.stop
        yield self.statements[end:], None


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
        _slices(template, own),
    )  # fmt: skip


def _slices(template: Template, positions: Sequence[int]) -> tuple[Slice, ...]:
    """The slices of the parameters at some positions: those that move on together, side by side."""
    places = [(*template.parameters[k], k) for k in positions]
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
    """Find where the values of all calls come from and go; returns who has which in the end.

    `holder` has the values that backward is given by calls of forward. The results of the function,
    `returned`, go to its own statements.
    """

    def hand_on(names: Iterable[str], call: Call | None = None, taken: Sequence[int] = ()) -> None:
        for name, k in zip_longest(names, taken):
            source = holder.get(name)
            holder[name] = None if call is None else Place(call, k)
            if source is None or call is None:
                continue
            distance = call.piece.i - source.call.piece.i
            source.call.targets[source.k] = Way(call.function, k, distance)
            call.sources[k] = Way(source.call.function, source.k, -distance)

    for between, call in part.outside():
        for s in between:
            hand_on((*s.reads, *s.writes, *s.late))
        if call is not None:
            f, names = call.function, call.piece.names
            hand_on(names[k] for k in f.shared)
            hand_on([names[k] for k in f.taken], call, f.taken)
            holder |= {names[k]: Place(call, k) for k in f.given}
            hand_on(call.late)
    hand_on(returned)
    return {name: place for name, place in holder.items() if place is not None}


def link(functions: Sequence[BlockFunction], n_ahead: int, saved: Collection[Place]) -> None:
    """Make the channels: what goes where in most calls. `saved` goes to backward, from the first
    `n_ahead` functions to the others."""
    to = {f: _usual(f, f.given, lambda call: call.targets) for f in functions}
    of = {f: _usual(f, f.taken, lambda call: call.sources) for f in functions}
    for f in functions:
        ways: dict[tuple[BlockFunction, int], list[tuple[int, int]]] = {}
        alone: dict[bool, list[int]] = {}
        for k in f.given:
            way = to[f].get(k)
            if way is not None and of[way.function].get(way.k) == Way(f, k, -way.distance):
                ways.setdefault((way.function, way.distance), []).append((k, way.k))
            else:
                n_saved = sum(c.piece.stands_for for c in f.calls if Place(c, k) in saved)
                alone.setdefault(2 * n_saved > f.template.n_blocks, []).append(k)
        for (taker, distance), pairs in ways.items():
            is_saved = f in functions[:n_ahead] and taker in functions[n_ahead:]
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
    f: BlockFunction, positions: Sequence[int], ways: Callable[[Call], Mapping[int, Way]]
) -> dict[int, Way]:
    """The way of most blocks at these positions."""
    counts = Counter[tuple[Way | None, ...]]()
    for call in f.calls:
        counts[tuple(map(ways(call).get, positions))] += call.piece.stands_for
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
