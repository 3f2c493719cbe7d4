"""Groups of ranks and the primitives they execute, whatever carries the bytes.

A `Group` is what a generated program calls `g`: the ranks that differ only along some mesh
axes, seen from one of them. Every primitive returns a new contiguous tensor without autograd
history; `collectives.py` adds the gradients. With n ranks and a tensor dim of local size
outer * rest, a `Split(dim, outer)` cuts or concatenates along `rest`:

    cut   [.., outer * n * rest, ..] -> [n, .., outer * rest, ..]     (`cut`)
    join  [n, .., outer * rest, ..]  -> [.., outer * n * rest, ..]    (`join`, its inverse)

so all_gather = join . gather, reduce_scatter = scatter-sum . cut, all_to_all =
join(source) . transpose . cut(target), and a carrier (`DistGroup`, `threads.ThreadGroup`)
moves only stacks along a leading dim of size n.

Calls are recorded per rank under NCCL's accounting of bytes (`Recorder`, `phase`).
"""

from __future__ import annotations

import itertools
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Literal
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.errors import MeshError, VerificationError
from autopar.mesh import LogicalMesh
from autopar.moves import PrimitiveKind, Split

ReduceOp = Literal["sum", "max"]
# The axis of the group of all ranks.
WORLD_AXIS = "world"
CallKind = PrimitiveKind | Literal["send"]


@dataclass(frozen=True)
class CollectiveCall:
    """One collective executed, or one message sent, by this rank.

    `size_bytes`: all_reduce its buffer, all_gather its output, reduce_scatter its input,
    all_to_all the local send buffer, send its tensor.
    """

    kind: CallKind
    axes: tuple[str, ...]
    size_bytes: int
    phase: str


class RankContext:
    """What one rank is doing: the phase its collectives belong to, and who listens.

    Groups hold it rather than look it up, because CUDA backwards run in threads of autograd.
    """

    def __init__(self) -> None:
        self.phase = "forward"
        self.recorders: list[Recorder] = []

    def record(self, call: CollectiveCall) -> None:
        for recorder in self.recorders:
            recorder.calls.append(call)


_process_context = RankContext()
_thread = threading.local()


def current_context() -> RankContext:
    """The context of this thread's rank, or of the process when ranks are processes."""
    context: RankContext | None = getattr(_thread, "context", None)
    return _process_context if context is None else context


def set_thread_context(context: RankContext) -> None:
    """Make the calling thread a rank of its own."""
    _thread.context = context


class Recorder:
    """Collects the `calls` of the current rank while it is entered."""

    def __init__(self) -> None:
        self.calls: list[CollectiveCall] = []

    def __enter__(self) -> Recorder:
        self._context = current_context()
        self._context.recorders.append(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._context.recorders.remove(self)


@contextmanager
def phase(name: str, context: RankContext | None = None) -> Iterator[None]:
    """Attribute the collectives inside to `name`: forward, backward, grad_sync, loss, ..."""
    context = context or current_context()
    before, context.phase = context.phase, name
    try:
        yield
    finally:
        context.phase = before


def cut(x: Tensor, split: Split, n_pieces: int) -> Tensor:
    """The pieces of `x` along `split`, stacked on a new leading dim; contiguous."""
    dim = split.dim
    parts = x.unflatten(dim, (split.outer, n_pieces, _rest(x, split, n_pieces)))
    return parts.movedim(dim + 1, 0).flatten(dim + 1, dim + 2).contiguous()


def join(stack: Tensor, split: Split) -> Tensor:
    """The inverse of `cut`; contiguous, and may share memory with `stack`."""
    dim = split.dim
    rest = _rest(stack[0], split, 1)
    parts = stack.unflatten(dim + 1, (split.outer, rest)).movedim(0, dim + 1)
    return parts.flatten(dim, dim + 2).contiguous()


def _rest(x: Tensor, split: Split, n_pieces: int) -> int:
    """The size of one piece within one outer block."""
    if not 0 <= split.dim < x.ndim or x.shape[split.dim] % (split.outer * n_pieces):
        raise VerificationError(
            f"a tensor of shape {tuple(x.shape)} has no dim {split.dim} of "
            f"{split.outer} x {n_pieces} equal pieces",
            hint="the program was generated for other shapes, or edited; regenerate it",
        )
    return x.shape[split.dim] // (split.outer * n_pieces)


def _replaced(x: Tensor, dim: int, size: int) -> tuple[int, ...]:
    return (*x.shape[:dim], size, *x.shape[dim + 1 :])


class Group(ABC):
    """The ranks along `axes`, seen from the one at position `rank` of `size`.

    `ranks` are their numbers in the world, row-major over the axes. The collectives block,
    and must be called by all members in the same order with equal shapes and dtypes.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        rank: int,
        axes: Sequence[str],
        context: RankContext | None = None,
    ) -> None:
        self.ranks = tuple(ranks)
        self.size = len(self.ranks)
        self.rank = rank
        self.axes = tuple(axes)
        self.label = "+".join(self.axes)
        self.context = context or current_context()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.label}, rank {self.rank} of {self.ranks})"

    def all_reduce(self, x: Tensor, op: ReduceOp = "sum") -> Tensor:
        """The sum (or maximum) over ranks; for bool both are "or"."""
        self._record("all_reduce", x.nbytes)
        return self._all_reduce(x.detach(), op)

    def all_gather(self, x: Tensor, split: Split) -> Tensor:
        """All ranks' shards, concatenated along `split`."""
        _rest(x, split, 1)
        self._record("all_gather", x.nbytes * self.size)
        return join(self._all_gather(x.detach().contiguous(), split), split)

    def reduce_scatter(self, x: Tensor, split: Split) -> Tensor:
        """This rank's piece along `split` of the sum over ranks."""
        stack = cut(x.detach(), split, self.size)
        self._record("reduce_scatter", x.nbytes)
        return self._reduce_scatter(stack, split)

    def all_to_all(self, x: Tensor, source: Split, target: Split) -> Tensor:
        """From sharded along `source` to sharded along `target`.

        `target.outer` counts in `x`, `source.outer` in a piece of it.
        """
        stack = cut(x.detach(), target, self.size)
        _rest(stack[0], source, 1)
        self._record("all_to_all", x.nbytes)
        return join(self._all_to_all(stack, source, target), source)

    def send_rows(self, rows: Tensor, n_sent: Sequence[int], n_received: Sequence[int]) -> Tensor:
        """`rows` in the order of the ranks they go to, `n_sent[r]` to rank r; those that come.

        The numbers differ among ranks, and each must know how many it gets from every other.
        """
        self._record("all_to_all", rows.nbytes)
        return self._all_to_all_rows(rows.detach().contiguous(), n_sent, n_received)

    def return_rows(self, rows: Tensor, n_sent: Sequence[int], n_received: Sequence[int]) -> Tensor:
        """One row for each that `send_rows` brought, back to where that came from.

        Counted by what comes back to this rank, so that both ways are counted by its own rows.
        """
        returned = self._all_to_all_rows(rows.detach().contiguous(), n_received, n_sent)
        self._record("all_to_all", returned.nbytes)
        return returned

    def slice(self, x: Tensor, split: Split) -> Tensor:
        """This rank's piece of `x` along `split`; no communication."""
        dim, rest = split.dim, _rest(x, split, self.size)
        out = torch.empty(_replaced(x, dim, split.outer * rest), dtype=x.dtype, device=x.device)
        parts = x.detach().unflatten(dim, (split.outer, self.size, rest))
        out.unflatten(dim, (split.outer, rest)).copy_(parts.select(dim + 1, self.rank))
        return out

    def zero_pad(self, x: Tensor, split: Split) -> Tensor:
        """`x` as this rank's piece along `split`, zeros in the others; no communication."""
        dim, rest = split.dim, _rest(x, split, 1)
        out = torch.zeros(
            _replaced(x, dim, split.outer * rest * self.size), dtype=x.dtype, device=x.device
        )
        parts = out.unflatten(dim, (split.outer, self.size, rest))
        parts.select(dim + 1, self.rank).copy_(x.detach().unflatten(dim, (split.outer, rest)))
        return out

    def keep_first(self, x: Tensor) -> Tensor:
        """`x` on the group's first rank, zeros on the others; no communication."""
        if self.rank == 0:
            return x.detach().clone(memory_format=torch.contiguous_format)
        return torch.zeros(x.shape, dtype=x.dtype, device=x.device)

    def _record(self, kind: PrimitiveKind, size_bytes: int) -> None:
        self.context.record(CollectiveCall(kind, self.axes, size_bytes, self.context.phase))

    # The carrier's part. Splits are given so that it can compare the members' calls.

    @abstractmethod
    def _all_reduce(self, x: Tensor, op: ReduceOp) -> Tensor:
        """Reduce `x`, which may be strided, into a new contiguous tensor."""

    @abstractmethod
    def _all_gather(self, x: Tensor, split: Split) -> Tensor:
        """[*shape] -> [n, *shape]."""

    @abstractmethod
    def _reduce_scatter(self, stack: Tensor, split: Split) -> Tensor:
        """[n, *piece] -> this rank's [*piece], summed."""

    @abstractmethod
    def _all_to_all(self, stack: Tensor, source: Split, target: Split) -> Tensor:
        """[n, *piece], one for each rank -> [n, *piece], one from each rank."""

    @abstractmethod
    def _all_to_all_rows(
        self, rows: Tensor, n_sent: Sequence[int], n_received: Sequence[int]
    ) -> Tensor:
        """[sum(n_sent), *row], in the order of ranks -> [sum(n_received), *row], likewise."""


class DistGroup(Group):
    """A group over `torch.distributed`: NCCL, gloo, or what the user initialised.

    Buffers are passed flat, because gloo takes no stacked form.
    """

    def __init__(
        self, ranks: Sequence[int], rank: int, axes: Sequence[str], process_group: dist.ProcessGroup
    ) -> None:
        super().__init__(ranks, rank, axes)
        self.process_group = process_group

    def _all_reduce(self, x: Tensor, op: ReduceOp) -> Tensor:
        out = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(
            out,
            op=dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX,
            group=self.process_group,
        )
        return out

    def _all_gather(self, x: Tensor, split: Split) -> Tensor:
        out = torch.empty((self.size, *x.shape), dtype=x.dtype, device=x.device)
        dist.all_gather_single(out.view(-1), x.view(-1), group=self.process_group)
        return out

    def _reduce_scatter(self, stack: Tensor, split: Split) -> Tensor:
        out = torch.empty(stack.shape[1:], dtype=stack.dtype, device=stack.device)
        dist.reduce_scatter_single(out.view(-1), stack.view(-1), group=self.process_group)
        return out

    def _all_to_all(self, stack: Tensor, source: Split, target: Split) -> Tensor:
        out = torch.empty_like(stack)
        dist.all_to_all_single(out.view(-1), stack.view(-1), group=self.process_group)
        return out

    def _all_to_all_rows(
        self, rows: Tensor, n_sent: Sequence[int], n_received: Sequence[int]
    ) -> Tensor:
        out = rows.new_empty(sum(n_received), *rows.shape[1:])
        dist.all_to_all_single(out, rows, list(n_received), list(n_sent), self.process_group)
        return out


def axis_subsets(mesh: LogicalMesh) -> Iterator[tuple[int, ...]]:
    """Every non-empty subset of the axes of more than one rank, single axes first."""
    active = mesh.active_axes
    for n_axes in range(1, len(active) + 1):
        yield from itertools.combinations(active, n_axes)


# Keyed by the default group, so that destroying and initialising it again starts afresh.
_process_groups: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]]
_process_groups = WeakKeyDictionary()


def make_groups(mesh: LogicalMesh) -> dict[tuple[int, ...], Group]:
    """This rank's groups of `mesh`, keyed by sorted axis indices; {} for ranks outside it.

    Every rank of the world must call it with the same meshes in the same order: process
    groups are created on all ranks, members or not, once per distinct set of ranks.

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
                known[ranks] = dist.new_group(list(ranks))
            if me in ranks:
                names = [mesh.names[i] for i in axes]
                groups[axes] = DistGroup(ranks, ranks.index(me), names, known[ranks])
    return groups


def world_group() -> Group:
    """All ranks of the world, whatever their stages: an axis called "world".

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
