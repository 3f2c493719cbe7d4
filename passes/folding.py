"""Repeated blocks of a program, and the same program with few of them.

Operators i and i + p are *alike* when they are the same operator with the same arguments and
tensor types, and read alike: what one reads of operator k, the other reads of k + p, or both
read the same value. A *run* is a range of operators alike at one distance p, its period: blocks
that differ in names only (`find_runs`; several runs if there are several stacks of layers).

Folding keeps the first two blocks and the last of every run; the last reads the second in place
of the one before it (`fold`). Placements of the folded program stand for placements of the
whole: each dropped block takes those of the second, which has its like before it and after it
(`Folded.stands_for`). That is legal where that block hands on its values placed as it got them,
which the optimum of long runs does; else costs read off so are estimates.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.factors import Operator
from autopar.passes.analysis import Analysis

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

    @property
    def n_dropped(self) -> int:
        return self.period * (self.count - KEPT)

    @property
    def dropped(self) -> range:
        return range(self.start + _BEFORE * self.period, self.end - _AFTER * self.period)

    def kept_like(self, i: int) -> int:
        """The kept operator that operator i of a dropped block is like."""
        return self.start + self.period * (_BEFORE - 1) + (i - self.start) % self.period

    def read_instead(self, i: int) -> int:
        """What kept operators read in place of operator i of a dropped block."""
        moved = i - self.n_dropped
        return moved if moved >= self.start else self.kept_like(i)


@dataclass(frozen=True)
class Folded:
    """A program with few blocks of each run.

    `kept[f]` is the operator of the whole that operator f of the folded program is;
    `stands_for[i]` the folded operator that stands for operator i of the whole.
    """

    whole: Analysis
    analysis: Analysis
    runs: tuple[Run, ...]
    kept: tuple[int, ...]
    stands_for: tuple[int, ...]

    def block_of(self, f: int) -> tuple[int, int] | None:
        """(run, block) of folded operator f; None outside all runs."""
        i = self.kept[f]
        for r, run in enumerate(self.runs):
            if run.start <= i < run.end:
                return r, (i - run.start) // run.period
        return None


def find_runs(
    analysis: Analysis, least: int = _MIN_BLOCKS, own_buffers: bool = False
) -> tuple[Run, ...]:
    """The runs of `least` blocks or more that repeat most operators, greedily, in order.

    `own_buffers`: blocks are alike though each changes buffers of its own; such are not folded.
    """
    finder = _Finder(analysis, least, own_buffers)
    return tuple(sorted(finder.within(0, len(analysis.operators)), key=_start))


def fold(analysis: Analysis, runs: Sequence[Run]) -> Folded:
    """The program without all but `KEPT` blocks of each run."""
    operators, dropped = analysis.operators, {i: run for run in runs for i in run.dropped}
    kept = tuple(i for i in range(len(operators)) if i not in dropped)
    place = {i: f for f, i in enumerate(kept)}
    instead: dict[str, str] = {}
    for i, run in dropped.items():
        like = operators[run.read_instead(i)]
        instead |= dict(zip(operators[i].outputs, like.outputs, strict=True))
    remaining = tuple(
        replace(operators[i], inputs=tuple(instead.get(n, n) for n in operators[i].inputs))
        for i in kept
    )
    read = {name for operator in remaining for name in operator.inputs}
    read_before = {name for operator in operators for name in operator.inputs}
    program = analysis.program
    smaller = replace(
        program,
        # What nobody ever reads is stored all the same.
        parameters={
            n: p for n, p in program.parameters.items() if n in read or n not in read_before
        },
        loss=instead.get(program.loss, program.loss) if program.loss else None,
        outputs=tuple(instead.get(n, n) for n in program.outputs),
        _by_name={},
    )
    folded = replace(
        analysis,
        program=smaller,
        operators=remaining,
        whole=None,
        parameter_names=analysis.parameter_names or frozenset(program.parameters),
    )
    stands_for = tuple(
        place[dropped[i].kept_like(i) if i in dropped else i] for i in range(len(operators))
    )
    return Folded(analysis, folded, tuple(runs), kept, stands_for)


def _start(run: Run) -> int:
    return run.start


class _Finder:
    """`sources[i]`: per input of operator i, the operator and result it is, or its name."""

    def __init__(self, analysis: Analysis, least: int, own_buffers: bool) -> None:
        self.least = least
        program = analysis.program
        # Kinds of placeholders that each block may have its own of.
        self.own = [frozenset(program.parameters), frozenset(program.constants)]
        if own_buffers:
            self.own.append(frozenset(program.buffers))
        made: dict[str, tuple[int, int]] = {}
        self.sources: list[tuple[tuple[int, int] | str, ...]] = []
        numbers: dict[Any, int] = {}
        codes = []
        for i, operator in enumerate(analysis.operators):
            self.sources.append(tuple(made.get(n, n) for n in operator.inputs))
            made |= {name: (i, k) for k, name in enumerate(operator.outputs)}
            code = _signature(operator, analysis)
            codes.append(numbers.setdefault(code, len(numbers)))
        self.codes: NDArray[np.int64] = np.array(codes, dtype=np.int64)

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
            for first, end in _stretches(same):
                # end - first operators are like those one period later.
                saved = end - first - period * (self.least - 2)
                if saved >= period:
                    found.append((-saved, period, low + first, low + end))
        best: Run | None = None
        for saved, period, first, end in sorted(found):
            if best is not None and -saved <= self._gain(best):
                break
            wired = np.array([self._alike(i, period) for i in range(first, end)])
            for a, b in _stretches(wired):
                run = Run(first + a, period, (b - a) // period + 1)
                better = best is None or self._gain(run) > self._gain(best)
                if run.count >= self.least and better:
                    best = run
        return best

    def _gain(self, run: Run) -> int:
        """Operators of blocks beyond those that a run must have."""
        return run.period * (run.count - self.least + 1)

    def _alike(self, i: int, period: int) -> bool:
        """Do operators i and i + period read alike?"""
        return all(
            self._same_source(a, b, period)
            for a, b in zip(self.sources[i], self.sources[i + period], strict=True)
        )

    def _same_source(self, a: tuple[int, int] | str, b: tuple[int, int] | str, period: int) -> bool:
        if isinstance(a, str) or isinstance(b, str):
            return a == b or any(a in kind and b in kind for kind in self.own)
        return a == b or (a[0] + period, a[1]) == b


def _stretches(marks: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """The maximal ranges of true marks."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], marks, [False])).astype(np.int8)))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def _signature(operator: Operator, analysis: Analysis) -> tuple[Any, ...]:
    """All that decides an operator's placements and costs but its wiring."""
    names = (*operator.inputs, *operator.outputs)
    return (
        operator.call.likeness,
        tuple(analysis.types.tensors[n] for n in names),
        tuple(analysis.batch.cells.get(n) for n in names),
        repr(analysis.saved.get(operator.name)),
    )
