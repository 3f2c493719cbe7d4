"""Every template of the grammar: a step is eager's, and the rules of its operators hold.

Of what a program calls, the oracle checks every placement on two ranks and drawn ones on more.
`AUTOPAR_EXAMPLES=N` checks the calls of N random programs besides.
"""

from __future__ import annotations

import os

import pytest

from tests.fuzz.programs.calls import check_rules
from tests.fuzz.programs.compare import REFUSED, RIGHT, outcome
from tests.fuzz.programs.draw import random_program
from tests.fuzz.programs.layouts import ALONE, Layout
from tests.fuzz.programs.tally import is_known
from tests.fuzz.programs.templates import groups, program_of
from tests.helpers.harness import generated_code
from tests.helpers.nightly import nightly, one_in

__all__ = ["generated_code"]

GROUPS = groups()
# Some of all: with 13, weights that descend a gradient, which random programs have seldom.
NUMBERS = [k if k % 32 == 13 else pytest.param(k, marks=nightly) for k in range(len(GROUPS))]
N_RANDOM = int(os.environ.get("AUTOPAR_EXAMPLES", "0"))


@one_in(3)
@pytest.mark.parametrize("k", NUMBERS)
def test_a_step_is_eagers(k: int) -> None:
    """On one process, and on two ranks under drawn placements."""
    program = program_of(GROUPS[k])
    for layout in (ALONE, Layout((1, 2), (), k)):
        found = outcome(program, layout)
        is_refused = layout != ALONE and found.what == REFUSED and is_known(layout, found.text)
        assert is_refused or found.what == RIGHT, f"{program.text()}\n{found.text}"


@pytest.mark.parametrize("k", NUMBERS)
def test_rules_hold(k: int) -> None:
    assert set(check_rules(program_of(GROUPS[k]), k))


@pytest.mark.parametrize("number", range(N_RANDOM))
def test_rules_hold_for_random_programs(number: int) -> None:
    list(check_rules(random_program(0, number), number))
