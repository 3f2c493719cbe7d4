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

A loop over a block that stands for others (`JointProgram.stands_for`) has rounds for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from autopar.codegen.blocks import LEAST_PIECES, Statement, affine, del_row, freeing
from autopar.codegen.flow import BlockFunction, Call, Channel, Part
from autopar.codegen.regions import marked
from autopar.codegen.words import listed

_MOST_CALLS = 16  # in a loop


class UnfoldableError(Exception):
    """A list would hold the values of two blocks at once, or a block that stands for others is not
    all in loops."""


@dataclass(frozen=True)
class _Loop:
    """Equal calls in rounds, each `step` blocks further than the one before; or a single call."""

    rounds: Sequence[Sequence[Call]]

    @property
    def step(self) -> int:
        return self.rounds[1][0].piece.i - self.rounds[0][0].piece.i if self.rounds[1:] else 0

    @property
    def n_rounds(self) -> int:
        """The rounds, with those of the blocks that a block stands for."""
        return sum(own[0].piece.stands_for for own in self.rounds)

    @property
    def n_calls(self) -> int:
        return self.n_rounds * len(self.rounds[0])

    @property
    def calls(self) -> list[Call]:
        return [call for own in self.rounds for call in own]

    @property
    def numbers(self) -> list[int]:
        """The blocks of the first round; backward begins with the last that a block stands for."""
        return [
            c.piece.number + (c.piece.stands_for - 1 if self.step < 0 else 0)
            for c in self.rounds[0]
        ]


@dataclass
class Main:
    """`arguments` gives the words of a call, besides its lists."""

    part: Part
    arguments: Callable[[BlockFunction, Callable[[int, int], str]], list[str]]
    live: set[Channel] = field(default_factory=set)

    def rows(self) -> list[str]:
        calls = self.part.calls
        out: list[str] = []
        at, k = 0, 0
        while k < len(calls):
            out += printed(self.part.statements[at : calls[k].piece.start])
            loop = _next_loop(calls, k)
            out += self._printed(loop)
            k += len(loop.calls)
            at = calls[k - 1].piece.stop
        return out + printed(self.part.statements[at:])

    def _printed(self, loop: _Loop) -> list[str]:
        """The calls of a loop, or a single one."""
        out: list[str] = []
        for call in loop.calls:
            for channel in call.packed:
                self._fill(channel)
                names = [call.piece.names[k] for k in channel.taken]
                variable = _variable(channel, str(call.piece.number - channel.distance))
                out += [*listed(f"    {variable} = [", names, "]"), del_row(names)]
        self._check(loop.calls)
        first, last, numbers = loop.rounds[0], loop.rounds[-1], loop.numbers
        computing = [n for c, n in zip(first, numbers, strict=True) if c.computes]
        i = next(iter(computing), numbers[0])
        if loop.step:
            out.append(f"    for i in {_range(i, loop.n_rounds, loop.step)}:")
        for call, number in zip(first, numbers, strict=True):
            out.append(self._row(call, number - i if loop.step else None))
        for call in last:
            for channel in call.unpacked:
                names = [call.piece.names[k] for k in channel.made]
                variable = _variable(channel, str(call.piece.number))
                out += listed("    ", names, f" = {variable}")
                out.append(del_row([variable]))
        late = [name for call in last for name in call.late]
        return [*out, *([del_row(late)] if late else [])]

    def _check(self, calls: Sequence[Call]) -> None:
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

    def _row(self, call: Call, ahead: int | None) -> str:
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
        row = f"{f.name}({words})"
        return (" " * (4 if ahead is None else 8)) + (f"{left} = {row}" if left else row)


def _next_loop(calls: Sequence[Call], k: int) -> _Loop:
    """The longest loop about call `k` if it begins there; else the call alone.

    Raises `UnfoldableError` if that one stands for others.
    """
    loops = [
        _Loop(rounds)
        for n_calls in range(1, _MOST_CALLS + 1)
        for start in range(k, min(k + n_calls, len(calls) - n_calls))
        if (rounds := _rounds(calls, start, n_calls))
    ]
    longest = max(loops, key=lambda x: (x.n_calls, x.rounds[0][0].computes), default=None)
    if longest is not None and longest.rounds[0][0] is calls[k]:
        return longest
    if calls[k].piece.stands_for > 1:
        raise UnfoldableError(calls[k].piece.block)
    return _Loop([[calls[k]]])


def _rounds(calls: Sequence[Call], start: int, n_calls: int) -> list[Sequence[Call]]:
    """The rounds of `n_calls` calls from `start` on, a block further each time; none if they are
    few, or if not all calls are of the blocks that stand for others."""
    rounds = [calls[start : start + n_calls]]
    step = calls[start + n_calls].piece.i - calls[start].piece.i
    if abs(step) != 1 or any(call.is_apart for call in rounds[0][1:]):
        return []
    while not any(call.unpacked or call.late for call in rounds[-1]):
        before = rounds[-1]
        start += n_calls
        own = calls[start : start + n_calls]
        if len(own) < n_calls or not all(
            b.function is a.function
            and b.piece.i - a.piece.i == step
            and not (b.packed or b.is_apart)
            for a, b in zip(before, own, strict=True)
        ):
            break
        rounds.append(own)
    if len(rounds) < 2:
        return []
    several = [call for own in rounds for call in own if call.piece.stands_for > 1]
    counts = {sum(call.piece.stands_for for call in column) for column in zip(*rounds, strict=True)}
    is_in_order = len(counts) == 1 and all(call.is_plain for call in several)
    return rounds if is_in_order and counts.pop() >= LEAST_PIECES else []


def _variable(channel: Channel, maker: str) -> str:
    """The list of a channel; what is saved has one for each block of its maker."""
    return f"{channel.variable}[{maker}]" if channel.is_saved else channel.variable


def printed(statements: Sequence[Statement]) -> list[str]:
    return marked([t for s in statements for t in (s, *freeing(s.late, s.region))])


def _range(i: int, rounds: int, step: int) -> str:
    low, high = (i, i + rounds) if step > 0 else (i - rounds + 1, i + 1)
    counted = f"range({low}, {high})" if low else f"range({high})"
    return counted if step > 0 else f"reversed({counted})"
