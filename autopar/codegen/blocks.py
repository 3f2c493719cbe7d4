"""Finds equal blocks among the statements of a function: each is printed once and called in a loop.

Blocks are numbered modules, as `model.layers.3`. Neighbours are equal if their statements are, but
for names and for numbers that grow evenly (the position of a gradient, the number of a random
draw). A name that a block does not define itself is

    shared     the same in all blocks                                 rotary tables, a mask
    carried    made, or taken, by the block before                    the hidden state, a handle
    a slice    an item of a list, one stride further in each block    parameters, what is saved

Blocks with any other name are printed one by one.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

_WORD = re.compile(r"(?<![\w.])(?:[A-Za-z_]\w*|\d+(?![\w.]))")
# Fewer blocks are easier to read one by one.
LEAST_BLOCKS = 3


@dataclass(frozen=True)
class Statement:
    """A line as it is printed; `block` is that of its operator.

    It is empty for an operator outside of blocks, and None for what is no operator.
    """

    rows: tuple[str, ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    block: str | None
    frees: tuple[str, ...] = ()
    late: tuple[str, ...] = ()
    is_move: bool = False


@dataclass(frozen=True)
class Loop:
    """`count` equal blocks of `length` statements, from `start` on.

    blocks    their names
    names     of block r at `names[r]`: in order of first occurrence, so equal positions correspond
    shared    positions of names that are the same in all blocks
    carried   position of a name -> that of the name of the block before
    own       positions of names that a block defines
    sliced    positions of the others
    numbers   row of the block, place in it -> (number in the first block, stride)
    """

    start: int
    length: int
    count: int
    names: tuple[tuple[str, ...], ...]
    shared: tuple[int, ...]
    carried: Mapping[int, int]
    own: frozenset[int]
    sliced: tuple[int, ...]
    numbers: tuple[tuple[int, int], ...]
    blocks: tuple[str, ...]

    def without(self, n_first: int, n_last: int) -> Loop:
        """The loop without some of its blocks."""
        return replace(
            self,
            start=self.start + n_first * self.length,
            count=self.count - n_first - n_last,
            names=self.names[n_first : self.count - n_last],
            blocks=self.blocks[n_first : self.count - n_last],
            numbers=tuple((base + n_first * stride, stride) for base, stride in self.numbers),
        )

    @property
    def stop(self) -> int:
        return self.start + self.length * self.count


@dataclass(frozen=True)
class _Shape:
    """A block's statements without names and numbers, and those apart."""

    text: tuple[str, ...]
    order: tuple[int, ...]
    names: tuple[str, ...]
    numbers: tuple[int, ...]

    def is_like(self, other: _Shape) -> bool:
        return self.text == other.text and self.order == other.order


def without_wide_frees(statements: Sequence[Statement]) -> list[Statement]:
    """The statements; what three blocks or more share is freed where the last of them ends.

    Such names are `late` of the statement before. So the last block is equal to the others.
    """
    places: dict[str, set[str]] = {}
    for s in statements:
        for name in s.reads if s.block else ():
            places.setdefault(name, set()).add(s.block or "")
    wide = {name for name, blocks in places.items() if len(blocks) >= LEAST_BLOCKS}
    found: list[Statement] = []
    for s in statements:
        late = tuple(name for name in s.frees if name in wide)
        if not late:
            found.append(s)
            continue
        found[-1] = replace(found[-1], late=found[-1].late + late)
        if kept := tuple(name for name in s.frees if name not in wide):
            found.append(Statement((del_row(kept),), kept, (), None, kept))
    return found


def del_row(names: Sequence[str]) -> str:
    return f"    del {', '.join(names)}"


def find_loops(statements: Sequence[Statement], variables: Collection[str]) -> list[list[Loop]]:
    """The loops of equal blocks, in order; `variables` are all names that are no constants.

    There are three lists to choose from: a block begins with its first operator, with the reshards
    right before it, or where the block before has had its last operator.
    """
    known = frozenset(variables)
    firsts: list[tuple[str, int]] = []
    moves: list[tuple[str, int]] = []
    afters: list[tuple[str, int]] = []
    last_at, move_at = -1, None
    for i, s in enumerate(statements):
        if s.block is None and not s.frees:
            move_at = i if s.is_move and move_at is None else move_at if s.is_move else None
        if s.block is None:
            continue
        if s.block and (not firsts or firsts[-1][0] != s.block):
            firsts.append((s.block, i))
            moves.append((s.block, i if move_at is None else move_at))
            afters.append((s.block, last_at + 1))
        last_at, move_at = i, None
    parts = [_parts(s, known) for s in statements]
    return [_loops_from(statements, parts, starts) for starts in (firsts, moves, afters)]


def _loops_from(
    statements: Sequence[Statement],
    parts: Sequence[_Parts],
    starts: Sequence[tuple[str, int]],
) -> list[Loop]:
    """The loops of blocks that begin at `starts`."""
    found: list[Loop] = []
    k = 0
    while k + LEAST_BLOCKS <= len(starts):
        length, shapes = starts[k + 1][1] - starts[k][1], list[_Shape]()
        for r, (_, at) in enumerate(starts[k:]):
            if at != starts[k][1] + length * r:
                break
            shape = _shape(parts, at, length)
            if shape is None or (shapes and not shape.is_like(shapes[0])):
                break
            shapes.append(shape)
        names = tuple(block for block, _ in starts[k : k + len(shapes)])
        loop = _loop(statements, starts[k][1], length, shapes, names)
        if loop is not None:
            found.append(loop)
            k += loop.count
        else:
            k += 1
    return found


class _Parts(NamedTuple):
    """A statement without names and numbers, and those apart."""

    text: str
    names: tuple[str, ...]
    numbers: tuple[int, ...]


def _parts(s: Statement, known: frozenset[str]) -> _Parts:
    mine = {*s.reads, *s.writes} & known
    names: list[str] = []
    numbers: list[int] = []

    def replaced(match: re.Match[str]) -> str:
        word = match.group()
        if word[0].isdigit():
            numbers.append(int(word))
            return "#"
        if word in mine:
            names.append(word)
            return "$"
        return "$" if word in known else word

    block = s.block or ""
    rows = (
        row.replace(block, starred_name(block)) if is_comment(row) else _WORD.sub(replaced, row)
        for row in s.rows
    )
    # Names differ in length, and so does the space around them.
    return _Parts(" ".join(" ".join(rows).split()), tuple(names), tuple(numbers))


def _shape(parts: Sequence[_Parts], at: int, length: int) -> _Shape | None:
    """The shape of the statements from `at` on."""
    if at + length > len(parts):
        return None
    number_of: dict[str, int] = {}
    of_block = parts[at : at + length]
    order = tuple(
        number_of.setdefault(name, len(number_of)) for part in of_block for name in part.names
    )
    return _Shape(
        tuple(part.text for part in of_block), order, tuple(number_of),
        tuple(number for part in of_block for number in part.numbers),
    )  # fmt: skip


def is_comment(row: str) -> bool:
    return row.lstrip().startswith("#")


def starred_name(block: str) -> str:
    """`model.layers.3` -> `model.layers.*`."""
    return ".".join("*" if word.isdigit() else word for word in block.split("."))


def _loop(
    statements: Sequence[Statement],
    start: int,
    length: int,
    shapes: Sequence[_Shape],
    blocks: tuple[str, ...],
) -> Loop | None:
    """The loop of these blocks, or of as many of them as have names that can be handed on."""
    if len(shapes) < LEAST_BLOCKS:
        return None
    numbers: list[tuple[int, int]] = []
    for values in zip(*(shape.numbers for shape in shapes), strict=True):
        stride = values[1] - values[0]
        if any(b - a != stride for a, b in itertools.pairwise(values)):
            return None
        numbers.append((values[0], stride))
    read, written = set[str](), set[str]()
    for s in statements[start : start + length]:
        # A block that makes a value again may have taken it before.
        read.update(name for name in s.reads if name not in written)
        written.update(s.writes)
    names = tuple(shape.names for shape in shapes)
    own = frozenset(k for k, name in enumerate(names[0]) if name in written - read)
    shared: list[int] = []
    carried: dict[int, int] = {}
    sliced: list[int] = []
    places = [{name: k for k, name in enumerate(of)} for of in names]
    for k in range(len(names[0])):
        if k in own:
            continue
        if len({of[k] for of in names}) == 1:
            shared.append(k)
            continue
        before = {places[r - 1].get(names[r][k]) for r in range(1, len(names))}
        (source, *others) = before
        if source is not None and not others:
            carried[k] = source
        else:
            sliced.append(k)
    return Loop(
        start, length, len(shapes), names, tuple(shared), carried, own, tuple(sliced),
        tuple(numbers), blocks,
    )  # fmt: skip


def numbered_rows(statement: Statement, loop: Loop, first: int) -> tuple[list[str], int]:
    """The rows of a statement in the function of its block, where `i` counts the blocks.

    `first` is the number of the statement's first number in the block; also returns the next.
    """
    at, rows = first, list[str]()
    for row in statement.rows:
        if is_comment(row):
            rows.append(row.replace(loop.blocks[0], starred_name(loop.blocks[0])))
            continue
        parts, end = list[str](), 0
        for match in _WORD.finditer(row):
            if match.group()[0].isdigit():
                base, stride = loop.numbers[at]
                at += 1
                if stride:
                    parts += [row[end : match.start()], _affine(base, stride)]
                    end = match.end()
        rows.append("".join([*parts, row[end:]]))
    return rows, at


def _affine(base: int, stride: int) -> str:
    step = "i" if abs(stride) == 1 else f"{abs(stride)} * i"
    return f"{base} {'+' if stride > 0 else '-'} {step}"
