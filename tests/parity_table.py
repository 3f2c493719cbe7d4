"""The whole parity table, on real processes: `python -m tests.parity_table`.

models x meshes x plans x microbatches, every cell by the law of `tests.jobs.errors`: the loss of
three steps, every gradient, and every parameter after three AdamW steps, in float64, against
one process. One line per cell; exit code 1 if a cell fails. Words on the command line keep
the cells whose text has them all: `python -m tests.parity_table llama zero-3`.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterator, Sequence

from autopar import AutoparError
from autopar.runtime.launch import WorkerPool
from tests.jobs import PLANS, Cell, errors, reference, train

TOLERANCE = 1e-10
MODELS = ("mlp", "gpt2", "llama")
SHAPES = ((1, 2), (1, 4), (2, 2))
MICROBATCHES = (1, 4)
TIMEOUT_S = 300.0


def cells(words: Sequence[str] = ()) -> list[Cell]:
    """The table in order of the number of ranks, so that one pool at a time is alive."""
    product = itertools.product(SHAPES, MODELS, PLANS, MICROBATCHES)
    table = [Cell(model, shape, plan, m) for shape, model, plan, m in product]
    return [cell for cell in table if all(word in str(cell) for word in words)]


def wrong(cell: Cell, pool: WorkerPool) -> dict[str, float]:
    """Errors of a cell that are above the tolerance, the worst first."""
    found = errors(pool.run(train, cell), reference(cell.model))
    worst = sorted(found.items(), key=lambda item: -item[1])
    return {name: error for name, error in worst if not error <= TOLERANCE}


def verdicts(table: Sequence[Cell]) -> Iterator[tuple[Cell, str | None, float]]:
    """(cell, what is wrong or None, seconds) of every cell."""
    for n_ranks, group in itertools.groupby(table, key=lambda cell: cell.n_ranks):
        with WorkerPool(n_ranks, timeout_s=TIMEOUT_S) as pool:
            for cell in group:
                start_s = time.monotonic()
                try:
                    off = wrong(cell, pool)
                    reason = ", ".join(f"{name}: {e:.1e}" for name, e in list(off.items())[:3])
                except AutoparError as error:
                    reason = str(error)
                yield cell, reason or None, time.monotonic() - start_s


def main(words: Sequence[str]) -> int:
    """Print the table; the number of failures bounds the exit code at 1."""
    n_passed = n_failed = 0
    for cell, reason, time_s in verdicts(cells(words)):
        n_passed, n_failed = n_passed + (reason is None), n_failed + (reason is not None)
        verdict = "passed" if reason is None else f"FAILED: {reason}"
        print(f"{cell!s:50} {time_s:5.1f} s  {verdict}", flush=True)  # noqa: T201
    print(f"{n_passed} passed, {n_failed} failed")  # noqa: T201
    return int(n_failed > 0 or n_passed == 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
