"""Forward and backward with equal pieces of their blocks as functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from autopar.codegen.blocks import Statement, block_numbers, templates, without_frees
from autopar.codegen.calls import UnfoldableError, is_handed_on
from autopar.codegen.flow import (
    Channel,
    Part,
    Place,
    block_functions,
    link,
    name_channels,
    route,
)


@dataclass(frozen=True)
class Folded:
    """Both functions, and what goes from one to the other.

    saved        names that go one by one
    stored       places of pieces of forward whose values go in lists, one for each block
    channels     those lists
    unpacked     (list, block, names) that backward takes apart before anything else
    """

    forward: Part
    backward: Part
    saved: tuple[str, ...]
    stored: frozenset[Place] = frozenset()
    channels: tuple[Channel, ...] = ()
    unpacked: tuple[tuple[Channel, int, tuple[str, ...]], ...] = ()

    @property
    def saves_parameters(self) -> bool:
        return any(f.slices for f in self.backward.functions)


def unfolded(
    forward: Sequence[Statement], backward: Sequence[Statement], saved: Sequence[str]
) -> Folded:
    return Folded(Part(forward, []), Part(backward, []), tuple(saved))


def fold(
    forward: Sequence[Statement],
    backward: Sequence[Statement],
    parameters: Sequence[str],
    saved: Sequence[str],
    returned: Iterable[str],
    stands_for: Mapping[str, int],
) -> Folded:
    """The functions of equal pieces; `returned` are the results of forward besides `saved`.

    Raises `UnfoldableError` if a value of a block that stands for others is saved apart.
    """
    position = {name: i for i, name in enumerate(parameters)}
    variables = {n for s in (*forward, *backward) for n in (*s.reads, *s.writes)}
    numbers = block_numbers((*forward, *backward), stands_for)
    parts: list[Part] = []
    for statements, word in ((forward, "forward"), (backward, "backward")):
        # Frees of parameters end nothing: `parameters` has them.
        bare = [without_frees(s, position) for s in statements]
        found = templates(bare, variables, position, numbers)
        parts.append(Part(statements, block_functions(bare, found, position, word)))
    ahead, behind = parts
    held = route(ahead, {}, returned)
    places = {name: held[name] for name in saved if name in held}
    places_held = frozenset(places.values())
    route(behind, dict(places))
    ahead.targets |= {place: behind.targets.pop(place, None) for place in places.values()}
    link(ahead, behind, places_held)
    counts: Counter[str] = Counter()
    for part in parts:
        name_channels(part, counts)
    taken_inside = {
        piece.names[k] for piece, f in behind.calls() for k in f.of_parameters
    } - outside_names(behind)
    channels = tuple(c for f in ahead.functions for c in f.outputs if c.is_saved)
    stored, unpacked = set[Place](), []
    for channel in channels:
        assert channel.maker is not None
        for piece in channel.maker.template.pieces:
            of_block = [Place(channel.maker, piece.i, k) for k in channel.made]
            # Forward takes a list apart of which it reads a value itself; then all go one by one.
            if not places_held.issuperset(of_block):
                continue
            stored.update(of_block)
            if not is_handed_on(ahead, channel, piece.i, "maker"):
                if piece.stands_for > 1:
                    raise UnfoldableError(piece.block)
                names = tuple(piece.names[k] for k in channel.made)
                unpacked.append((channel, piece.number, names))
    alone = tuple(n for n in saved if places.get(n) not in stored and n not in taken_inside)
    several = {(f, p.i) for f in ahead.functions for p in f.template.pieces if p.stands_for > 1}
    for name in alone:
        place = places.get(name)
        if place is not None and (place.function, place.i) in several:
            raise UnfoldableError(name)
    return Folded(ahead, behind, alone, frozenset(stored), channels, tuple(unpacked))


def outside_names(part: Part) -> set[str]:
    """The names that the statements between the calls read."""
    found: set[str] = set()
    at = 0
    for piece, f in part.calls():
        found |= {n for s in part.statements[at : piece.start] for n in s.reads}
        found |= {piece.names[k] for k in f.shared}
        at = piece.stop
    return found | {n for s in part.statements[at:] for n in s.reads}
