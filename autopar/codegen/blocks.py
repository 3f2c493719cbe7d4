"""Cuts the statements of a function into pieces, and finds the equal ones.

A piece has neighbouring statements of one block and one kind: what the block computes, the gathers
of its parameters (ZeRO-3), or the reductions of their gradients. A block gathers for the next one
and reduces for the one before, so only pieces are equal in all blocks, first and last as well.

Blocks are numbered modules, as `model.layers.3`. Pieces are equal if their statements are, but for
names and for numbers that grow evenly with the block (the position of a gradient, the number of a
random draw). Frees of parameters don't count, because their owner keeps them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

WORD = re.compile(r"(?<![\w.])(?:[A-Za-z_]\w*|\d+(?![\w.]))")
# Splits a text into what is between words and, at odd positions, the words.
WORDS = re.compile(f"({WORD.pattern})")
# Fewer pieces are easier to read one by one.
LEAST_PIECES = 3

Work = Literal["compute", "gather", "reduce"]


class Statement(NamedTuple):
    """A line as it is printed; `block` is that of its operator or of its parameters.

    It is None for what is outside of blocks, or between two. `follows` says that it belongs to the
    statement before it, as a free does. `region` is the number of its region, if it is in one.
    """

    rows: tuple[str, ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    block: str | None
    work: Work = "compute"
    frees: tuple[str, ...] = ()
    late: tuple[str, ...] = ()
    follows: bool = False
    is_view: bool = False
    region: int | None = None


@dataclass(frozen=True)
class Piece:
    """Statements `start` to `stop` of a block.

    i            the block's place among its like that have statements
    number       its number among all its like
    stands_for   for how many blocks it stands, from this one on
    """

    start: int
    stop: int
    work: Work
    block: str
    i: int
    names: tuple[str, ...]
    numbers: tuple[int, ...]
    number: int
    stands_for: int


@dataclass(eq=False)
class Template:
    """Equal pieces, in their order.

    pieces      name k of one stands where name k of another does
    numbers     (number in block 0, what each block adds), in order
    parameters  the same of each name's place among parameters; any pair for other names
    first       the piece of the first block, by whose names they are printed
    """

    stem: str
    work: Work
    pieces: list[Piece]
    numbers: tuple[tuple[int, int], ...]
    parameters: tuple[tuple[int, int], ...]
    first: Piece = field(init=False)

    def __post_init__(self) -> None:
        self.first = min(self.pieces, key=lambda piece: piece.i)

    @property
    def n_blocks(self) -> int:
        return sum(piece.stands_for for piece in self.pieces)

    @property
    def span(self) -> str:
        """The first and the last block."""
        last = max(self.pieces, key=lambda piece: piece.i)
        stem, dot, number = last.block.rpartition(".")
        return f"{self.first.block} to {stem}{dot}{int(number) + last.stands_for - 1}"


def without_wide_frees(statements: Sequence[Statement]) -> list[Statement]:
    """The statements; what three blocks or more share is freed where the last of them ends.

    Such names are `late` of the statement before. So the last block is equal to the others.
    """
    places: dict[str, set[str]] = {}
    for s in statements:
        for name in s.reads if s.block else ():
            places.setdefault(name, set()).add(s.block or "")
    wide = {name for name, blocks in places.items() if len(blocks) >= LEAST_PIECES}
    found: list[Statement] = []
    for s in statements:
        late = tuple(name for name in s.frees if name in wide)
        if not late:
            found.append(s)
            continue
        found[-1] = found[-1]._replace(late=found[-1].late + late)
        found += freeing((name for name in s.frees if name not in wide), s.region)
    return found


def without_frees(s: Statement, names: Collection[str]) -> Statement:
    """A statement that does not free these names."""
    if not any(name in names for name in s.frees):
        return s
    kept = freeing((name for name in s.frees if name not in names), s.region)
    return kept[0] if kept else s._replace(rows=(), reads=(), frees=())


def freeing(names: Iterable[str], region: int | None = None) -> list[Statement]:
    """The statement that frees some names; none for no names."""
    kept = tuple(names)
    if not kept:
        return []
    row = del_row(kept)
    return [Statement((row,), kept, (), None, frees=kept, follows=True, region=region)]


def del_row(names: Sequence[str]) -> str:
    return f"    del {', '.join(names)}"


class BlockNumber(NamedTuple):
    """As in `Piece`."""

    i: int
    number: int
    stands_for: int


def block_numbers(
    statements: Iterable[Statement], stands_for: Mapping[str, int]
) -> dict[str, BlockNumber]:
    """Block -> its number among those that differ in the last word alone.

    `stands_for` says for how many blocks one stands.
    """
    found: dict[str, set[int]] = {}
    for s in statements:
        if s.block:
            stem, _, word = s.block.rpartition(".")
            found.setdefault(stem, set()).add(int(word))
    numbered: dict[str, BlockNumber] = {}
    for stem, numbers in found.items():
        n_before = 0
        for i, number in enumerate(sorted(numbers)):
            block = f"{stem}.{number}" if stem else str(number)
            numbered[block] = BlockNumber(i, n_before, stands_for.get(block, 1))
            n_before += numbered[block].stands_for
    return numbered


def templates(
    statements: Sequence[Statement],
    variables: Collection[str],
    parameters: Mapping[str, int],
    numbers: Mapping[str, BlockNumber],
) -> list[Template]:
    """The equal pieces of a function, with as much of what stands between as saves most lines.

    `variables` are all names that are no constants; `parameters` have the place of each.
    """
    parts = [_parts(s, frozenset(variables)) for s in statements]
    spans = _spans(statements)
    alike: dict[object, list[int]] = {}
    for k, span in enumerate(spans):
        alike.setdefault(_look(parts, span)[0], []).append(k)
    best: list[Template] = []
    for places in alike.values():
        saved, chosen = 0, list[Template]()
        for ahead, behind in _extents(spans, places):
            longer = _extended(spans, places, ahead, behind)
            found = _equal(parts, longer, parameters, numbers)
            own = sum(_lines_saved(statements, template) for template in found)
            if own > saved:
                saved, chosen = own, found
        best += chosen
    return best


def are_alike(
    statements: Sequence[Statement], parameters: Mapping[str, int], stands_for: Mapping[str, int]
) -> bool:
    """Are blocks that others stand for equal to those, and to the block before them?

    `statements` have the operators of all blocks.
    """
    variables = frozenset(name for s in statements for name in (*s.reads, *s.writes))
    parts = [_parts(s, variables) for s in statements]
    found = _equal(parts, _spans(statements), parameters, block_numbers(statements, {}))
    for block, count in stands_for.items():
        stem, dot, number = block.rpartition(".")
        wanted = {f"{stem}{dot}{int(number) + k}" for k in range(-1, count)}
        equal = [t.pieces for t in found if wanted <= {piece.block for piece in t.pieces}]
        inside = {i for pieces in equal for p in pieces for i in range(p.start, p.stop)}
        if any(s.block in wanted and i not in inside for i, s in enumerate(statements)):
            return False
    return True


def _lines_saved(statements: Sequence[Statement], template: Template) -> int:
    first = template.first
    n_rows = sum(len(s.rows) for s in statements[first.start : first.stop])
    return n_rows * (template.n_blocks - 1)


class _Span(NamedTuple):
    """Statements `start` to `stop` - 1, of one block and for one kind of work."""

    start: int
    stop: int
    work: Work
    block: str


def _spans(statements: Sequence[Statement]) -> list[_Span]:
    """Neighbouring statements of one block and one kind of work, with what stands within."""
    found: list[_Span] = []
    is_open = False
    for i, s in enumerate(statements):
        if s.follows and i:
            if is_open:
                found[-1] = found[-1]._replace(stop=i + 1)
            continue
        is_open = bool(s.block)
        if not s.block:
            continue
        last = found[-1] if found else None
        if (
            last is not None
            and (last.work, last.block) == (s.work, s.block)
            and (s.work == "compute" or last.stop == i)
        ):
            found[-1] = last._replace(stop=i + 1)
        else:
            found.append(_Span(i, i + 1, s.work, s.block))
    return found


def _extents(spans: Sequence[_Span], places: Sequence[int]) -> list[tuple[int, int]]:
    """Of the statements beside equal spans: how many before each may belong to it, and after.

    What stands between two of them belongs in part to the one, in part to the other, as it is in
    the middle.
    """
    k = places[len(places) // 2]
    ahead = spans[k].start - spans[k - 1].stop if k else 0
    behind = spans[k + 1].start - spans[k].stop if k + 1 < len(spans) else 0
    shared = [(behind - n, n) for n in range(behind, -1, -1)] if k + 1 in places else []
    return [*shared, (ahead, behind), (0, 0)] if ahead or behind else [(0, 0)]


def _extended(
    spans: Sequence[_Span], places: Sequence[int], ahead: int, behind: int
) -> list[_Span]:
    """The spans at some places with statements before and after; not those that have fewer."""
    found: list[_Span] = []
    for k in places:
        begins = max(spans[k - 1].stop if k else 0, found[-1].stop if found else 0)
        own = spans[k]._replace(start=spans[k].start - ahead, stop=spans[k].stop + behind)
        ends = spans[k + 1].start if k + 1 < len(spans) else own.stop
        if begins <= own.start and own.stop <= ends:
            found.append(own)
    return found


def _stem(block: str) -> str:
    return block.rpartition(".")[0]


def _look(parts: Sequence[_Parts], span: _Span) -> tuple[object, tuple[str, ...]]:
    """What equal spans have in common, and the names of this one."""
    number_of: dict[str, int] = {}
    own = parts[span.start : span.stop]
    order = tuple(number_of.setdefault(name, len(number_of)) for part in own for name in part.names)
    texts = tuple(part.text for part in own if part.text)
    return (_stem(span.block), span.work, texts, order), tuple(number_of)


def _equal(
    parts: Sequence[_Parts],
    spans: Sequence[_Span],
    parameters: Mapping[str, int],
    numbers: Mapping[str, BlockNumber],
) -> list[Template]:
    """The templates of equal spans."""
    alike: dict[object, list[Piece]] = {}
    for span in spans:
        look, names = _look(parts, span)
        values = tuple(n for part in parts[span.start : span.stop] for n in part.numbers)
        i, number, n_blocks = numbers[span.block]
        alike.setdefault(look, []).append(Piece(*span, i, names, values, number, n_blocks))
    found: list[Template] = []
    for pieces in alike.values():
        blocks = {piece.block for piece in pieces}
        n_blocks = sum(piece.stands_for for piece in pieces)
        if n_blocks < LEAST_PIECES or len(pieces) < 2 or len(blocks) < len(pieces):
            continue
        steps = _even_steps(pieces, [piece.numbers for piece in pieces])
        places = [[parameters.get(name, -1) for name in piece.names] for piece in pieces]
        strides = _even_steps(pieces, places)
        if steps is not None and strides is not None:
            stem = _stem(pieces[0].block)
            found.append(Template(stem, pieces[0].work, pieces, steps, strides))
    return found


def _even_steps(
    pieces: Sequence[Piece], values: Sequence[Sequence[int]]
) -> tuple[tuple[int, int], ...] | None:
    """(value in block 0, what each block adds) of each column; None if one doesn't grow evenly."""
    (a, b), found = (pieces[0].number, pieces[1].number), list[tuple[int, int]]()
    for column in zip(*values, strict=True):
        step, rest = divmod(column[1] - column[0], b - a)
        base = column[0] - a * step
        if rest or any(v != base + step * p.number for v, p in zip(column, pieces, strict=True)):
            return None
        found.append((base, step))
    return tuple(found)


class _Parts(NamedTuple):
    """A statement without names and numbers, and those apart."""

    text: str
    names: tuple[str, ...]
    numbers: tuple[int, ...]


def _parts(s: Statement, known: frozenset[str]) -> _Parts:
    if s.frees:
        return _Parts(f"del {len(s.frees)}", s.frees, ())
    mine = {*s.reads, *s.writes}
    names: list[str] = []
    numbers: list[int] = []
    block = s.block or ""
    rows: list[str] = []
    for row in s.rows:
        if is_comment(row):
            rows.append(row.replace(block, starred_name(block)))
            continue
        code, mark, comment = row.partition("  # ")
        words = WORDS.split(code)
        for k in range(1, len(words), 2):
            word = words[k]
            if word in known:
                words[k] = "$"
                if word in mine:
                    names.append(word)
            elif word[0].isdigit():
                words[k] = "#"
                numbers.append(int(word))
        rows += ["".join(words), mark]
        # Types and bytes are equal as they are; the comment of a gradient names a variable.
        if comment.startswith("of ") or "  of " in comment:
            comment = WORD.sub(lambda m: "$" if m.group() in known else m.group(), comment)
        rows.append(comment)
    # Names differ in length, and so does the space around them.
    return _Parts(" ".join(" ".join(rows).split()), tuple(names), tuple(numbers))


def is_comment(row: str) -> bool:
    return row.lstrip().startswith("#")


def starred_name(block: str) -> str:
    """`model.layers.3` -> `model.layers.*`."""
    return ".".join("*" if word.isdigit() else word for word in block.split("."))


def affine(base: int, step: int, i: str = "i") -> str:
    """`base + step * i`, in words of Python; `i` may be a number."""
    if i.isdigit():
        return str(base + step * int(i))
    grown = i if abs(step) == 1 else f"{abs(step)} * {i}"
    if step == 0:
        return str(base)
    if base == 0 and step > 0:
        return grown
    return f"{base} {'+' if step > 0 else '-'} {grown}"
