"""Forward and backward with equal pieces of their blocks as functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from autopar.codegen.blocks import Statement, block_numbers, templates, without_frees
from autopar.codegen.calls import UnfoldableError
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
    channels     the lists in which the others go, one for each block
    unpacked     (list, block, names) that backward takes apart before anything else
    """

    forward: Part
    backward: Part
    saved: tuple[str, ...]
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
    position: Mapping[str, int],
    saved: Sequence[str],
    returned: Iterable[str],
    stands_for: Mapping[str, int],
) -> Folded:
    """The functions of equal pieces; `position` is that of each parameter, `returned` are the
    results of forward besides `saved`.

    Raises `UnfoldableError` if a block that stands for others has a statement or a saved value of
    its own.
    """
    variables = {n for s in (*forward, *backward) for n in (*s.reads, *s.writes)}
    numbers = block_numbers((*forward, *backward), stands_for)
    parts: list[Part] = []
    for statements, word in ((forward, "forward"), (backward, "backward")):
        # Frees of parameters end nothing: `parameters` has them.
        bare = [without_frees(s, position) for s in statements]
        found = templates(bare, variables, position, numbers)
        parts.append(Part(statements, block_functions(bare, found, position, word)))
        for s in (s for between, _ in parts[-1].outside() for s in between):
            if s.rows and s.block in stands_for:
                raise UnfoldableError(s.block)
    ahead, behind = parts
    held = route(ahead, {}, returned)
    places = {name: held[name] for name in saved if name in held}
    places_held = frozenset(places.values())
    route(behind, dict(places))
    link([*ahead.functions, *behind.functions], len(ahead.functions), places_held)
    counts: Counter[str] = Counter()
    for part in parts:
        name_channels(part, counts)
    taken_inside = {
        call.piece.names[k] for call in behind.calls for k in call.function.of_parameters
    } - outside_names(behind)
    channels = tuple(c for f in ahead.functions for c in f.outputs if c.is_saved)
    unpacked = []
    for channel in channels:
        assert channel.maker is not None
        for call in channel.maker.calls:
            # Forward takes a list apart of which it reads a value itself; then all go one by one.
            if not places_held.issuperset(Place(call, k) for k in channel.made):
                continue
            call.stored.update(channel.made)
            if not call.hands_on(channel):
                if call.piece.stands_for > 1:
                    raise UnfoldableError(call.piece.block)
                names = tuple(call.piece.names[k] for k in channel.made)
                unpacked.append((channel, call.piece.number, names))
    alone: list[str] = []
    for name in saved:
        place = places.get(name)
        if name in taken_inside or (place is not None and place.k in place.call.stored):
            continue
        if place is not None and place.call.piece.stands_for > 1:
            raise UnfoldableError(name)
        alone.append(name)
    return Folded(ahead, behind, tuple(alone), channels, tuple(unpacked))


def outside_names(part: Part) -> set[str]:
    """The names that the statements between the calls read."""
    found = {n for between, _ in part.outside() for s in between for n in s.reads}
    return found | {call.piece.names[k] for call in part.calls for k in call.function.shared}
