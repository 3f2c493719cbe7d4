"""The compiled least sum of tables equals what numpy makes of the sum written down."""

from __future__ import annotations

import numpy as np
import pytest

from autopar.passes.solvers.least_sums import least_sum


def of_axes(draw: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Numbers, some infinite, of this shape or with some axes but the second of length 1."""
    some = tuple(n if k == 1 or draw.random() < 0.5 else 1 for k, n in enumerate(shape))
    return np.where(draw.random(some) < 0.1, np.inf, draw.random(some))


@pytest.mark.parametrize("n_axes", range(5))
def test_least_sum_is_that_of_the_sum_written_down(n_axes: int) -> None:
    draw = np.random.default_rng(n_axes)
    for n_parts in range(1, 6):
        for _ in range(20):
            shape = tuple(int(n) for n in draw.integers(1, 5, 2 + n_axes))
            parts = [of_axes(draw, shape) for _ in range(n_parts)]
            out = np.empty((shape[0], *shape[2:]))
            least_sum(parts, out)
            total = sum(parts, np.zeros(shape))
            np.testing.assert_allclose(out, total.min(axis=1), rtol=1e-15)
