"""The whole parity table, on real processes: `python -m tests.parity.table [WORDS]`.

Cells are of one stage, of pipelines and of the zoo; words select those whose text has all of them.
Losses of three steps, all gradients and all parameters after them are compared with one process.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from autopar import AutoparError
from autopar.runtime.launch import WorkerPool
from tests.helpers.jobs import PLANS, AnyCell, Cell, errors, train, train_alone
from tests.helpers.pipeline_jobs import pipeline_cells
from tests.parity.zoo import cells as zoo
from tests.parity.zoo.cells import ZooCell, zoo_cells

TOLERANCE = 1e-10
MODELS = ("mlp", "gpt2", "llama")
SHAPES = ((1, 2), (1, 4), (2, 2))
MICROBATCHES = (1, 4)
TIMEOUT_S = 600.0


def cells() -> list[Cell]:
    """The cells of one stage, ordered by number of ranks, so that one pool is alive at a time."""
    product = itertools.product(SHAPES, MODELS, PLANS, MICROBATCHES)
    return [Cell(model, shape, plan, m) for shape, model, plan, m in product]


def chosen(words: Sequence[str]) -> list[AnyCell]:
    """The cells of the whole table whose text has every word."""
    table: list[AnyCell] = [*cells(), *pipeline_cells(), *zoo_cells()]
    return [cell for cell in table if all(word in str(cell) for word in words)]


def run(cell: AnyCell, pool: WorkerPool) -> dict[str, float]:
    """Errors of a cell by name (loss, gradient or parameter), worst first."""
    found = errors(pool.run(train, cell), train_alone(cell.case))
    return dict(sorted(found.items(), key=lambda item: -item[1]))


@dataclass(frozen=True)
class Verdict:
    """One cell: its largest error (infinite if it did not run), why it failed, and its plan."""

    cell: AnyCell
    worst: float
    reason: str | None
    time_s: float
    shown: str = ""

    @property
    def kind(self) -> str:
        return "failed" if self.reason else "passed"

    def __str__(self) -> str:
        how = f"FAILED: {self.reason}" if self.reason else f"passed, off by {self.worst:.1e}"
        plan = f"\n    {self.shown}" if self.shown else ""
        return f"{self.cell!s:50} {self.time_s:5.1f} s  {how}{plan}"


def verdicts(table: Sequence[AnyCell]) -> Iterator[Verdict]:
    for n_ranks, group in itertools.groupby(table, key=lambda cell: cell.n_ranks):
        with WorkerPool(n_ranks, timeout_s=TIMEOUT_S) as pool:
            for cell in group:
                yield verdict(cell, pool)


def verdict(cell: AnyCell, pool: WorkerPool) -> Verdict:
    start_s = time.monotonic()
    worst, shown, lacks = float("inf"), "", None
    try:
        if isinstance(cell, ZooCell):
            found, shown, lacks = zoo.run(cell, pool)
        else:
            found = run(cell, pool)
        worst = max(found.values())
        reason = lacks or off_by(found)
    except Exception as error:  # noqa: BLE001  the other cells must still run
        reason = str(error) if isinstance(error, AutoparError) else repr(error)
    return Verdict(cell, worst, reason, time.monotonic() - start_s, shown)


def off_by(found: Mapping[str, float]) -> str | None:
    """The three worst errors above the tolerance; None if there are none."""
    worst = sorted(found.items(), key=lambda item: -item[1])
    return ", ".join(f"{name}: {e:.1e}" for name, e in worst[:3] if not e <= TOLERANCE) or None


def by_family(found: Sequence[Verdict]) -> list[str]:
    """One line per family of the zoo: how many of its cells passed and failed."""
    families: dict[str, Counter[str]] = {}
    for v in found:
        if isinstance(v.cell, ZooCell):
            families.setdefault(v.cell.family, Counter())[v.kind] += 1
    return [
        f"{family:22} " + ", ".join(f"{n} {kind}" for kind, n in sorted(counts.items()))
        for family, counts in families.items()
    ]


def main(words: Sequence[str]) -> int:
    """Print the table. The exit code is 1 if a cell failed or no cell ran."""
    found: list[Verdict] = []
    for v in verdicts(chosen(words)):
        found.append(v)
        print(v, flush=True)  # noqa: T201
    counts = Counter(v.kind for v in found)
    worst = max((v.worst for v in found if v.kind == "passed"), default=0.0)
    for line in by_family(found):
        print(line)  # noqa: T201
    print(  # noqa: T201
        f"{counts['passed']} passed, off by at most {worst:.1e}; {counts['failed']} failed"
    )
    return int(counts["failed"] > 0 or not found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
