"""Programs of a base seed, each under its layouts; what is reported of a fault."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from random import Random

from tests.fuzz.programs.compare import FAULT, REFUSED, Outcome, outcome
from tests.fuzz.programs.draw import random_program
from tests.fuzz.programs.layouts import ALONE, Layout, random_layout
from tests.fuzz.programs.program import Program
from tests.fuzz.programs.shrink import shrunk
from tests.fuzz.programs.tally import Tally, is_known


def cases(
    base: int, number: int, always_layouts: bool
) -> Iterator[tuple[Program, Layout, Outcome]]:
    """A program on one process, then on 2 and on 4 ranks: all, or every fifteenth."""
    program = random_program(base, number)
    yield program, ALONE, outcome(program)
    if always_layouts or number % 15 == 0:
        rng = Random(f"layouts {base} {number}")
        for n_ranks in (2, 4):
            layout = random_layout(rng, n_ranks, program.has_blocks)
            yield program, layout, outcome(program, layout)


Fault = tuple[int, Program, Layout, Outcome]


def run_programs(
    base: int, numbers: Iterable[int], tally: Tally, always_layouts: bool
) -> list[Fault]:
    """The faults of some programs; a refusal that is not known is one."""
    faults = []
    for number in numbers:
        for program, layout, found in cases(base, number, always_layouts):
            tally.take(layout, found)
            if found.what == FAULT or (found.what == REFUSED and not is_known(layout, found.text)):
                faults.append((number, program, layout, found))
                break
    return faults


def report(base: int, number: int, program: Program, layout: Layout, found: Outcome) -> str:
    """A fault, made small, as a program that a user can run."""

    def fails(program: Program, layout: Layout) -> bool:
        other = outcome(program, layout)
        return (other.what, other.key) == (found.what, found.key)

    program, layout = shrunk(program, layout, fails)
    text = outcome(program, layout).text
    return (
        f"\n# program {number} of base seed {base}: {found.key}\n"
        f"# again: python -m tests.fuzz.programs {base} {number}\n\n"
        f"{program.text()}\n\n{program.setup()}{layout.call()}\n"
        + "".join(f"# {line}\n" for line in text.splitlines()[-12:])
    )
