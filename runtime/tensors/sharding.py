"""The part of a parameter that one rank stores: its shard, its boxes, and how to gather the whole.

A stored parameter is Invariant or Shard on every axis. Its whole dim of factor sizes
f_0 x f_1 x ... is cut along one factor per axis, outermost axis first (`shard` in
`runtime/execute/delivery.py`):

    local_shard    whole -> shard                    a slice, or a strided slice where k > 0
    gather_whole   shard -> whole                    all_gathers, innermost axis first
    boxes          where in the whole tensor the shard lies

A dim cut along factor k > 0 keeps f_0 * ... * f_(k-1) runs of indices. A shard is the Cartesian
product of its dims' runs: a set of boxes, which lie in the shard in increasing order.

A dim may be padded at its end (`passes/analysis/padding.py`). Then the product of its factors is
more than the user's size. Whole tensors have the user's shape: padding is added as zeros on the
way in and cut off on the way out, and boxes end where the user's tensor does.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from autopar.placement import I, S, Spec, Split
from autopar.program.lines import StoredParameter
from autopar.runtime.execute import shard
from autopar.runtime.groups import DistGroup, Group

Groups = Mapping[tuple[int, ...], Group]


@dataclass(frozen=True)
class Box:
    """A block of a whole tensor: its start there, its start in the shard, and its sizes."""

    start: tuple[int, ...]
    held: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def of_whole(self) -> tuple[slice, ...]:
        return tuple(slice(a, a + n) for a, n in zip(self.start, self.sizes, strict=True))

    @property
    def of_shard(self) -> tuple[slice, ...]:
        return tuple(slice(a, a + n) for a, n in zip(self.held, self.sizes, strict=True))


def is_sharded(parameter: StoredParameter) -> bool:
    return any(p.is_shard for p in parameter.stored.spec.placements)


def padding(parameter: StoredParameter) -> tuple[int, ...]:
    """How many elements longer than the user's each stored dim is."""
    stored = (math.prod(factors) for factors in parameter.dims)
    return tuple(a - b for a, b in zip(stored, parameter.shape, strict=True))


def extended(whole: Tensor, parameter: StoredParameter) -> Tensor:
    """A whole tensor of the user's shape, with zeros added as padding."""
    more = padding(parameter)
    return F.pad(whole, [n for m in reversed(more) for n in (0, m)]) if any(more) else whole


def local_shard(
    whole: Tensor, parameter: StoredParameter, sizes: Sequence[int], coordinate: Sequence[int]
) -> Tensor:
    """The part of `whole` that the rank at `coordinate` keeps; contiguous, in its own memory."""
    part = shard(
        extended(whole.detach(), parameter),
        parameter.dims,
        parameter.stored.spec,
        sizes,
        coordinate,
    )
    memory = part.untyped_storage()
    is_view = memory.data_ptr() == whole.untyped_storage().data_ptr()
    # Two strided cuts leave a view of an intermediate copy.
    if is_view or memory.nbytes() != part.nbytes:
        return part.clone(memory_format=torch.contiguous_format)
    return part.contiguous()


def boxes(
    parameter: StoredParameter,
    sizes: Sequence[int],
    coordinate: Sequence[int],
    whole_dims: frozenset[int] = frozenset(),
) -> tuple[Box, ...]:
    """The blocks of the whole tensor that the rank at `coordinate` keeps, in order.

    If `whole_dims` were gathered, the blocks cover those dims entirely.
    """
    runs = [
        [(0, 0, size)] if dim in whole_dims else _runs(parameter, dim, sizes, coordinate)
        for dim, size in enumerate(parameter.shape)
    ]
    return tuple(
        Box(
            tuple(run[0] for run in chosen),
            tuple(run[1] for run in chosen),
            tuple(run[2] for run in chosen),
        )
        for chosen in itertools.product(*runs)
    )


def without_padding(
    local: Tensor,
    parameter: StoredParameter,
    sizes: Sequence[int],
    coordinate: Sequence[int],
    whole_dims: frozenset[int] = frozenset(),
) -> Tensor:
    """The part of a shard inside the user's tensor, as a view; `whole_dims` as in `boxes`."""
    out = local
    for dim, more in enumerate(padding(parameter)):
        if more and dim in whole_dims:
            out = out.narrow(dim, 0, parameter.shape[dim])
        elif more:
            runs = _runs(parameter, dim, sizes, coordinate)
            out = out.narrow(dim, 0, sum(length for *_, length in runs))
    return out


def _runs(
    parameter: StoredParameter, dim: int, sizes: Sequence[int], coordinate: Sequence[int]
) -> list[tuple[int, int, int]]:
    """(start in the whole dim, start in the shard, length) of the runs kept of one dim."""
    spec, size = parameter.stored.spec, parameter.shape[dim]
    if not any(p.is_shard and p.dim == dim for p in spec.placements):
        return [(0, 0, size)]
    alone = tuple(S(0, p.factor) if p.is_shard and p.dim == dim else I for p in spec.placements)
    whole = torch.arange(size + padding(parameter)[dim])
    kept = shard(whole, (parameter.dims[dim],), Spec(alone, spec.order), sizes, coordinate)
    kept = kept[kept < size]  # padding ends the whole dim, so it ends a shard, too
    if not len(kept):
        return []
    cuts = (kept.diff() != 1).nonzero().flatten().add(1).tolist()
    begins, ends = [0, *cuts], [*cuts, len(kept)]
    return [(int(kept[a]), a, b - a) for a, b in zip(begins, ends, strict=True)]


def gather_whole(
    local: Tensor,
    parameter: StoredParameter,
    sizes: Sequence[int],
    groups: Groups,
    only_dims: frozenset[int] | None = None,
) -> Tensor:
    """The whole tensor from its shards, on every rank; `only_dims` limits which dims become whole.

    The inverse of `local_shard`: whole dims have no padding. Every rank of the stage must call
    it. `groups` holds a group for each single axis that shards the parameter.
    """
    spec = parameter.stored.spec
    dims = [list(factors) for factors in parameter.dims]
    for axis, placement in enumerate(spec.placements):
        if placement.is_shard:
            dims[placement.dim][placement.factor] //= sizes[axis]
    out = local.detach()
    for axis in reversed(spec.order or range(len(sizes))):
        placement = spec.placements[axis]
        if not placement.is_shard or (only_dims is not None and placement.dim not in only_dims):
            continue
        dim, factor = placement.cell
        outer = math.prod(dims[dim][:factor])
        out = groups[(axis,)].all_gather(out, Split(dim, outer))
        dims[dim][factor] *= sizes[axis]
    more = padding(parameter)
    padded = [d for d, n in enumerate(parameter.shape) if more[d] and out.shape[d] == n + more[d]]
    for dim in padded:
        out = out.narrow(dim, 0, parameter.shape[dim])
    return out.clone() if padded else out  # saving a view would save the padding


def axis_groups(mesh: DeviceMesh) -> dict[tuple[int, ...], Group]:
    """The groups of single axes of a torch `DeviceMesh`, for `gather_whole`."""
    names = mesh.mesh_dim_names or tuple(f"axis{i}" for i in range(mesh.ndim))
    found: dict[tuple[int, ...], Group] = {}
    for axis, name in enumerate(names):
        process_group = mesh.get_group(axis)
        ranks = dist.get_process_group_ranks(process_group)
        found[(axis,)] = DistGroup(ranks, mesh.get_local_rank(axis), (name,), process_group)
    return found
