"""Every random program runs as eager torch does, or is refused for a reason that is known.

Each run draws new ones; `AUTOPAR_PROGRAMS=BASE` draws those of a base seed again, and
`AUTOPAR_PROGRAMS=BASE:N` the first N of them.
"""

from __future__ import annotations

import os
import sys
from collections import Counter

import pytest
import torch
from torch import nn

from autopar.rules import all_rules
from tests.fuzz.programs.check import report, run_programs
from tests.fuzz.programs.compare import captured_operators, eager_step
from tests.fuzz.programs.draw import random_program
from tests.fuzz.programs.tally import UNREACHED, Tally, table
from tests.fuzz.programs.templates import groups, program_of
from tests.helpers.harness import generated_code
from tests.helpers.nightly import nightly

__all__ = ["generated_code"]

# Programs of a chunk, one test each, by day and at night.
BY_DAY, AT_NIGHT = (150, 2), (10_000, 100)
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


class OneGradient(nn.Module):
    """The gradients of both parameters are one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.m, self.n = nn.Parameter(torch.ones(1, 8)), nn.Parameter(torch.ones(8, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.m + self.n.t()).sigmoid().sum()


def test_the_reference_adds_gradients_that_are_one_tensor() -> None:
    """torch alone adds both to it, so each is three times its value after two steps."""
    net, batch = OneGradient(), {"x": torch.zeros(8)}
    first = {name: value.clone() for name, value in eager_step(net, batch)[1].items()}
    second = eager_step(net, batch)[1]
    assert second.keys() == {"grad m", "grad n"}
    for name, value in second.items():
        assert torch.equal(value, 2 * first[name])


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
