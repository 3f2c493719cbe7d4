"""Messages between ranks of different stages, posted without blocking.

A rank posts a batch of sends and receives (`Messenger.post`) and goes on; the handle
(`Posted`) waits for either side later. Messages from one rank to another are matched in the
order of their posts. Tensors without elements are not sent, as both ends know them.

What a carrier may assume differs, and a schedule must be right under both:

    gloo   messages are independent: a send is over once its receive was posted
    NCCL   the batches of one rank follow one another in its communicator's stream: one
           begins when all messages of the one before have met their other end

Thread ranks do either (`thread_messages.py`), so a schedule that would hang on GPUs is an
error in a test. Every send is recorded with the bytes of its tensor, in phase "p2p" unless it
belongs to another.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.errors import VerificationError
from autopar.runtime.groups import CollectiveCall, RankContext, current_context

# A contiguous tensor and the rank that gets it; a shape, a dtype and the rank it comes from.
Send = tuple[Tensor, int]
Receive = tuple[tuple[int, ...], torch.dtype, int]

PIPELINE_AXIS = "pp"
P2P_PHASE = "p2p"


class Posted(ABC):
    """One batch of messages. It keeps the sent tensors alive until they are known to be sent."""

    @abstractmethod
    def wait_received(self) -> list[Tensor]:
        """The received tensors, in order of the batch's receives; blocks until all are there.

        They are handed over: the batch, which may wait long for its sends, keeps none.
        """

    @abstractmethod
    def is_sent(self) -> bool:
        """Whether all sends are known to be over; never blocks."""

    @abstractmethod
    def wait_sent(self) -> None:
        """Block until the sent tensors may be overwritten: each receive was posted, too."""


class Messenger(ABC):
    """Posts the messages of one rank of the world."""

    def __init__(self, rank: int, n_ranks: int, context: RankContext | None = None) -> None:
        self.rank = rank
        self.n_ranks = n_ranks
        self.context = context or current_context()

    def post(
        self, sends: Sequence[Send], receives: Sequence[Receive], phase: str = P2P_PHASE
    ) -> Posted:
        """Begin all of them, and return at once; sends are recorded in `phase`.

        Sent tensors must be contiguous, and stay unchanged until they are sent. Raises
        `VerificationError` for a rank that is not another one of the world.
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
        """`post` of checked sends that have elements; receives may have none."""


class DistMessenger(Messenger):
    """Messages over the default group of `torch.distributed`; tensors live on `device`.

    Every rank of the world must make one at the same point: NCCL asks that all ranks of a
    group take part in its first call.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(dist.get_rank(), dist.get_world_size())
        self.device = device
        if device.type != "cpu":
            dist.all_reduce(torch.zeros(1, device=device))

    def _post(self, sends: Sequence[Send], receives: Sequence[Receive]) -> Posted:
        sent = [x for x, _ in sends]
        received = [torch.empty(shape, dtype=dt, device=self.device) for shape, dt, _ in receives]
        operations = [dist.P2POp(dist.isend, x, peer) for x, peer in sends]
        operations += [
            dist.P2POp(dist.irecv, x, peer)
            for x, (_, _, peer) in zip(received, receives, strict=True)
            if x.numel()
        ]
        works = dist.batch_isend_irecv(operations) if operations else []
        if len(works) == len(operations):
            return _DistPosted(sent, works[: len(sent)], received, works[len(sent) :])
        return _DistPosted(sent, works, received, works)  # NCCL: one for the whole batch


class _DistPosted(Posted):
    def __init__(
        self,
        sent: list[Tensor],
        sent_works: list[dist.Work],
        received: list[Tensor],
        received_works: list[dist.Work],
    ) -> None:
        self._sent, self._sent_works = sent, sent_works
        self._received, self._received_works = received, received_works

    def wait_received(self) -> list[Tensor]:
        for work in self._received_works:
            work.wait()
        received, self._received, self._received_works = self._received, [], []
        return received

    def is_sent(self) -> bool:
        # gloo's work says so only after it was waited for, and NCCL's at any time.
        if all(work.is_completed() for work in self._sent_works):
            self._let_go()
        return not self._sent_works

    def wait_sent(self) -> None:
        for work in self._sent_works:
            work.wait()
        self._let_go()

    def _let_go(self) -> None:
        self._sent, self._sent_works = [], []
