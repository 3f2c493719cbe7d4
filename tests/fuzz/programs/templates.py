"""Programs in which every template of the grammar stands: random ones reach it by chance."""

from __future__ import annotations

from functools import lru_cache
from random import Random

from tests.fuzz.programs.compare import captured_operators
from tests.fuzz.programs.draw import Draw, runs
from tests.fuzz.programs.grammar import FAMILIES, LOSSES, Table
from tests.fuzz.programs.program import Program

PER_PROGRAM = 4
# What templates are filled with beside the inputs: real and complex values that carry gradient.
FIRST: Table = (
    "{nn.Linear(4, 4)}(x)", "{nn.Linear(4, 4)}(x).tanh()", "{nn.Linear(8, 8)}(y)",
    "{nn.Linear(4, 4)}(x).mean(1)", "{nn.Conv2d(4, 4, 3, padding=1)}(image)",
    "{nn.Conv3d(2, 2, 3, padding=1)}(video)", "torch.fft.fft({nn.Linear(4, 4)}(x))",
    "torch.fft.fft({nn.Linear(4, 4)}(x).relu())",
)  # fmt: skip
MOST_TRIES, MOST_DRAWS = 80, 40


def groups() -> list[Table]:
    """All templates of statements and losses, some at a time."""
    tables = [tuple(dict.fromkeys(table)) for _, table in FAMILIES] + [tuple(dict.fromkeys(LOSSES))]
    return [
        table[k : k + PER_PROGRAM] for table in tables for k in range(0, len(table), PER_PROGRAM)
    ]


@lru_cache
def program_of(templates: Table) -> Program:
    """A program that has all of them, trained by eager torch and captured; always the same."""
    rng = Random(" ".join(templates))
    for _ in range(MOST_DRAWS):
        draw = Draw.begin(rng)
        if all(_stands(draw, t) for t in (*FIRST, *templates)) and draw.losses():
            program = draw.program()
            if runs(program) and captured_operators(program):
                return program
    raise AssertionError(f"no program has {templates}")


def _stands(draw: Draw, template: str) -> bool:
    """Add a statement or a loss, filled with what fits."""
    if template in LOSSES:
        template = template.replace("$v", draw.lines[0].writes[0])
    return any(draw.statement(template) for _ in range(MOST_TRIES))
