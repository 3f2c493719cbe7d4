"""What a stage program with few of its repeated blocks stands for: `StageProgram.repeats`.

Such a program (`passes/lowering/abridger.py`) is there to be priced: what it costs is what the whole costs,
line by line and parameter by parameter, in a time that does not grow with the number of blocks.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator

from autopar.program.stage_program import Delivered, StageProgram, StoredParameter


def counted_sum(counted: Iterable[tuple[float, int]]) -> float:
    """Of numbers with how often each is there: as if they were written out, rounded once."""
    return math.fsum(itertools.chain.from_iterable(itertools.starmap(itertools.repeat, counted)))


def line_counts(program: StageProgram) -> list[int]:
    """Of every line of the body, how many lines of the whole it stands for."""
    counts = [1] * len(program.body)
    for repeat in program.repeats:
        counts[repeat.start : repeat.stop] = [repeat.count] * (repeat.stop - repeat.start)
    return counts


def parameter_counts(program: StageProgram) -> Counter[str]:
    """For how many parameters of the whole each stands."""
    return Counter(parameter.name for parameter in every_parameter(program))


def every_parameter(program: StageProgram) -> Iterator[StoredParameter]:
    """The parameters of the whole, in its order, each as the one that stands for it."""
    if not program.repeats:
        return iter(program.parameters)
    named = {parameter.name: parameter for parameter in program.parameters}
    return (named[name] for name in program.every_parameter)


def every_delivered(program: StageProgram) -> Iterator[tuple[Delivered, int]]:
    """What the program is given besides parameters, and of each how many the whole is given."""
    counts = {name: repeat.count for repeat in program.repeats for name in repeat.delivered}
    for item in program.delivered:
        yield item, counts.get(item.local.name, 1)
