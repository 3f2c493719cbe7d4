"""Groups of processes: a `Group` over `torch.distributed`, and how groups are made.

Every rank makes all groups of a mesh in the same order, even those it is not in.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.errors import MeshError
from autopar.mesh import LogicalMesh
from autopar.placement import Split
from autopar.runtime.groups.group import WORLD_AXIS, Group, ReduceOp
from autopar.runtime.groups.pending import Pending


class DistGroup(Group):
    """A group over `torch.distributed`: NCCL, gloo, or the backend the user initialised.

    Buffers are passed flat, because gloo takes no stacked form.
    """

    def __init__(
        self, ranks: Sequence[int], rank: int, axes: Sequence[str], process_group: dist.ProcessGroup
    ) -> None:
        super().__init__(ranks, rank, axes)
        self.process_group = process_group

    def _all_reduce(self, x: Tensor, op: ReduceOp, owns: bool) -> Pending[Tensor]:
        is_result = owns and x.is_contiguous()
        out = x if is_result else x.clone(memory_format=torch.contiguous_format)
        work = dist.all_reduce(
            out,
            op=dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX,
            group=self.process_group,
            async_op=True,
        )
        return Pending(out, work)

    def _all_gather(self, x: Tensor, split: Split) -> Pending[Tensor]:
        out = torch.empty((self.size, *x.shape), dtype=x.dtype, device=x.device)
        group = self.process_group
        work = dist.all_gather_single(out.view(-1), x.view(-1), group=group, async_op=True)
        return Pending(out, work, x)

    def _reduce_scatter(self, stack: Tensor, split: Split) -> Pending[Tensor]:
        out = torch.empty(stack.shape[1:], dtype=stack.dtype, device=stack.device)
        group = self.process_group
        work = dist.reduce_scatter_single(out.view(-1), stack.view(-1), group=group, async_op=True)
        return Pending(out, work, stack)

    def _all_to_all(self, stack: Tensor, source: Split, target: Split) -> Pending[Tensor]:
        out = torch.empty_like(stack)
        group = self.process_group
        work = dist.all_to_all_single(out.view(-1), stack.view(-1), group=group, async_op=True)
        return Pending(out, work, stack)

    def _all_to_all_rows(
        self, rows: Tensor, n_sent: Sequence[int], n_received: Sequence[int]
    ) -> Pending[Tensor]:
        out = rows.new_empty(sum(n_received), *rows.shape[1:])
        work = dist.all_to_all_single(
            out, rows, list(n_received), list(n_sent), self.process_group, async_op=True
        )
        return Pending(out, work, rows)

    def _shift(self, x: Tensor) -> Pending[Tensor]:
        # Messages to neighbours alone, and yet a collective: no order of sends and receives.
        out, sent = torch.empty_like(x), [0] * self.size
        received = [0] * self.size
        sent[(self.rank + 1) % self.size] = received[self.rank - 1] = x.numel()
        group = self.process_group
        work = dist.all_to_all_single(
            out.view(-1), x.view(-1), received, sent, group=group, async_op=True
        )
        return Pending(out, work, x)


def axis_subsets(mesh: LogicalMesh) -> Iterator[tuple[int, ...]]:
    """Every non-empty subset of the axes with more than one rank, single axes first."""
    active = mesh.active_axes
    for n_axes in range(1, len(active) + 1):
        yield from itertools.combinations(active, n_axes)


# Keyed by the default group: a world initialised again after `destroy_process_group` must not
# reuse the old groups.
_process_groups: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]]
_process_groups = WeakKeyDictionary()
_edge_groups: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, int], dist.ProcessGroup]]
_edge_groups = WeakKeyDictionary()


def make_groups(mesh: LogicalMesh) -> dict[tuple[int, ...], Group]:
    """This rank's groups of `mesh`, keyed by sorted axis indices; {} for ranks outside it.

    Every rank of the world must call this with the same meshes in the same order: a process
    group is created on all ranks, members or not, once per distinct set of ranks.

    Raises `MeshError` when `torch.distributed` is not initialised or the world is too small.
    """
    default = _default_group(f"a mesh of {mesh.n_ranks} ranks")
    world_size, me = dist.get_world_size(), dist.get_rank()
    if mesh.ranks[-1] >= world_size:
        raise MeshError(
            f"mesh {mesh.axes} uses ranks up to {mesh.ranks[-1]}, but {world_size} are running",
            hint=f"start {mesh.ranks[-1] + 1} processes with torchrun or autopar.launch",
        )
    known = _process_groups.setdefault(default, {tuple(range(world_size)): default})
    groups: dict[tuple[int, ...], Group] = {}
    for axes in axis_subsets(mesh):
        for ranks in mesh.groups(axes):
            if ranks not in known:
                known[ranks] = new_group(ranks)
            if me in ranks:
                names = [mesh.names[i] for i in axes]
                groups[axes] = DistGroup(ranks, ranks.index(me), names, known[ranks])
    return groups


def make_edges(
    edges: Sequence[tuple[int, int]],
) -> dict[tuple[int, int], dist.ProcessGroup]:
    """A process group of its own for every (sender, receiver).

    Under NCCL a group is a communicator and a stream, so messages of one edge do not wait for those
    of another. Every rank of the world must call this with the same edges in the same order.
    """
    known = _edge_groups.setdefault(_default_group("a group per edge"), {})
    for edge in edges:
        if edge not in known:
            known[edge] = new_group(edge)
    return {edge: known[edge] for edge in edges}


def new_group(ranks: Sequence[int], backend: str | None = None) -> dist.ProcessGroup:
    """A process group with the world's timeout; by itself torch takes half an hour.

    Every rank of the world must call this. Raises `MeshError` when `torch.distributed` is not
    initialised.
    """
    default = _default_group("a group of ranks")
    device = "cuda" if dist.get_backend(default) == "nccl" else "cpu"
    timeout = default._get_backend(torch.device(device)).options._timeout
    return dist.new_group(list(ranks), timeout=timeout, backend=backend)


def world_group() -> Group:
    """The group of all ranks, over all stages; its axis is called "world".

    Raises `MeshError` when `torch.distributed` is not initialised.
    """
    default = _default_group("a group of all ranks")
    return DistGroup(range(dist.get_world_size()), dist.get_rank(), (WORLD_AXIS,), default)


def _default_group(what: str) -> dist.ProcessGroup:
    if not dist.is_initialized():
        raise MeshError(
            f"{what} needs torch.distributed, which is not initialised",
            hint="start the script with torchrun, or use autopar.launch",
        )
    default = dist.group.WORLD
    assert default is not None
    return default
