"""The abstract machine on which recipes are laid out."""

from __future__ import annotations

from autopar.cost.laws import CostModel
from autopar.mesh import Device, Link, LogicalMesh


def recipe_cost(cost: CostModel) -> CostModel:
    """The abstract machine a recipe is laid out on: flops dearest, then bytes moved between
    ranks, then bytes touched.

    The Megatron layout is the optimum of that order: split every product that can be, with
    the least communication. Real rates would let small models replicate.
    """
    mesh = cost.mesh
    machine = Device(flops_per_s=1.0, bytes_per_s=1e3, memory_bytes=mesh.device.memory_bytes)
    links = (Link(1.0, 1.0),) * mesh.n_axes
    view = LogicalMesh(mesh.sizes, mesh.names, links, machine, mesh.first_rank)
    return CostModel(view, cost.dtype)
