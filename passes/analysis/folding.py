"""Find the repeated blocks of a program, and build the same program with only a few of them.

Operators i and i + p are *equal* if they are of one kind (`Analysis.kinds`) and read equal sources:
where one reads operator k, the other reads k + p, or both read the same value. An operator whose
value is sent to another stage is equal to none after it: of equal blocks, only the last one sends.
A *run* is a range of operators that are equal at one distance p, its period: repeated blocks that
differ in names only (`find_runs`). A program with several stacks of layers has several runs. A run
begins with a module of a list (`h.3`) if it can, as ZeRO-3's gathers do
(`passes/lowering/gathers.py`).

Folding keeps some blocks of every run (`fold`), by default the first two and the last. A kept block
that read a dropped one reads the kept block before it instead. Each dropped block takes the
placements of the last kept block before it (`Folded.stands_for`). By default that is the second
block, which has an equal block before it and after it. The result is legal if that block's outputs
have the placements of its inputs, as in the optimum of long runs. Otherwise costs read from the
folded program are estimates.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.arrays import BoolArray, Indices
from autopar.passes.analysis.analysis import Analysis

_BEFORE, _AFTER = 2, 1
KEPT = _BEFORE + _AFTER
_MIN_BLOCKS = KEPT + 1


@dataclass(frozen=True)
class Run:
    """`count` blocks of `period` operators each, from operator `start` on."""

    start: int
    period: int
    count: int

    @property
    def end(self) -> int:
        return self.start + self.period * self.count

    def block(self, number: int) -> range:
        """The operators of one block."""
        first = self.start + number * self.period
        return range(first, first + self.period)

    def block_at(self, operator: int) -> int | None:
        """The block that an operator is of."""
        is_inside = self.start <= operator < self.end
        return (operator - self.start) // self.period if is_inside else None

    @property
    def kept_by_default(self) -> tuple[int, ...]:
        """The blocks that are kept by default."""
        return (*range(_BEFORE), *range(self.count - _AFTER, self.count))


@dataclass(frozen=True)
class Folded:
    """A program with few blocks of each run.

    `kept` maps folded operator -> operator of the whole; `stands_for` maps operator of the whole ->
    the folded operator that stands for it.
    """

    whole: Analysis
    analysis: Analysis
    runs: tuple[Run, ...]
    kept: tuple[int, ...]
    stands_for: tuple[int, ...]

    def block_of(self, f: int) -> tuple[int, int] | None:
        """(run, block) of folded operator f; None outside all runs."""
        return place_in(self.runs, self.kept[f])


def place_in(runs: Sequence[Run], i: int | None) -> tuple[int, int] | None:
    """(run, block) of operator i; None outside all runs, and for no operator."""
    blocks = (None if i is None else run.block_at(i) for run in runs)
    return next(((r, block) for r, block in enumerate(blocks) if block is not None), None)


def find_runs(
    analysis: Analysis, least: int = _MIN_BLOCKS, own_buffers: bool = False
) -> tuple[Run, ...]:
    """The runs of at least `least` blocks, in order; found greedily, the largest saving first.

    With `own_buffers`, blocks count as equal even if each changes a buffer of its own. Such blocks
    are never folded.
    """
    key = least, own_buffers
    if key not in analysis.repeated:
        finder = _Finder(analysis, least, own_buffers)
        found = finder.within(0, len(analysis.operators))
        analysis.repeated[key] = tuple(sorted(found, key=_start))
    runs: tuple[Run, ...] = analysis.repeated[key]
    return runs


def fold(
    analysis: Analysis, runs: Sequence[Run], blocks: Sequence[Sequence[int]] | None = None
) -> Folded:
    """The program with some `blocks` of each run, in order; they must include the first block."""
    blocks = [run.kept_by_default for run in runs] if blocks is None else blocks
    operators, places = analysis.operators, _StandIns(runs, blocks)
    instead = [places.stands_for(i) for i in range(len(operators))]
    kept = tuple(i for i, other in enumerate(instead) if i == other)
    place = {i: f for f, i in enumerate(kept)}
    made = {n: (i, k) for i, o in enumerate(operators) for k, n in enumerate(o.outputs)}

    def read(name: str, reader: int | None) -> str:
        i, k = made.get(name, (0, 0))
        if name not in made or instead[i] == i:
            return name
        return operators[places.read_instead(i, reader)].outputs[k]

    remaining = tuple(
        replace(operators[i], inputs=tuple(read(n, i) for n in operators[i].inputs)) for i in kept
    )
    names_read = {name for operator in remaining for name in operator.inputs}
    read_before = {name for operator in operators for name in operator.inputs}
    program = analysis.program
    smaller = replace(
        program,
        # A parameter that the whole program never reads is stored all the same.
        parameters={
            n: p for n, p in program.parameters.items() if n in names_read or n not in read_before
        },
        loss=read(program.loss, None) if program.loss else None,
        outputs=tuple(read(n, None) for n in program.outputs),
        _by_name={},
    )
    folded = replace(
        analysis,
        program=smaller,
        operators=remaining,
        whole=analysis,
        parameter_names=analysis.parameter_names or frozenset(program.parameters),
    )
    return Folded(analysis, folded, tuple(runs), kept, tuple(place[i] for i in instead))


@dataclass(frozen=True)
class _StandIns:
    """Which operators stand for others when runs keep only some blocks."""

    runs: Sequence[Run]
    blocks: Sequence[Sequence[int]]

    def stands_for(self, i: int) -> int:
        """The kept operator whose placements operator i takes: itself, or one of a block before."""
        at = place_in(self.runs, i)
        if at is None:
            return i
        r, block = at
        return self._shift(i, r, block, max(b for b in self.blocks[r] if b <= block))

    def read_instead(self, i: int, reader: int | None) -> int:
        """What `reader` reads in place of dropped operator i. Reader None is the program's end."""
        at, reads_at = place_in(self.runs, i), place_in(self.runs, reader)
        assert at is not None, "only blocks are dropped"
        r, block = at
        kept, run = self.blocks[r], self.runs[r]
        number = reads_at[1] if reads_at is not None and reads_at[0] == r else run.count
        # Keep the distance to the reader, counted in kept blocks.
        back = (kept.index(number) if number in kept else len(kept)) - (number - block)
        return self._shift(i, r, block, kept[back]) if back >= 0 else self.stands_for(i)

    def _shift(self, i: int, r: int, block: int, other: int) -> int:
        return i + (other - block) * self.runs[r].period


def _start(run: Run) -> int:
    return run.start


class _Finder:
    """`sources[i]` has, per input of operator i, its (operator, result), or its name if no operator
    makes it."""

    def __init__(self, analysis: Analysis, least: int, own_buffers: bool) -> None:
        self.least = least
        program = analysis.program
        # Equal blocks may each read a placeholder of their own of these classes.
        self.own = [frozenset(program.parameters), frozenset(program.constants)]
        if own_buffers:
            self.own.append(frozenset(program.buffers))
        made, sent = dict[str, tuple[int, int]](), frozenset(program.sent)
        self.sources: list[tuple[tuple[int, int] | str, ...]] = []
        for i, operator in enumerate(analysis.operators):
            self.sources.append(tuple(made.get(n, n) for n in operator.inputs))
            made |= {name: (i, k) for k, name in enumerate(operator.outputs)}
        self.blocks = [program.block(operator.name) for operator in analysis.operators]
        self.sends = [not sent.isdisjoint(operator.outputs) for operator in analysis.operators]
        codes = [analysis.kinds[operator.name] for operator in analysis.operators]
        self.codes: Indices = np.array(codes, dtype=np.int64)

    def within(self, low: int, high: int) -> Iterator[Run]:
        """The best run among operators low..high-1, then the best on either side of it."""
        best = self._best(low, high)
        if best is not None:
            yield from self.within(low, best.start)
            yield best
            yield from self.within(best.end, high)

    def _best(self, low: int, high: int) -> Run | None:
        found: list[tuple[int, int, int, int]] = []
        for period in range(1, (high - low) // self.least + 1):
            same = self.codes[low : high - period] == self.codes[low + period : high]
            for first, end in _true_ranges(same):
                # Operators first..end-1 have the kind of the operator one period later.
                saved = end - first - period * (self.least - 2)
                if saved >= period:
                    found.append((-saved, period, low + first, low + end))
        best: Run | None = None
        for saved, period, first, end in sorted(found):
            if best is not None and -saved <= self._gain(best):
                break
            wired = np.array([self._alike(i, period) for i in range(first, end)])
            for a, b in _true_ranges(wired):
                run = self._align(Run(first + a, period, (b - a) // period + 1), first + b)
                better = best is None or self._gain(run) > self._gain(best)
                if run.count >= self.least and better:
                    best = run
        return best

    def _align(self, run: Run, end: int) -> Run:
        """The run, beginning with a numbered module. Operators up to `end` have an equal one a
        period later, so the run may begin a bit later with as many blocks."""
        latest = end - run.period * (run.count - 1)
        starts = (i for i in range(run.start, latest + 1) if self._begins_block(i))
        return replace(run, start=next(starts, run.start))

    def _begins_block(self, i: int) -> bool:
        before = self.blocks[i - 1] if i else None
        return self.blocks[i] is not None and self.blocks[i] != before

    def _gain(self, run: Run) -> int:
        """Operators in the blocks beyond the first `least - 1`."""
        return run.period * (run.count - self.least + 1)

    def _alike(self, i: int, period: int) -> bool:
        """Do operators i and i + period read equal sources, and does only the later one send?"""
        return not self.sends[i] and all(
            self._same_source(a, b, period)
            for a, b in zip(self.sources[i], self.sources[i + period], strict=True)
        )

    def _same_source(self, a: tuple[int, int] | str, b: tuple[int, int] | str, period: int) -> bool:
        if isinstance(a, str) or isinstance(b, str):
            return a == b or any(a in kind and b in kind for kind in self.own)
        return a == b or (a[0] + period, a[1]) == b


def _true_ranges(marks: BoolArray) -> list[tuple[int, int]]:
    """The maximal ranges of true marks."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], marks, [False])).astype(np.int8)))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
