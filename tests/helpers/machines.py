"""Machines that tests plan for, and meshes of their ranks."""

from __future__ import annotations

from functools import cache

import torch

from autopar.cost.hardware import Hardware, resolve
from autopar.cost.laws import CostModel
from autopar.mesh import Device, Link, LogicalMesh, Mesh

A100 = "a100-80gb"
AXIS_NAMES = {1: ("tp",), 2: ("dp", "tp"), 3: ("dp", "cp", "tp")}
# Seconds per byte between nodes, and inside one. At `SLOW`, messages take about as long as matmuls.
SLOW, TIERED, FAST = (1e-8, 1e-8), (1e-8, 1e-10), (1e-9, 1e-10)


def mesh_of(*sizes: int, first_rank: int = 0) -> LogicalMesh:
    """A mesh to run on, where no cost matters."""
    names, links = ("dp", "tp", "cp")[: len(sizes)], (Link(1e-6, 1e-9),) * len(sizes)
    return LogicalMesh(sizes, names, links, Device(1e12, 1e11, 1e9), first_rank)


def cluster(*shape: int) -> Mesh:
    """Nodes of the profile `cpu-local`."""
    return Mesh(shape, hardware="cpu-local")


def hardware_of(mesh: Mesh, dtype: torch.dtype = torch.float64) -> Hardware:
    return resolve(mesh, dtype)


def two_tiers(shape: tuple[int, ...], s_per_byte: tuple[float, float], flops_per_s: float) -> Mesh:
    """Nodes of slow devices, with links of `s_per_byte` between nodes and inside one."""
    links = [Link(5e-6, s_per_byte[0]), Link(1e-6, s_per_byte[1])]
    return Mesh(shape, links=links[-len(shape) :], device=Device(flops_per_s, 1e12, 1e12, 1e-7))


def one_node(n_ranks: int) -> Mesh:
    """Fast links, and kernels that take longer than their launches even in small models."""
    device = Device(1e12, 1e11, 1e10, 1e-9)
    return Mesh((1, n_ranks), links=[Link(1e-7, 1e-10)] * 2, device=device)


@cache
def balanced_cost(sizes: tuple[int, ...]) -> CostModel:
    """Slow links between nodes and fast ones inside; compute, memory traffic and launches all
    matter."""
    links, device = (Link(1e-5, 1e-9), Link(2e-6, 1e-10)), Device(1e12, 1e11, 1e15, 1e-6)
    mesh = LogicalMesh(sizes, AXIS_NAMES[len(sizes)], links[-len(sizes) :], device)
    return CostModel(mesh, torch.float64)
