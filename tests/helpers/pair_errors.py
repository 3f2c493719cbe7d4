"""How well predictions compare two plans: pairs of shipped runs of one model, batch and machine.

    python -m tests.helpers.pair_errors     half a minute

    error of a pair  exp |log (predicted ratio) - log (published ratio)| - 1

Its median is `PAIR_ERROR` of `cost/hardware/software.py`. It is also printed by how far two
predictions are apart, and of each rank group of `autopar validate`, with how many pairs the
predictions put in the published order.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import combinations, pairwise

import numpy as np

from autopar.cost.published import read_runs, score

# (predicted ratio, published ratio), as logarithms.
Pair = tuple[float, float]
_APART = (0.0, 0.02, 0.05, 0.1, 0.2, 0.5, math.inf)


def main() -> None:
    file = read_runs()
    entries = {e.id: e for e in score(file).entries if e.time and e.time.published}
    alike = defaultdict(list)
    for entry in entries.values():
        assert entry.row is not None
        recipe = entry.row.recipe
        n_ranks = recipe.ranks_per_stage * recipe.pp
        alike[entry.row.shape, entry.profile, recipe.global_batch, n_ranks].append(entry.id)

    def pairs(members: Iterable[str]) -> list[Pair]:
        times = [entries[name].time for name in members if name in entries]
        logs = [(math.log(t.predicted), math.log(t.published or 1.0)) for t in times if t]
        return [(a[0] - b[0], a[1] - b[1]) for a, b in combinations(logs, 2)]

    every = [pair for members in alike.values() for pair in pairs(members)]
    lines = [f"one model, batch and machine: {_summary(every)}"]
    for low, high in pairwise(_APART):
        found = [pair for pair in every if low <= math.expm1(abs(pair[0])) < high]
        lines.append(f"  predicted {low:.0%} to {high:.0%} apart: {_summary(found)}")
    groups = file.rank_groups.items()
    lines += [f"{name}: {_summary(pairs(members))}" for name, members in groups]
    sys.stdout.write("\n".join(lines) + "\n")


def _summary(pairs: Sequence[Pair]) -> str:
    errors = [abs(predicted - published) for predicted, published in pairs]
    half, most = (math.expm1(float(np.quantile(errors, share))) for share in (0.5, 0.8))
    known = [predicted * published > 0 for predicted, published in pairs if published]
    order = f"{sum(known)} of {len(known)} in order"
    return f"50% of pairs within {half:.1%}, 80% within {most:.1%}, {order}"


if __name__ == "__main__":
    main()
