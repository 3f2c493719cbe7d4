"""The whole parity table, on real processes: `python -m tests.parity_table`.

One stage: models x meshes x plans x microbatches. Pipelines: models x stages x orders x
microbatches (`tests.pipeline_jobs`). Every cell by the law of `tests.jobs.errors`: the loss of
three steps, every gradient, and every parameter after three AdamW steps, in float64, against
one process. One line per cell; exit code 1 if a cell fails. Words on the command line keep
the cells whose text has them all: `python -m tests.parity_table llama zero-3`.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autopar import AutoparError
from autopar.runtime.launch import WorkerPool
from tests.jobs import PLANS, AnyCell, Cell, errors, train, train_alone
from tests.pipeline_jobs import pipeline_cells

TOLERANCE = 1e-10
MODELS = ("mlp", "gpt2", "llama")
SHAPES = ((1, 2), (1, 4), (2, 2))
MICROBATCHES = (1, 4)
TIMEOUT_S = 600.0


def cells() -> list[Cell]:
    """The cells of one stage in order of the number of ranks: one pool at a time is alive."""
    product = itertools.product(SHAPES, MODELS, PLANS, MICROBATCHES)
    return [Cell(model, shape, plan, m) for shape, model, plan, m in product]


def chosen(words: Sequence[str]) -> list[AnyCell]:
    """The cells of the whole table whose text has every word."""
    table: list[AnyCell] = [*cells(), *pipeline_cells()]
    return [cell for cell in table if all(word in str(cell) for word in words)]


def run(cell: AnyCell, pool: WorkerPool) -> dict[str, float]:
    """Errors of a cell by what they are of, the worst first."""
    found = errors(pool.run(train, cell), train_alone(cell.case))
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def wrong(cell: AnyCell, pool: WorkerPool) -> dict[str, float]:
    """Errors of a cell that are above the tolerance, the worst first."""
    return {name: error for name, error in run(cell, pool).items() if not error <= TOLERANCE}


@dataclass(frozen=True)
class Verdict:
    """`worst` is the largest error, infinite where the cell did not run; `reason` if it failed."""

    cell: AnyCell
    worst: float
    reason: str | None
    time_s: float

    def __str__(self) -> str:
        how = (
            f"passed, off by {self.worst:.1e}" if self.reason is None else f"FAILED: {self.reason}"
        )
        return f"{self.cell!s:50} {self.time_s:5.1f} s  {how}"


def verdicts(table: Sequence[AnyCell]) -> Iterator[Verdict]:
    for n_ranks, group in itertools.groupby(table, key=lambda cell: cell.n_ranks):
        with WorkerPool(n_ranks, timeout_s=TIMEOUT_S) as pool:
            for cell in group:
                yield verdict(cell, pool)


def verdict(cell: AnyCell, pool: WorkerPool) -> Verdict:
    start_s = time.monotonic()
    worst = float("inf")
    try:
        found = run(cell, pool)
        worst = max(found.values())
        off = [f"{name}: {e:.1e}" for name, e in found.items() if not e <= TOLERANCE]
        reason = ", ".join(off[:3]) or None
    except AutoparError as error:
        reason = str(error)
    return Verdict(cell, worst, reason, time.monotonic() - start_s)


def main(words: Sequence[str]) -> int:
    """Print the table; the number of failures bounds the exit code at 1."""
    found: list[Verdict] = []
    for v in verdicts(chosen(words)):
        found.append(v)
        print(v, flush=True)  # noqa: T201
    passed = [v for v in found if v.reason is None]
    worst = max((v.worst for v in passed), default=0.0)
    n_failed = len(found) - len(passed)
    print(f"{len(passed)} passed, off by at most {worst:.1e}; {n_failed} failed")  # noqa: T201
    return int(n_failed > 0 or not passed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
