"""What it costs to run reshards again in backward: sums over the moves of their paths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.passes.intra.cases import Cases
from autopar.passes.reshard import ReshardTables, primitive_lines
from autopar.placement import COLLECTIVES, Spec

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class RerunCosts:
    """Costs of the reshards between two variables: [cases, specs made, specs wanted] each.

    forward_s     seconds of one microbatch's forward
    local_s       the part of them in local moves
    kept_bytes    bytes of the results of collectives
    calls         number of collectives
    moves         number of moves
    """

    forward_s: Array
    local_s: Array
    kept_bytes: Array
    calls: Array
    moves: Array


def n_shards_of(specs: Sequence[Spec], cases: Cases) -> Array:
    """[cases, specs]: the number of shards of a tensor."""
    is_cut = np.array([[p.is_shard for p in spec.placements] for spec in specs], dtype=bool)
    found: Array = np.where(is_cut, cases.sizes[:, None, :], 1).prod(axis=2).astype(np.float64)
    return found


def rerun_costs(
    tables: ReshardTables, cases: Cases, made: Sequence[Spec], wanted: Sequence[Spec]
) -> RerunCosts:
    """The `RerunCosts` of the cheapest paths between two lists of specs."""
    graph, size_bytes = tables.graph, tables.size_bytes
    lines = primitive_lines(graph, cases.meshes).of(cases.mesh_of)
    seconds = lines.seconds(size_bytes)[:, graph.forward]
    kinds = np.array([p.kind in COLLECTIVES for p in graph.primitives], dtype=bool)
    calls = np.broadcast_to(kinds[graph.forward], seconds.shape).astype(np.float64)
    results = (size_bytes[:, None] / n_shards_of(graph.specs, cases))[:, graph.target]
    rows = [tables.index[spec] for spec in made]
    columns = [tables.index[spec] for spec in wanted]
    of_moves = [seconds, seconds * (1 - calls), results * calls, calls, np.ones_like(calls)]
    sums = tables.along_paths(rows, columns, np.stack(of_moves, axis=1))
    return RerunCosts(*(sums[:, k] for k in range(len(of_moves))))
