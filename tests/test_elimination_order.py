"""Orders of elimination: what is planned, and how often."""

from __future__ import annotations

import pytest

from autopar.passes.solvers import conditioning, elimination_order
from autopar.passes.solvers.conditioning import plan_conditioned
from autopar.passes.solvers.elimination_order import Axes, Limits, TooWide, plan_elimination
from tests.test_solvers import clique


@pytest.fixture
def nothing_known() -> None:
    elimination_order._planned.cache_clear()
    conditioning._planned.cache_clear()


@pytest.mark.usefixtures("nothing_known")
def test_what_is_too_wide_is_planned_once() -> None:
    problem, limits = clique(6, 3, seed=0), Limits(table_entries=2)
    tables = [Axes.of(e) for e in problem.edges]
    for _ in range(3):
        with pytest.raises(TooWide, match="a table of 27 entries, 37 in all, 27 times"):
            plan_elimination(problem, limits)
        with pytest.raises(TooWide, match="a table of 729 entries beside 0 hubs"):
            plan_conditioned(problem.sizes, tables, limits=limits)
    # One under these limits; the others are what conditioning asks for, without limits.
    assert elimination_order._planned.cache_info().misses == 3
    assert conditioning._planned.cache_info().misses == 1
