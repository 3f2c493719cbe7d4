"""The processes of the job, seen from one of them: joining them, and results from rank 0."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from autopar.errors import AutoparError, CaptureError, MeshError
from autopar.mesh import Mesh
from autopar.runtime.launch import init_from_environment

T = TypeVar("T")

# How long a rank that sees a Python value change waits for the others to see it, too.
AGREE_TIMEOUT_S = 300.0


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


def agree(event: str, digest: str, values: Mapping[str, str], of: str = "a change of") -> None:
    """Raise `CaptureError` unless every rank comes here, for the same event, with equal digests.

    `values` are named where digests differ; `of` says what a rank sees of them.

    Ranks meet in the store of the process group, not in a collective: a rank that does not come is
    in the collectives of a step.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    keys = [f"autopar/{event}/{other}" for other in range(dist.get_world_size())]
    store.set(keys[rank], json.dumps([digest, dict(values)]))
    names = ", ".join(values)
    hint = "change it on every rank, in the same way, before the same step"
    for other, key in enumerate(keys):
        try:
            store.wait([key], timedelta(seconds=AGREE_TIMEOUT_S))
        except dist.DistStoreError as error:
            raise CaptureError(
                f"rank {rank} sees {of} {names}, rank {other} does not", hint=hint
            ) from error
        their_digest, theirs = json.loads(store.get(key))
        if their_digest == digest:
            continue
        pairs = {n: (values.get(n, "unchanged"), theirs.get(n, "unchanged")) for n in values}
        for name, (one, two) in pairs.items():
            if one != two:
                raise CaptureError(
                    f"{name} differs between ranks: {one} on rank {rank}, {two} on rank {other}",
                    hint=hint,
                )
        raise CaptureError(
            f"after {of} {names}, ranks {rank} and {other} have other graphs", hint=hint
        )
