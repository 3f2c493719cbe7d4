"""Choices that cannot matter, by definition."""

from __future__ import annotations

import numpy as np

from autopar.passes.solvers.choice.reductions import _undominated


def test_what_is_left_is_dominated_by_no_other_choice() -> None:
    n_dropped = n_equal = 0
    for seed in range(200):
        rng = np.random.default_rng(seed)
        n = int(rng.integers(2, 12))
        tables = []
        for _ in range(int(rng.integers(1, 4))):
            n_rows = int(rng.integers(1, n + 1))
            table = rng.integers(0, 3, (n_rows, int(rng.integers(1, 4)))).astype(float)
            table[rng.random(table.shape) < 0.1] = np.inf
            tables.append((table, rng.integers(0, n_rows, n)))
        rows = np.concatenate([table[of] for table, of in tables], axis=1)
        left = _undominated(n, tables)
        for k in range(n):
            no_worse = [j for j in range(n) if j != k and (rows[j] <= rows[k]).all()]
            # Of equal choices the first stays.
            equal = [j for j in no_worse if (rows[j] == rows[k]).all()]
            assert left[k] == (no_worse == equal and all(k < j for j in equal)), seed
            n_dropped += not left[k]
            n_equal += bool(equal)
    assert n_dropped > 500 and n_equal > 100, (n_dropped, n_equal)
