"""The body of `forward` or `backward`: its own statements, and calls of the functions of blocks.

Calls that repeat, a block further each time, are a loop:

    coming = layers_gather(0, parameters[0:9], env)
    for i in range(79):
        gathered = layers_gathered(i, coming)
        coming = layers_gather(i + 1, parameters[9 + 9 * i : 18 + 9 * i], env)
        carried, saved_1[i] = layers_forward(i, gathered, carried, env)
    gathered = layers_gathered(79, coming)
    carried, saved_1[79] = layers_forward(79, gathered, carried, env)

What a function takes from statements is put into a list before its call; what statements take of
its lists is taken out after it.

A block that stands for others (`JointProgram.stands_for`) has the calls of all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autopar.codegen.blocks import LEAST_PIECES, Piece, Statement, affine, del_row
from autopar.codegen.flow import BlockFunction, Channel, Part, Place
from autopar.codegen.words import listed

_MOST_CALLS = 16  # in a loop


class UnfoldableError(Exception):
    """A list would hold the values of two blocks at once, or a block that stands for others is not
    all calls."""


@dataclass(frozen=True)
class _Call:
    """A call, with the lists that statements fill before it, and take apart after it.

    `is_apart` says that statements stand between it and the call before.
    """

    piece: Piece
    function: BlockFunction
    packed: tuple[Channel, ...]
    unpacked: tuple[Channel, ...]
    late: tuple[str, ...]
    is_apart: bool

    @property
    def place(self) -> tuple[str, int]:
        """The stem of its block, and the block's place among its like."""
        return self.function.template.stem, self.piece.i

    @property
    def computes(self) -> bool:
        return self.piece.work == "compute"

    @property
    def is_plain(self) -> bool:
        """Nothing stands between this call and those beside it."""
        return not (self.packed or self.unpacked or self.late or self.is_apart)

    def shift_block(self, n: int) -> _Call:
        """The call of the block that is `n` further."""
        return replace(self, piece=replace(self.piece, number=self.piece.number + n)) if n else self


@dataclass
class Main:
    """`name_of` and `arguments` give the words of a call, besides its lists."""

    part: Part
    saved: frozenset[Place]
    stands_for: Mapping[str, int]
    name_of: Mapping[BlockFunction, str]
    arguments: Callable[[BlockFunction, Callable[[int, int], str]], list[str]]
    live: set[Channel] = field(default_factory=set)

    def rows(self) -> list[str]:
        calls = self._calls()
        for block in self.stands_for:
            calls = _with_copies(calls, block)
        self._check_blocks()
        out: list[str] = []
        at, k = 0, 0
        while k < len(calls):
            out += printed(self.part.statements[at : calls[k].piece.start])
            start, n_calls, count = self._loop(calls, k)
            every = calls[k : k + n_calls * count] if start == k else calls[k : k + 1]
            out += self._printed(every, n_calls if start == k else 1)
            k += len(every)
            at = every[-1].piece.stop
        return out + printed(self.part.statements[at:])

    def _calls(self) -> list[_Call]:
        found: list[_Call] = []
        at = 0
        for piece, f in self.part.calls():
            found.append(self._call(piece, f, at))
            at = piece.stop
        return found

    def _call(self, piece: Piece, f: BlockFunction, at: int) -> _Call:
        """The call of a piece; the one before ends at `at`."""
        own = self.part.statements[piece.start : piece.stop]
        packed = tuple(c for c in f.inputs if not is_handed_on(self.part, c, piece.i, "taker"))
        unpacked = []
        for channel in f.outputs:
            if channel.is_saved:
                is_whole = all(Place(f, piece.i, k) in self.saved for k in channel.made)
            else:
                is_whole = is_handed_on(self.part, channel, piece.i, "maker")
            if not is_whole:
                unpacked.append(channel)
        late = tuple(name for s in own for name in s.late)
        is_apart = any(s.rows for s in self.part.statements[at : piece.start])
        return _Call(piece, f, packed, tuple(unpacked), late, is_apart)

    def _check_blocks(self) -> None:
        """Raise `UnfoldableError` if a block that stands for others has statements of its own."""
        inside = {i for p, _ in self.part.calls() for i in range(p.start, p.stop)}
        for i, s in enumerate(self.part.statements):
            if s.rows and s.block in self.stands_for and i not in inside:
                raise UnfoldableError(s.block)

    def _loop(self, calls: Sequence[_Call], k: int) -> tuple[int, int, int]:
        """(first call, calls in the body, rounds) of the longest loop that begins about here."""
        best = (k, 1, 1)
        best_key = (0, False)
        for n_calls in range(1, _MOST_CALLS + 1):
            for start in range(k, k + n_calls):
                count = self._rounds(calls, start, n_calls)
                if count < LEAST_PIECES:
                    continue
                key = (count * n_calls, calls[start].function.template.work == "compute")
                if key > best_key:
                    best, best_key = (start, n_calls, count), key
        return best

    def _rounds(self, calls: Sequence[_Call], start: int, n_calls: int) -> int:
        """How often `n_calls` calls repeat from `start` on, a block further each time."""
        count = 0
        step = 0
        while start + n_calls * (count + 1) <= len(calls):
            first = start + n_calls * count
            own = calls[first : first + n_calls]
            base = calls[start : start + n_calls]
            if any(a.function is not b.function for a, b in zip(own, base, strict=True)):
                break
            moved = {a.piece.number - b.piece.number for a, b in zip(own, base, strict=True)}
            if count == 1:
                step = next(iter(moved))
            if len(moved) != 1 or (count and (moved != {step * count} or abs(step) != 1)):
                break
            if any(call.is_apart for call in own[count == 0 :]):
                break
            if count and any(call.packed for call in own):
                break
            count += 1
            if any(call.unpacked or call.late for call in own):
                break
        return count

    def _printed(self, calls: Sequence[_Call], n_calls: int) -> list[str]:
        """Calls, as a loop with `n_calls` in its body if there are more."""
        out: list[str] = []
        is_loop = len(calls) > n_calls
        for call in calls:
            for channel in call.packed:
                self._fill(channel)
                names = [call.piece.names[k] for k in channel.taken]
                variable = _variable(channel, str(call.piece.number - channel.distance))
                out += [*listed(f"    {variable} = [", names, "]"), del_row(names)]
        self._check(calls)
        body = calls[:n_calls]
        numbers = (c.piece.number for c in body if c.function.template.work == "compute")
        i = next(numbers, body[0].piece.number)
        if is_loop:
            step = calls[n_calls].piece.number - body[0].piece.number
            rounds = len(calls) // n_calls
            out.append(f"    for i in {_range(i, rounds, step)}:")
        for call in body:
            out.append(self._row(call, call.piece.number - i if is_loop else None))
        last = calls[-n_calls:]
        for call in last:
            for channel in call.unpacked:
                names = [call.piece.names[k] for k in channel.made]
                variable = _variable(channel, str(call.piece.number))
                out += listed("    ", names, f" = {variable}")
                out.append(del_row([variable]))
        late = [name for call in last for name in call.late]
        return [*out, *([del_row(late)] if late else [])]

    def _check(self, calls: Sequence[_Call]) -> None:
        """Take and fill the lists of calls, in order."""
        for call in calls:
            self.live.difference_update(call.function.inputs)
            for channel in call.function.outputs:
                if channel not in call.unpacked:
                    self._fill(channel)

    def _fill(self, channel: Channel) -> None:
        """Raise `UnfoldableError` if a list is filled while it holds values."""
        if channel.is_saved:
            return
        if channel in self.live:
            raise UnfoldableError(channel.variable)
        self.live.add(channel)

    def _row(self, call: _Call, ahead: int | None) -> str:
        """A call; in a loop it is that of block `i + ahead`."""
        f = call.function

        def block(distance: int = 0) -> str:
            """The block that is `distance` before that of the call."""
            if ahead is None:
                return str(call.piece.number - distance)
            n = ahead - distance
            return f"i {'+' if n > 0 else '-'} {abs(n)}" if n else "i"

        def at(base: int, step: int) -> str:
            return (
                affine(base, step, block()) if ahead is None else affine(base + step * ahead, step)
            )

        lists = [_variable(channel, block(channel.distance)) for channel in f.inputs]
        words = ", ".join([block(), *lists, *self.arguments(f, at)])
        left = ", ".join(_variable(channel, block()) for channel in f.outputs)
        row = f"{self.name_of.get(f, f.name)}({words})"
        return (" " * (4 if ahead is None else 8)) + (f"{left} = {row}" if left else row)


def _with_copies(calls: Sequence[_Call], block: str) -> list[_Call]:
    """The calls, where those of `block` repeat for all blocks that it stands for.

    What repeats is as long as from one block's last call that computes to the next one's. Raises
    `UnfoldableError` if other things are between these calls, or beside them.
    """
    own = [k for k, c in enumerate(calls) if c.computes and c.piece.block == block]
    if not own:
        raise UnfoldableError(block)
    (stem, i), n_more = calls[own[0]].place, calls[own[0]].piece.stands_for - 1
    near = [k for k, c in enumerate(calls[: own[0]]) if c.computes and c.place[0] == stem]
    start, stop = (near[-1] + 1 if near else 0), own[-1] + 1
    step = i - calls[near[-1]].piece.i if near else 0

    def ahead(c: _Call) -> int:
        return (c.piece.i - i) * step if c.place[0] == stem else 0

    def is_next(c: _Call, before: _Call) -> bool:
        return c.function is before.function and c.piece.i == before.piece.i + step

    while abs(step) == 1:
        before, body, after = calls[:start], calls[start:stop], calls[stop:]
        is_plain = all(c.is_plain and c.place[0] == stem for c in body)
        if is_plain and all(ahead(c) <= 0 for c in before) and all(ahead(c) >= 0 for c in after):
            copies = range(n_more + 1)[::step]  # backward has the last one first
            return [
                *(c.shift_block(copies[0]) if c.piece.block == block else c for c in before),
                *(c.shift_block(n - n_more if c.piece.i > i else n) for n in copies for c in body),
                *(c.shift_block(copies[-1]) if c.piece.block == block else c for c in after),
            ]
        if not after or not is_next(after[0], body[0]):
            break
        start, stop = start + 1, stop + 1
    raise UnfoldableError(block)


def _variable(channel: Channel, maker: str) -> str:
    """The list of a channel; what is saved has one for each block of its maker."""
    return f"{channel.variable}[{maker}]" if channel.is_saved else channel.variable


def is_handed_on(part: Part, channel: Channel, i: int, side: str) -> bool:
    """Does this channel carry all its values of the piece of block `i`?"""
    maker, taker = channel.maker, channel.taker
    if maker is None or taker is None:
        return False
    if side == "taker":
        return all(
            part.sources.get(Place(taker, i, b)) == Place(maker, i - channel.distance, a)
            for a, b in zip(channel.made, channel.taken, strict=True)
        )
    return all(
        part.targets.get(Place(maker, i, a)) == Place(taker, i + channel.distance, b)
        for a, b in zip(channel.made, channel.taken, strict=True)
    )


def printed(statements: Sequence[Statement]) -> list[str]:
    out: list[str] = []
    for s in statements:
        out += [*s.rows, *([del_row(s.late)] if s.late else [])]
    return out


def _range(i: int, rounds: int, step: int) -> str:
    low, high = (i, i + rounds) if step > 0 else (i - rounds + 1, i + 1)
    counted = f"range({low}, {high})" if low else f"range({high})"
    return counted if step > 0 else f"reversed({counted})"
