"""The abstract machine on which recipes are placed."""

from __future__ import annotations

from autopar.cost.laws import CostModel
from autopar.mesh import Device, Link, LogicalMesh


def recipe_cost(cost: CostModel) -> CostModel:
    """A machine where FLOPs cost most, then bytes sent between ranks, then bytes touched.

    The Megatron layout is the optimum in that order: shard every matmul that can be sharded, with
    the least communication. With real rates, small models would replicate.
    """
    mesh = cost.mesh
    machine = Device(flops_per_s=1.0, bytes_per_s=1e3, memory_bytes=mesh.device.memory_bytes)
    links = (Link(1.0, 1.0),) * mesh.n_axes
    view = LogicalMesh(mesh.sizes, mesh.names, links, machine, mesh.first_rank)
    return CostModel(view, cost.dtype)
