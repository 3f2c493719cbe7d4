"""Groups of ranks and the primitives they execute, independent of the backend.

A `Group` is what a generated program calls `g`: the ranks that differ only along some mesh
axes, seen from one of them. Every primitive returns a new contiguous tensor without autograd
history; `runtime/collectives/moves.py` adds the gradients. With n ranks and a tensor dim of
local size outer * rest, a `Split(dim, outer)` cuts or concatenates along `rest`:

    cut   [.., outer * n * rest, ..] -> [n, .., outer * rest, ..]     (`cut`)
    join  [n, .., outer * rest, ..]  -> [.., outer * n * rest, ..]    (`join`, its inverse)

both in head-tail order if the split folds.

    all_gather     = join . gather
    reduce_scatter = scatter-sum . cut
    all_to_all     = join(source) . transpose . cut(target)

So a backend (`DistGroup`, `ThreadGroup`) only moves stacks along a leading dim of size n.

Every call is recorded for its rank, with bytes as NCCL counts them: `Recorder` collects the calls
made inside its `with` block, `phase` names the part of the step that they belong to.
"""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Literal

import torch
from torch import Tensor

from autopar.errors import VerificationError
from autopar.placement import PrimitiveKind, Split, head_tail_order
from autopar.runtime.flight import FlightRecord, watch
from autopar.runtime.groups.pending import Pending

CallKind = PrimitiveKind | Literal["send"]


@dataclass(frozen=True)
class CollectiveCall:
    """One collective executed, or one message sent, by this rank.

    `size_bytes` is the buffer of an all_reduce, the output of an all_gather, the input of a
    reduce_scatter, the local send buffer of an all_to_all, or the sent tensor ("send" to another
    stage, "send_recv" round a ring).
    """

    kind: CallKind
    axes: tuple[str, ...]
    size_bytes: int
    phase: str


class RankContext:
    """One rank's current phase and its active recorders.

    A group stores its context instead of looking it up by thread: on CUDA, autograd runs
    backward in threads of its own.
    """

    def __init__(self, flight: FlightRecord | None = None) -> None:
        self.phase = "forward"
        self.recorders: list[Recorder] = []
        self.flight = FlightRecord() if flight is None else flight

    def record(self, call: CollectiveCall) -> None:
        """A call begins: tell the recorders, and note it."""
        over = "+".join(call.axes)
        self.flight.call(f"{call.kind} over {over} of {call.size_bytes} B ({call.phase})")
        for recorder in self.recorders:
            recorder.calls.append(call)


_process: list[RankContext] = []  # made when it is first needed: launchers set the environment
_thread = threading.local()


def current_context() -> RankContext:
    """The context of this thread's rank, or of the process when ranks are processes."""
    context: RankContext | None = getattr(_thread, "context", None)
    if context is not None:
        return context
    if not _process:
        record = FlightRecord.of_process()
        watch(record, int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)))
        _process.append(RankContext(record))
    return _process[0]


def set_thread_context(context: RankContext) -> None:
    """Make the calling thread a rank with its own context."""
    _thread.context = context


class Recorder:
    """Collects the `calls` of the current rank inside a `with` block."""

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


ReduceOp = Literal["sum", "max"]
# Axis name of the group of all ranks.
WORLD_AXIS = "world"


def cut(x: Tensor, split: Split, n_pieces: int) -> Tensor:
    """The pieces of `x` along `split`, stacked on a new leading dim; contiguous."""
    dim, x = split.dim, permute_to_cut(x, split)
    parts = x.unflatten(dim, (split.outer, n_pieces, _rest(x, split, n_pieces)))
    return parts.movedim(dim + 1, 0).flatten(dim + 1, dim + 2).contiguous()


def join(stack: Tensor, split: Split) -> Tensor:
    """The inverse of `cut`; contiguous, and may share memory with `stack`."""
    dim = split.dim
    rest = _rest(stack[0], split, 1)
    parts = stack.unflatten(dim + 1, (split.outer, rest)).movedim(0, dim + 1)
    return permute_back(parts.flatten(dim, dim + 2), split).contiguous()


def permute_to_cut(x: Tensor, split: Split) -> Tensor:
    """A whole tensor, in the order in which `split` cuts it."""
    return _permute(x, split, head_tail_order(split.folds)) if split.folds > 1 else x


def permute_back(x: Tensor, split: Split) -> Tensor:
    """The inverse of `permute_to_cut`."""
    if split.folds == 1:
        return x
    order = head_tail_order(split.folds)
    return _permute(x, split, sorted(range(len(order)), key=order.__getitem__))


def _permute(x: Tensor, split: Split, order: Sequence[int]) -> Tensor:
    """`x` with the pieces of each outer block in another order."""
    dim, n = split.dim, len(order)
    pieces = x.unflatten(dim, (split.outer, n, _rest(x, split, n)))
    # Not by an index, which would be copied to the device in each call.
    return torch.cat([pieces.narrow(dim + 1, k, 1) for k in order], dim + 1).flatten(dim, dim + 2)


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

    `ranks` are world ranks, row-major over the axes. All members must call the collectives in the
    same order, with equal shapes and dtypes. `start` begins one without waiting for it; the others
    block.
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

    def start(
        self, kind: PrimitiveKind, x: Tensor, splits: Sequence[Split] = (), owns: bool = False
    ) -> Pending[Tensor]:
        """Begin a collective: all_reduce (a sum), all_gather, reduce_scatter or all_to_all.

        `splits` holds the one split, or (source, target) for all_to_all. `x` must not be written
        before the wait. With `owns` nobody else reads `x`, which may then become the result.
        """
        match kind:
            case "all_reduce":
                return self._started_all_reduce(x, "sum", owns)
            case "all_gather":
                return self._started_all_gather(x, splits[0])
            case "reduce_scatter":
                return self._started_reduce_scatter(x, splits[0])
            case "all_to_all":
                return self._started_all_to_all(x, splits[0], splits[1])
        raise VerificationError(f"{kind!r} is no collective")

    def all_reduce(self, x: Tensor, op: ReduceOp = "sum") -> Tensor:
        """The sum or the maximum over ranks. For bool, both are a logical or."""
        return self._started_all_reduce(x, op).wait()

    def all_gather(self, x: Tensor, split: Split) -> Tensor:
        """All ranks' shards, concatenated along `split`."""
        return self._started_all_gather(x, split).wait()

    def reduce_scatter(self, x: Tensor, split: Split) -> Tensor:
        """This rank's piece along `split` of the sum over ranks."""
        return self._started_reduce_scatter(x, split).wait()

    def all_to_all(self, x: Tensor, source: Split, target: Split) -> Tensor:
        """From sharded along `source` to sharded along `target`.

        `target.outer` counts blocks in `x`; `source.outer` counts blocks in one piece of `x`.
        """
        return self._started_all_to_all(x, source, target).wait()

    def _started_all_reduce(self, x: Tensor, op: ReduceOp, owns: bool = False) -> Pending[Tensor]:
        self._record("all_reduce", x.nbytes)
        return self._all_reduce(x.detach(), op, owns).timed(self.context.flight.pace)

    def _started_all_gather(self, x: Tensor, split: Split) -> Pending[Tensor]:
        _rest(x, split, 1)
        self._record("all_gather", x.nbytes * self.size)
        pending = self._all_gather(x.detach().contiguous(), split)
        return pending.timed(self.context.flight.pace).then(lambda stack: join(stack, split))

    def _started_reduce_scatter(self, x: Tensor, split: Split) -> Pending[Tensor]:
        stack = cut(x.detach(), split, self.size)
        self._record("reduce_scatter", x.nbytes)
        return self._reduce_scatter(stack, split).timed(self.context.flight.pace)

    def _started_all_to_all(self, x: Tensor, source: Split, target: Split) -> Pending[Tensor]:
        stack = cut(x.detach(), target, self.size)
        _rest(stack[0], source, 1)
        self._record("all_to_all", x.nbytes)
        pending = self._all_to_all(stack, source, target)
        return pending.timed(self.context.flight.pace).then(lambda got: join(got, source))

    def send_rows(
        self, rows: Tensor, n_sent: Sequence[int], n_received: Sequence[int], size_bytes: int
    ) -> Pending[Tensor]:
        """Begin to send `n_sent[r]` rows to every rank r; the rows received are in rank order.

        `rows` are in the order of their target ranks. Counts may differ among ranks, and every
        rank must know how many rows it receives from every other. The call is recorded with
        `size_bytes`: rows that come back are counted by the rank that sent them.
        """
        self._record("all_to_all", size_bytes)
        pending = self._all_to_all_rows(rows.detach().contiguous(), n_sent, n_received)
        return pending.timed(self.context.flight.pace)

    def shift(self, x: Tensor) -> Pending[Tensor]:
        """Send `x` to the next rank of the ring; the pending result is what the rank before sent.

        The last rank sends to the first. All ranks' tensors have one shape.
        """
        self._record("send_recv", x.nbytes)
        return self._shift(x.detach().contiguous()).timed(self.context.flight.pace)

    def slice(self, x: Tensor, split: Split) -> Tensor:
        """This rank's piece of `x` along `split`; no communication."""
        x = permute_to_cut(x, split)
        dim, rest = split.dim, _rest(x, split, self.size)
        out = torch.empty(_replaced(x, dim, split.outer * rest), dtype=x.dtype, device=x.device)
        parts = x.detach().unflatten(dim, (split.outer, self.size, rest))
        out.unflatten(dim, (split.outer, rest)).copy_(parts.select(dim + 1, self.rank))
        return out

    def zero_pad(self, x: Tensor, split: Split) -> Tensor:
        """`x` as this rank's piece along `split`, with zeros elsewhere; no communication."""
        dim, rest = split.dim, _rest(x, split, 1)
        out = torch.zeros(
            _replaced(x, dim, split.outer * rest * self.size), dtype=x.dtype, device=x.device
        )
        parts = out.unflatten(dim, (split.outer, self.size, rest))
        parts.select(dim + 1, self.rank).copy_(x.detach().unflatten(dim, (split.outer, rest)))
        return permute_back(out, split)

    def keep_first(self, x: Tensor) -> Tensor:
        """`x` on the group's first rank, zeros on the others; no communication."""
        if self.rank == 0:
            return x.detach().clone(memory_format=torch.contiguous_format)
        return torch.zeros(x.shape, dtype=x.dtype, device=x.device)

    def _record(self, kind: PrimitiveKind, size_bytes: int) -> None:
        self.context.record(CollectiveCall(kind, self.axes, size_bytes, self.context.phase))

    # The backend's part. It gets the splits to check that all members make the same call.

    @abstractmethod
    def _all_reduce(self, x: Tensor, op: ReduceOp, owns: bool) -> Pending[Tensor]:
        """Reduce `x`, which may be strided, to a contiguous tensor; with `owns` it may be `x`."""

    @abstractmethod
    def _all_gather(self, x: Tensor, split: Split) -> Pending[Tensor]:
        """[*shape] -> [n, *shape]."""

    @abstractmethod
    def _reduce_scatter(self, stack: Tensor, split: Split) -> Pending[Tensor]:
        """[n, *piece] -> this rank's [*piece], summed."""

    @abstractmethod
    def _all_to_all(self, stack: Tensor, source: Split, target: Split) -> Pending[Tensor]:
        """[n, *piece], one to each rank -> [n, *piece], one from each rank."""

    @abstractmethod
    def _all_to_all_rows(
        self, rows: Tensor, n_sent: Sequence[int], n_received: Sequence[int]
    ) -> Pending[Tensor]:
        """[sum(n_sent), *row] -> [sum(n_received), *row]; both in rank order."""

    @abstractmethod
    def _shift(self, x: Tensor) -> Pending[Tensor]:
        """[*shape] -> [*shape], from the rank before."""
