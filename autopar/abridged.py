"""What a stage program with few of its repeated blocks stands for: `StageProgram.repeats`.

Such a program (`passes/abridge.py`) is there to be priced: what it costs is what the whole costs,
line by line and parameter by parameter, in a time that does not grow with the number of blocks.
"""

from __future__ import annotations

from collections.abc import Iterator

from autopar.stage_program import Delivered, StageProgram, StoredParameter


def line_counts(program: StageProgram) -> list[int]:
    """Of every line of the body, how many lines of the whole it stands for."""
    counts = [1] * len(program.body)
    for repeat in program.repeats:
        counts[repeat.start : repeat.stop] = [repeat.count] * (repeat.stop - repeat.start)
    return counts


def parameter_counts(program: StageProgram) -> dict[str, int]:
    """Of parameters that stand for several, how many."""
    return {name: repeat.count for repeat in program.repeats for name in repeat.parameters}


def every_parameter(program: StageProgram) -> Iterator[StoredParameter]:
    """The parameters of the whole, in its order: those of one block after those of another, each
    as the one that stands for it."""
    if not program.repeats:
        yield from program.parameters
        return
    repeat_of = {name: repeat for repeat in program.repeats for name in repeat.parameters}
    waiting: list[StoredParameter] = []
    for parameter in program.parameters:
        repeat = repeat_of.get(parameter.name)
        if waiting and repeat is not repeat_of[waiting[0].name]:
            yield from waiting * repeat_of[waiting[0].name].count
            waiting = []
        if repeat is None:
            yield parameter
        else:
            waiting.append(parameter)
    if waiting:
        yield from waiting * repeat_of[waiting[0].name].count


def every_delivered(program: StageProgram) -> Iterator[tuple[Delivered, int]]:
    """What the program is given besides parameters, and of each how many the whole is given."""
    counts = {name: repeat.count for repeat in program.repeats for name in repeat.delivered}
    for item in program.delivered:
        yield item, counts.get(item.local.name, 1)
