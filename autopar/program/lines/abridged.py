"""What an abridged stage program stands for: one with few of its repeated blocks, in `repeats`.

`passes/lowering/abridger.py` makes such programs to price them: the cost of an abridged program is
exactly that of the whole one, and computing it does not take longer with more blocks. These
functions say how often each line and each parameter counts.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator

from autopar.program.lines.stage_program import Delivered, StageProgram, StoredParameter


def counted_sum(counted: Iterable[tuple[float, int]]) -> float:
    """Sum of (number, count) pairs, as if every number were written out; rounded once."""
    return math.fsum(itertools.chain.from_iterable(itertools.starmap(itertools.repeat, counted)))


def line_counts(program: StageProgram) -> list[int]:
    """For each line of the body, how many lines of the whole program it stands for."""
    counts = [1] * len(program.body)
    for repeat in program.repeats:
        counts[repeat.start : repeat.stop] = [repeat.count] * (repeat.stop - repeat.start)
    return counts


def parameter_counts(program: StageProgram) -> Counter[str]:
    """Parameter name -> how many parameters of the whole program it stands for."""
    return Counter(parameter.name for parameter in every_parameter(program))


def every_parameter(program: StageProgram) -> Iterator[StoredParameter]:
    """The parameters of the whole program in order, each as the one that stands for it."""
    if not program.repeats:
        return iter(program.parameters)
    named = {parameter.name: parameter for parameter in program.parameters}
    return (named[name] for name in program.every_parameter)


def every_delivered(program: StageProgram) -> Iterator[tuple[Delivered, int]]:
    """Each delivered tensor, and how many of the whole program it stands for."""
    counts = {name: repeat.count for repeat in program.repeats for name in repeat.delivered}
    for item in program.delivered:
        yield item, counts.get(item.local.name, 1)
