"""Point-to-point messages between ranks of different stages, posted without blocking.

A rank posts a batch of sends and receives (`Messenger.post`) and goes on. The handle
(`Posted`) waits for either side later. Messages from one rank to another match in the order of
their posts. Tensors without elements are not sent: both ends know them already.

Backends order messages differently, and a schedule must be correct under both:

    gloo   messages are independent: a send is over once its receive was posted
    NCCL   a rank's batches run in order in a communicator's stream: a batch begins when every
           message of the previous batch has met its other end. Here each edge has its own
           communicator, which waits less; programs are proved for one that all share

Thread ranks can do either (`runtime/launch/thread_messages.py`), so a test on CPU catches a
schedule that would hang on GPUs. Every send is recorded with its tensor's bytes, in phase "p2p"
unless the caller names another phase.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.errors import VerificationError
from autopar.runtime.groups import CollectiveCall, RankContext, current_context

Send = tuple[Tensor, int]  # a contiguous tensor, the target rank
Receive = tuple[tuple[int, ...], torch.dtype, int]  # shape, dtype, source rank

PIPELINE_AXIS = "pp"
P2P_PHASE = "p2p"


class Posted(ABC):
    """One batch of messages. It keeps the sent tensors alive until they are known to be sent."""

    @abstractmethod
    def wait_received(self, start: int = 0, end: int | None = None) -> list[Tensor]:
        """The tensors of the batch's receives from `start` to `end`; blocks until these arrived.

        The batch may wait long for its sends, so it drops its references to these tensors, and
        never gives one twice.
        """

    @abstractmethod
    def is_sent(self) -> bool:
        """Whether all sends are known to be over; never blocks."""

    @abstractmethod
    def wait_sent(self) -> None:
        """Block until the sent tensors may be overwritten.

        By then the receive of every send was posted.
        """


class Messenger(ABC):
    """Posts the messages of one rank of the world."""

    def __init__(self, rank: int, n_ranks: int, context: RankContext | None = None) -> None:
        self.rank = rank
        self.n_ranks = n_ranks
        self.context = context or current_context()
        # Why a step failed half-way, if one did: its messages may be left over.
        self.failed: str | None = None

    def post(
        self, sends: Sequence[Send], receives: Sequence[Receive], phase: str = P2P_PHASE
    ) -> Posted:
        """Start all sends and receives, and return at once; sends are recorded in `phase`.

        Sent tensors must be contiguous, and must not change until they are sent.

        Raises `VerificationError` for a peer that is this rank or not in the world.
        """
        for peer in [peer for _, peer in sends] + [peer for _, _, peer in receives]:
            self._check_peer(peer)
        outgoing = [(x.detach(), peer) for x, peer in sends if x.numel()]
        for x, peer in outgoing:
            assert x.is_contiguous(), f"{tuple(x.shape)} to rank {peer} has strides {x.stride()}"
            self.context.record(CollectiveCall("send", (PIPELINE_AXIS,), x.nbytes, phase))
        return self._post(outgoing, receives)

    def _check_peer(self, peer: int) -> None:
        if not 0 <= peer < self.n_ranks or peer == self.rank:
            raise VerificationError(
                f"rank {self.rank} of {self.n_ranks} has a message to or from rank {peer}",
                hint="stages must have ranks of their own, all of them running",
            )

    @abstractmethod
    def _post(self, sends: Sequence[Send], receives: Sequence[Receive]) -> Posted:
        """`post` after its checks: every send has elements; a receive may have none."""


class DistMessenger(Messenger):
    """Messages over `torch.distributed`; tensors live on `device`.

    edges    (sender, receiver) -> their process group (`make_edges`); messages between other ranks
             take the default group

    Every rank of the world must make one at the same point, with the same edges: NCCL requires that
    all ranks of a group take part in its first call.
    """

    def __init__(
        self, device: torch.device, edges: Mapping[tuple[int, int], dist.ProcessGroup] | None = None
    ) -> None:
        super().__init__(dist.get_rank(), dist.get_world_size())
        self.device, self.edges = device, dict(edges or {})
        if device.type != "cpu":  # ranks meet in the order of edges, so they cannot wait in a cycle
            dist.all_reduce(torch.zeros(1, device=device))
            for edge in self.edges:
                if self.rank in edge:
                    dist.all_reduce(torch.zeros(1, device=device), group=self.edges[edge])

    def _post(self, sends: Sequence[Send], receives: Sequence[Receive]) -> Posted:
        sent = [x for x, _ in sends]
        received = [torch.empty(shape, dtype=dt, device=self.device) for shape, dt, _ in receives]
        out: dict[dist.ProcessGroup | None, list[dist.P2POp]] = {}
        for x, peer in sends:
            group = self.edges.get((self.rank, peer))
            out.setdefault(group, []).append(dist.P2POp(dist.isend, x, peer, group))
        into: dict[dist.ProcessGroup | None, list[dist.P2POp]] = {}
        places: dict[dist.ProcessGroup | None, list[int]] = {}
        for at, (x, (_, _, peer)) in enumerate(zip(received, receives, strict=True)):
            if x.numel():
                group = self.edges.get((peer, self.rank))
                into.setdefault(group, []).append(dist.P2POp(dist.irecv, x, peer, group))
                places.setdefault(group, []).append(at)
        sent_works: list[dist.Work] = []
        received_works: list[dist.Work | None] = [None] * len(received)
        for group in dict.fromkeys([*out, *into]):
            first, last = out.get(group, []), into.get(group, [])
            works = dist.batch_isend_irecv(first + last)
            # NCCL has one work for all messages of a group.
            is_joint = len(works) < len(first) + len(last)
            sent_works += (works if is_joint else works[: len(first)]) if first else []
            arriving = works * len(last) if is_joint else works[len(first) :]
            for at, work in zip(places.get(group, ()), arriving, strict=True):
                received_works[at] = work
        return _DistPosted(sent, sent_works, received, received_works)


class _DistPosted(Posted):
    def __init__(
        self,
        sent: list[Tensor],
        sent_works: list[dist.Work],
        received: list[Tensor],
        received_works: list[dist.Work | None],
    ) -> None:
        self._sent, self._sent_works = sent, sent_works
        self._received: list[Tensor | None] = [*received]
        self._received_works = received_works

    def wait_received(self, start: int = 0, end: int | None = None) -> list[Tensor]:
        of = slice(start, end)
        for work in self._received_works[of]:
            if work is not None:
                work.wait()
        received = [x for x in self._received[of] if x is not None]
        self._received[of] = [None] * len(self._received[of])
        self._received_works[of] = [None] * len(self._received_works[of])
        return received

    def is_sent(self) -> bool:
        # A gloo work reports completion only after a wait; an NCCL work does at any time.
        if all(work.is_completed() for work in self._sent_works):
            self._let_go()
        return not self._sent_works

    def wait_sent(self) -> None:
        for work in self._sent_works:
            work.wait()
        self._let_go()

    def _let_go(self) -> None:
        self._sent, self._sent_works = [], []
