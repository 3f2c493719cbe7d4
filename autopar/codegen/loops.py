"""Equal blocks as one function each, and what goes from the forward ones to the backward ones.

    forward     saved_1 = []
                for i in range(80):
                    carried, one = h_forward(i, carried, parameters[1 + 9 * i : 10 + 9 * i], env)
                    saved_1.append(one)
    backward    for i in range(80):
                    carried = h_backward(i, carried, saved_1[79 - i], ready, env)

What is saved of a block is in lists: one for each function that takes it, so that a function can
clear its own, and each value ends where it is freed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from autopar.codegen.blocks import LEAST_BLOCKS, Loop, Statement, find_loops
from autopar.program import free_name, identifier


class UnfoldableError(Exception):
    """The blocks are equal, but what goes from forward to backward is not."""


@dataclass(eq=False)
class SavedGroup:
    """Values of each block that the same function takes: `made` in forward, `taken` in backward.

    `variable` holds a list for each block. Block r of forward is block `last - r` of `taker`.
    """

    variable: str
    made: tuple[int, ...]
    taken: tuple[int, ...] = ()
    taker: BlockFunction | None = None
    last: int = 0


@dataclass(eq=False)
class BlockFunction:
    """A loop with what its function takes and returns.

    parameters   (first, stop, stride) of its slice of the parameters
    groups       what it saves, or what it takes of what is saved
    """

    loop: Loop
    name: str
    parameters: tuple[int, int, int] | None = None
    groups: list[SavedGroup] = field(default_factory=list)


@dataclass(frozen=True)
class Folded:
    """The statements of both functions, and their loops.

    saved          names that go from forward to backward one by one
    unpacked       (group, block, names) that backward takes outside of its loops
    """

    forward: tuple[Statement, ...]
    backward: tuple[Statement, ...]
    forward_loops: tuple[BlockFunction, ...]
    backward_loops: tuple[BlockFunction, ...]
    saved: tuple[str, ...]
    groups: tuple[SavedGroup, ...]
    unpacked: tuple[tuple[SavedGroup, int, tuple[str, ...]], ...]

    @property
    def saves_parameters(self) -> bool:
        return any(f.parameters for f in self.backward_loops)


def fold(
    forward: Sequence[Statement],
    backward: Sequence[Statement],
    parameters: Sequence[str],
    saved: Sequence[str],
    returned: Iterable[str],
) -> Folded:
    """The loops of two functions; `returned` are the results of forward besides `saved`.

    Raises `UnfoldableError` if what forward saves can't be handed to the loops of backward.
    """
    position = {name: i for i, name in enumerate(parameters)}
    variables = {n for s in (*forward, *backward) for n in (*s.reads, *s.writes)}
    ahead = _functions(forward, variables, position, {*returned}, frozenset(), "forward")
    home = {
        name: (f, r, k)
        for f in ahead
        for k in f.loop.own
        for r, names in enumerate(f.loop.names)
        for name in [names[k]]
    }
    of_blocks = frozenset(home) & {*saved}
    behind = _functions(backward, variables, position, set(), of_blocks, "backward")
    takers: dict[str, tuple[int, int, int]] = {}
    kept: list[BlockFunction] = []
    for b in behind:
        found = _taken(b, home, position)
        if found is not None:
            takers |= {name: (len(kept), last, k) for name, last, k in found}
            kept.append(b)
    groups = _groups(ahead, kept, takers, {*saved})
    inside = {name for b in kept for name in _names_inside(b)}
    outside = outside_names(backward, kept)
    if not outside.isdisjoint(takers):
        raise UnfoldableError("what a loop takes is read outside of it, too")
    unpacked = []
    for f in ahead:
        for group in f.groups:
            for r, names in enumerate(f.loop.names):
                own = tuple(names[k] if names[k] in {*saved} else "_" for k in group.made)
                if not any(name in takers for name in own) and set(own) != {"_"}:
                    unpacked.append((group, r, own))
    alone = tuple(
        name for name in saved if name not in home and (name not in inside or name in outside)
    )
    return Folded(
        tuple(forward), tuple(backward), tuple(ahead), tuple(kept), alone,
        tuple(groups), tuple(unpacked),
    )  # fmt: skip


def _functions(
    statements: Sequence[Statement],
    variables: set[str],
    position: dict[str, int],
    returned: set[str],
    of_blocks: frozenset[str],
    word: str,
) -> list[BlockFunction]:
    """The loops whose names can be handed on, where they have most blocks.

    `of_blocks` are saved by loops of forward.
    """
    best: list[BlockFunction] = []
    for loops in find_loops(statements, variables):
        found: list[BlockFunction] = []
        used: Counter[str] = Counter()
        for whole in loops:
            words = [w for w in whole.blocks[0].split(".") if not w.isdigit()]
            stem = identifier("_".join(words) or "block")
            numbered = f"{stem}_{word}" + (f"_{used[stem] + 1}" if used[stem] else "")
            name = free_name(numbered, variables)
            f = _function(whole, name, statements, position, returned, of_blocks)
            if f is not None:
                used[stem] += 1
                found.append(f)
        if sum(f.loop.count for f in found) > sum(f.loop.count for f in best):
            best = found
    return best


def _function(
    whole: Loop,
    name: str,
    statements: Sequence[Statement],
    position: dict[str, int],
    returned: set[str],
    of_blocks: frozenset[str],
) -> BlockFunction | None:
    """The function of a loop's blocks; None if a name can't be handed on."""
    of_parameters = [k for k in whole.sliced if whole.names[0][k] in position]
    others = [k for k in whole.sliced if k not in of_parameters]
    loop = _trimmed(whole, others, of_blocks)
    if loop is None:
        return None
    if _hides(loop, statements, returned):
        # What the last block makes may be read later; what the one before it carries over is.
        loop = loop.without(0, 1)
        if loop.count < LEAST_BLOCKS or _hides(loop, statements, returned):
            return None
    slices = _slices(loop, of_parameters, position)
    return None if of_parameters and slices is None else BlockFunction(loop, name, slices)


def _hides(loop: Loop, statements: Sequence[Statement], returned: set[str]) -> bool:
    """Is a value that a block makes, and does not hand on to the next, read after the loop?"""
    later = {n for s in statements[loop.stop :] for n in s.reads} | returned
    made = {names[k] for names in loop.names for k in loop.own}
    return not (made - {loop.names[-1][k] for k in loop.carried.values()}).isdisjoint(later)


def _trimmed(loop: Loop, positions: Sequence[int], known: frozenset[str]) -> Loop | None:
    """The blocks of a loop whose names at these positions are known; None if they are too few."""
    good = [all(names[k] in known for k in positions) for names in loop.names]
    if good.count(True) < LEAST_BLOCKS:
        return None
    first = good.index(True)
    last = len(good) - good[::-1].index(True)
    return loop.without(first, len(good) - last) if all(good[first:last]) else None


def _slices(
    loop: Loop, positions: Sequence[int], position: dict[str, int]
) -> tuple[int, int, int] | None:
    """(first, stop, stride) of the parameters that a block takes."""
    if not positions:
        return None
    if any(names[k] not in position for k in positions for names in loop.names):
        return None
    first = [position[loop.names[0][k]] for k in positions]
    stride = position[loop.names[1][positions[0]]] - first[0]
    for r, names in enumerate(loop.names):
        if any(position[names[k]] != a + r * stride for k, a in zip(positions, first, strict=True)):
            return None
    return min(first), max(first) + 1, stride


def _taken(
    b: BlockFunction,
    home: dict[str, tuple[BlockFunction, int, int]],
    position: dict[str, int],
) -> list[tuple[str, int, int]] | None:
    """(name, last, position) of the values of forward's blocks that a loop of backward takes."""
    found: list[tuple[str, int, int]] = []
    for k in b.loop.sliced:
        if b.loop.names[0][k] in position:
            continue
        f, r, k_f = home[b.loop.names[0][k]]
        for i, names in enumerate(b.loop.names):
            if home[names[k]] != (f, r - i, k_f):
                return None
            found.append((names[k], r, k))
    return found


def _groups(
    ahead: Sequence[BlockFunction],
    behind: Sequence[BlockFunction],
    takers: dict[str, tuple[int, int, int]],
    saved: set[str],
) -> list[SavedGroup]:
    """What each block saves, by the functions that take it."""
    every: list[SavedGroup] = []
    for f in ahead:
        by_taker: dict[tuple[tuple[int, int] | None, ...], list[int]] = {}
        for k in sorted(f.loop.own):
            own = [names[k] for names in f.loop.names]
            if saved.isdisjoint(own):
                continue
            who = tuple(takers[name][:2] if name in takers else None for name in own)
            by_taker.setdefault(who, []).append(k)
        for who, made in by_taker.items():
            group = SavedGroup(f"saved_{len(every) + 1}", tuple(made))
            for taker in dict.fromkeys(taker for taker in who if taker is not None):
                if group.taker is not None:
                    raise UnfoldableError("two loops take what one loop saves")
                block = f.loop.names[who.index(taker)]
                group.taker, group.last = behind[taker[0]], taker[1]
                group.taken = tuple(takers[block[k]][2] for k in made)
                group.taker.groups.append(group)
            f.groups.append(group)
            every.append(group)
    return every


def _names_inside(b: BlockFunction) -> set[str]:
    """The names that a loop takes by its slices."""
    return {names[k] for k in b.loop.sliced for names in b.loop.names}


def outside_names(statements: Sequence[Statement], loops: Sequence[BlockFunction]) -> set[str]:
    """The names that are read outside of loops, or that these begin with."""
    found: set[str] = set()
    at = 0
    for b in loops:
        found |= {n for s in statements[at : b.loop.start] for n in s.reads}
        found |= {b.loop.names[0][k] for k in (*b.loop.shared, *b.loop.carried)}
        at = b.loop.stop
    return found | {n for s in statements[at:] for n in s.reads}
