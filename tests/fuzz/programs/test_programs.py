"""Every random program runs as eager torch does, or is refused for a reason that is known.

Each run draws new ones; `AUTOPAR_PROGRAMS=BASE` draws those of a base seed again, and
`AUTOPAR_PROGRAMS=BASE:N` the first N of them.
"""

from __future__ import annotations

import os
import sys
from collections import Counter

import pytest

from autopar.rules import all_rules
from tests.fuzz.programs.check import report, run_programs
from tests.fuzz.programs.compare import captured_operators
from tests.fuzz.programs.draw import random_program
from tests.fuzz.programs.tally import UNREACHED, Tally, table
from tests.fuzz.programs.templates import groups, program_of
from tests.helpers.harness import generated_code
from tests.helpers.nightly import nightly

__all__ = ["generated_code"]

# Programs of a chunk, one test each, by day and at night.
BY_DAY, AT_NIGHT = (300, 2), (10_000, 100)
# `make fuzz` alone: what nobody has drawn before may fail.
HUNTS = bool(os.environ.get("AUTOPAR_HUNT"))
MOST_FOR_OPERATORS = 10_000


def base_seed(chosen: str) -> int:
    """Drawn anew by each run, unless it is chosen; the same in all workers of a run."""
    if chosen:
        return int(chosen)
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID") or os.urandom(4).hex()
    return int(run[:7], 16)


CHOSEN, _, CHOSEN_N = os.environ.get("AUTOPAR_PROGRAMS", "").partition(":")
BASE = base_seed(CHOSEN)
N_BY_DAY = int(CHOSEN_N or BY_DAY[0])


def chunks(n_programs: int, each: int) -> list[range]:
    return [range(k, min(k + each, n_programs)) for k in range(0, n_programs, each)]


@pytest.mark.parametrize(
    "numbers", chunks(N_BY_DAY, BY_DAY[1]), ids=lambda r: f"{r.start}-{r.stop}"
)
def test_programs(numbers: range) -> None:
    check(numbers)


@nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "numbers", chunks(*AT_NIGHT) if HUNTS else [], ids=lambda r: f"{r.start}-{r.stop}"
)
def test_programs_of_a_night(numbers: range) -> None:
    """Every one on 2 and on 4 ranks too."""
    check(numbers, always_layouts=True)


def check(numbers: range, always_layouts: bool = False) -> None:
    sys.stdout.write(f"AUTOPAR_PROGRAMS={BASE}\n")
    tally = Tally()
    faults = run_programs(BASE, numbers, tally, always_layouts)
    sys.stdout.write(tally.text())
    assert not faults, "".join(report(BASE, *fault) for fault in faults[:3])


@nightly
@pytest.mark.skipif(not HUNTS, reason="draws up to 10,000 programs: `make fuzz` runs it")
@pytest.mark.timeout(3600)
def test_every_operator_of_the_rules_appears() -> None:
    """In a program of every template, or in random ones; prints how often."""
    wanted = {rule.op for rule in all_rules()} - set(UNREACHED)
    found = Counter[str]()
    for templates in groups():
        found.update(captured_operators(program_of(templates)))
    for number in range(MOST_FOR_OPERATORS):
        if wanted <= found.keys():
            break
        found.update(captured_operators(random_program(BASE, number)))
    sys.stdout.write(f"{number} random programs\n{table(found)}")
    assert sorted(wanted - found.keys()) == [], f"AUTOPAR_PROGRAMS={BASE}"
    assert not found.keys() & set(UNREACHED)
