"""The processes of the job, seen from one of them: joining them, and results from rank 0."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from autopar.errors import AutoparError, MeshError
from autopar.mesh import Mesh
from autopar.runtime.launch import init_from_environment

T = TypeVar("T")


def own_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def join_process_group(mesh: Mesh) -> torch.device:
    """Join the process group and return this rank's device.

    Raises `MeshError` if the group does not have as many processes as the mesh has ranks.
    """
    if mesh.n_ranks == 1 and not dist.is_initialized() and "RANK" not in os.environ:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = init_from_environment()
    if dist.get_world_size() != mesh.n_ranks:
        raise MeshError(
            f"the mesh {mesh.shape} has {mesh.n_ranks} ranks, "
            f"this job runs {dist.get_world_size()} processes",
            hint=f"torchrun --nproc-per-node {mesh.devices_per_node} --nnodes {mesh.nodes} ..., "
            f"or autopar.launch(fn, {mesh.n_ranks})",
        )
    return device


def from_rank_0(make: Callable[[], T]) -> T:
    """Run `make` on rank 0; every rank gets its result, or raises its `AutoparError`."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return make()
    box: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            box = [("result", make())]
        except AutoparError as error:
            box = [("error", error)]
    dist.broadcast_object_list(box, src=0)
    kind, value = box[0]
    if kind == "error":
        raise value
    return value
