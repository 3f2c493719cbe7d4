"""What crosses between stages, as the joint search prices it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from autopar.passes.analysis.cutting import Side, boundary_specs
from autopar.passes.inter.crossings import _CrossingSpecs
from autopar.passes.reshard.costs import ReshardTables
from autopar.passes.reshard.move_graph import move_graph
from autopar.placement.spec import TensorType


@pytest.mark.parametrize("side", ["sent", "received"])
@pytest.mark.parametrize("has_grad", [True, False])
def test_cuts_of_many_cases_are_those_of_each(side: Side, has_grad: bool) -> None:
    """On axes in use everywhere, of tensors whose factors divide by some sizes or by none."""
    types = [TensorType(((4, n), (12,)), 8, has_grad) for n in (1, 2, 3, 6)]
    cases = list(itertools.product(types, [(2, 1, 2), (3, 1, 2), (4, 1, 6), (5, 1, 7)]))
    graph = move_graph(*cases[0])
    seconds = np.zeros((len(cases), len(graph.primitives)))
    tables = ReshardTables.build([t for t, _ in cases], [sizes for _, sizes in cases], seconds)
    found = _CrossingSpecs.of(tables, side)
    for (tensor, sizes), legal in zip(cases, found.legal, strict=True):
        specs = [graph.specs[k] for k in itertools.compress(found.specs, legal)]
        assert tuple(specs) == boundary_specs(tensor, sizes, side)
    assert len(set(map(tuple, found.legal.tolist()))) > 2
