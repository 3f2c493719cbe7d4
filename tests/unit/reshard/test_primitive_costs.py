"""Seconds of a move graph's primitives, on several meshes at once."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from autopar.cost.laws import CostModel
from autopar.mesh import Mesh, factored_view
from autopar.passes.reshard import primitive_lines
from autopar.passes.reshard.move_graph import move_graph
from autopar.placement import COLLECTIVES, TensorType
from tests.helpers.machines import hardware_of


@pytest.mark.parametrize("shape", [(1, 8), (4, 8)])
def test_primitives_are_lines_in_their_bytes(shape: tuple[int, int]) -> None:
    """Groups inside a node and across nodes, with a switch that sums and without one."""
    for name in ("a100-80gb", "h100-sxm"):
        mesh = Mesh(shape, hardware=name)
        hardware = hardware_of(mesh, torch.bfloat16)
        costs = tuple(
            CostModel(
                factored_view(mesh, hardware.links, hardware.device, {"dp": dp, "tp": tp}),
                torch.bfloat16,
            )
            for dp, tp in ((2, 4), (4, 2))
        )
        tensor = TensorType(((64, 64), (64,)), 2, True)
        graph = move_graph(tensor, costs[0].mesh.sizes)
        assert {p.kind for p in graph.primitives} >= COLLECTIVES
        lines = primitive_lines(graph, costs)
        for size_bytes in (1 << 13, 1 << 20, 1 << 28):
            sizes = np.full(len(costs), float(size_bytes))
            seconds, bucketed = lines.seconds(sizes), lines.bucket_times_s(sizes)
            for b, cost in enumerate(costs):
                for p, primitive in enumerate(graph.primitives):
                    local = size_bytes // int(lines.n_shards[b, p])
                    kind, axes = primitive.kind, primitive.axes
                    alone_s = cost.primitive_time_s(kind, local, axes)
                    assert seconds[b, p] == pytest.approx(alone_s, rel=1e-9)
                    if kind in COLLECTIVES and local < cost.bucket_bytes:
                        full_s = cost.primitive_time_s(kind, cost.bucket_bytes, axes)
                        alone_s = full_s * local / cost.bucket_bytes  # its share of a full bucket
                    assert bucketed[b, p] == pytest.approx(alone_s, rel=1e-9)
