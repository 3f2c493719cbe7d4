"""State as DTensors under the user's names, so that PyTorch's tools understand it.

A stored spec is translated axis by axis, in mesh order, because DTensor applies placements from
left to right. Let axis a cut factor k of a dim, and let f' be the dim's factor sizes after the
cuts of the axes before a. DTensor then sees n blocks (`dtensor_placements`):

    n = f'_0 * ... * f'_(k-1) * (sizes of the axes after a in mesh order that cut k outside a)

    Invariant                 Replicate
    Shard, 1 block            Shard(dim)
    Shard, n > 1 blocks       _StridedShard(dim, split_factor=n)

DTensor undoes a strided cut correctly in two cases (`_is_expressible`): the cut is the last on its
dim, or it stands for plain shards in another order (n is the size of the one axis after it, which
is a plain Shard). Two strided cuts of one dim come back permuted, without an error (measured on
torch 2.13). Any other dim is therefore exported whole: gathered, Replicate.

A padded dim is exported without its padding. DTensor cuts it unevenly, as `torch.chunk` does:
shards of ceil(size / ranks), the last ones shorter. Our shards end elsewhere if the dim is padded
for more ranks than cut it. Such a dim is exported whole, too (`_is_chunked`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from autopar.program.lines import Pipeline, StoredParameter
from autopar.runtime.state.dcp import BoxedLocal
from autopar.runtime.state.names import all_names, world_size
from autopar.runtime.state.stage_state import StageState
from autopar.runtime.tensors import (
    axis_groups,
    boxes,
    gather_whole,
    padding,
    without_padding,
)


def dtensor_placements(
    parameter: StoredParameter, sizes: Sequence[int]
) -> tuple[tuple[Placement, ...], frozenset[int]]:
    """(a DTensor placement per axis, the dims that are exported whole)."""
    spec = parameter.stored.spec
    left = [list(factors) for factors in parameter.dims]
    out: list[Placement] = []
    by_dim: dict[int, list[int]] = {}
    for axis, placement in enumerate(spec.placements):
        if not placement.is_shard:
            out.append(Replicate())
            continue
        dim, factor = placement.cell
        splitting = spec.axes_of(placement.cell)
        outside = splitting[: splitting.index(axis)]
        n_blocks = math.prod(left[dim][:factor]) * math.prod(sizes[a] for a in outside if a > axis)
        out.append(Shard(dim) if n_blocks == 1 else _StridedShard(dim, split_factor=n_blocks))
        left[dim][factor] //= sizes[axis]
        by_dim.setdefault(dim, []).append(axis)
    whole = frozenset(
        dim
        for dim, axes in by_dim.items()
        if not _is_expressible(out, axes, sizes)
        or not _is_chunked(parameter, dim, [sizes[a] for a in axes])
    )
    for dim in whole:
        for axis in by_dim[dim]:
            out[axis] = Replicate()
    return tuple(out), whole


def _is_expressible(
    placements: Sequence[Placement], axes: Sequence[int], sizes: Sequence[int]
) -> bool:
    """Whether DTensor can undo these cuts of one dim, given in mesh order."""
    *first, last = (placements[a] for a in axes)
    if not any(isinstance(p, _StridedShard) for p in first):
        return True
    if len(first) != 1 or isinstance(last, _StridedShard):
        return False
    assert isinstance(first[0], _StridedShard)
    return int(first[0].split_factor) == sizes[axes[-1]]


def _is_chunked(parameter: StoredParameter, dim: int, n_parts: Sequence[int]) -> bool:
    """Whether the shards of a dim over axes of sizes `n_parts` are those of `torch.chunk`."""
    more, size = padding(parameter)[dim], parameter.shape[dim]
    if not more:
        return True
    return len(n_parts) == 1 and math.ceil(size / n_parts[0]) * n_parts[0] == size + more


def dtensor_of(
    parameter: StoredParameter, local: Tensor, device_mesh: DeviceMesh, is_written: bool = True
) -> DTensor:
    """One parameter's shard as a DTensor; `device_mesh` has the stage's axes.

    The DTensor shares the shard's memory and has no gradient, so loading into it loads the
    parameter. The exception is a dim that DTensor cannot express. That dim is gathered and
    replicated, the DTensor is a copy, and every rank of the mesh must call this. `local` may be
    any tensor sharded like the parameter, such as a gradient or optimizer state. Unless
    `is_written`, saving the DTensor writes nothing.
    """
    sizes = tuple(device_mesh.shape)
    placements, whole_dims = dtensor_placements(parameter, sizes)
    held = local.detach()
    if whole_dims:
        held = gather_whole(held, parameter, sizes, axis_groups(device_mesh), whole_dims)
    coordinate = device_mesh.get_coordinate()
    assert coordinate is not None
    own = boxes(parameter, sizes, coordinate, whole_dims)
    held = without_padding(held, parameter, sizes, coordinate, whole_dims)
    shape = torch.Size(parameter.shape)
    out = DTensor.from_local(
        held,
        device_mesh,
        placements,
        run_check=False,
        shape=shape,
        stride=torch.empty(shape, device="meta").stride(),
    )
    if len(own) != 1 or not is_written:
        out._local_tensor = BoxedLocal.of(held, own, parameter.shape, is_written)
    return out


def stage_device_mesh(pipeline: Pipeline, rank: int, device_type: str) -> DeviceMesh | None:
    """The device mesh of a rank's stages; None in a world of one.

    Process groups are made by all ranks together. So every rank must call this, and makes the
    meshes of all devices in the order of ranks.
    """
    if world_size() == 1:
        return None
    made = [
        DeviceMesh(device_type, torch.tensor(m.ranks).view(m.sizes), mesh_dim_names=m.names)
        for m in pipeline.device_meshes
    ]
    return made[pipeline.device_of(rank)]


def state_dict(
    place: StageState,
    locals_: Mapping[str, Tensor],
    device_mesh: DeviceMesh | None,
    buffers: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """This rank's part of `model.state_dict()`: DTensors, and all buffers as plain tensors.

    With one stage this is every key. All names of a tied parameter hold the same DTensor.
    `torch.distributed.checkpoint` reads a mirror without a name of its own, but does not write it.
    Without a device mesh (a world of one) parameters are plain tensors.
    """
    out: dict[str, Tensor] = {}
    for p in place.parameters:
        local = locals_[p.name]
        if device_mesh is None:
            value = local.detach()
        else:
            value = dtensor_of(p, local, device_mesh, place.saves(p))
        out |= dict.fromkeys(all_names(p), value)
    return out | dict(buffers or {})
