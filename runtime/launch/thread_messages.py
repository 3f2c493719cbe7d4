"""Messages between thread ranks, ordered as gloo or NCCL would (`runtime/collectives/p2p.py`).

Both ends of a message meet in a mailbox per (source, target), in the order of their posts. The
second end to arrive compares shapes and dtypes, and copies the tensor. The sender may not change
the tensor before that: autograd's version counter detects it, where gloo would send either value.

With `rendezvous`, a rank's batches form a queue, like the stream of an NCCL communicator. Only
the first batch is at the mailboxes; the next follows when all of its messages have matched. A
wait for either side of a batch is then a wait for both.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor

from autopar.errors import VerificationError
from autopar.runtime.collectives import Messenger, Posted, Receive, Send
from autopar.runtime.groups import RankContext


class Waits(Protocol):
    """What a rank waits for, described in the report of a deadlock."""

    def describe(self) -> str: ...


class Turns(Protocol):
    """The part of the ranks' scheduler that messages need."""

    waiting: dict[int, Waits]

    def check(self) -> None:
        """Unwind the calling rank if another one failed."""

    def wait(self, rank: int, reason: Waits) -> None:
        """Pass the turn on until `wake(rank)`; raises if all ranks wait."""

    def wake(self, rank: int) -> None: ...


@dataclass(eq=False)
class _End:
    """One end of a message. `value` is the sender's tensor for a send, the copy for a receive."""

    kind: Literal["send", "receive"]
    peer: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    batch: _PostedBatch
    value: Tensor | None = None
    version: int = 0
    is_done: bool = False

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        way = "to" if self.kind == "send" else "from"
        return f"{self.kind}({dtype} {list(self.shape)}) {way} rank {self.peer}"


@dataclass(eq=False)
class _PostedBatch(Posted):
    """The messages of one post."""

    messenger: ThreadMessenger
    sends: list[_End] = field(default_factory=list)
    receives: list[_End] = field(default_factory=list)

    @property
    def ends(self) -> list[_End]:
        return [*self.sends, *self.receives]

    @property
    def is_over(self) -> bool:
        return all(end.is_done for end in self.ends)

    def wait_received(self, start: int = 0, end: int | None = None) -> list[Tensor]:
        of = self.receives[start:end]
        self._wait(of)
        values = [receive.value for receive in of]
        for receive in of:
            receive.value = None
        return [value for value in values if value is not None]

    def is_sent(self) -> bool:
        return _Wait(self, self._ends_to_wait_for(self.sends)).is_over

    def wait_sent(self) -> None:
        self._wait(self.sends)

    def _ends_to_wait_for(self, ends: list[_End]) -> list[_End]:
        return self.ends if self.messenger.rendezvous else ends

    def _wait(self, ends: list[_End]) -> None:
        self.messenger.turns.check()
        wait = _Wait(self, self._ends_to_wait_for(ends))
        if not wait.is_over:
            self.messenger.turns.wait(self.messenger.rank, wait)


@dataclass(frozen=True, eq=False)
class _Wait:
    """A rank's wait for some messages of a batch."""

    batch: _PostedBatch
    ends: list[_End]

    @property
    def is_over(self) -> bool:
        return all(end.is_done for end in self.ends)

    def describe(self) -> str:
        text = str(next(end for end in self.ends if not end.is_done))
        queue = self.batch.messenger.queue
        if not queue or self.batch is queue[0]:
            return text
        ahead = next(end for end in queue[0].ends if not end.is_done)
        return f"{text}, queued behind {ahead}"


class Mailboxes:
    """A world's messages that have not met their other end, by (source, target)."""

    def __init__(self, turns: Turns) -> None:
        self.turns = turns
        self._waiting: dict[tuple[int, int], deque[_End]] = {}

    def bring(self, batch: _PostedBatch) -> None:
        """Take in the ends of `batch`, and of every batch that can begin as a result."""
        batches = deque([batch])
        while batches:
            batch = batches.popleft()
            for end in batch.ends:
                other = None if end.is_done else self._match(end)
                if other is not None:
                    batches += other.batch.messenger.next_batches()
                    self._wake(other.batch.messenger.rank)
            batches += batch.messenger.next_batches()
            self._wake(batch.messenger.rank)

    def unmet(self) -> list[str]:
        """Descriptions of all messages that have only one end."""
        return [
            f"rank {end.batch.messenger.rank} in {end}"
            for _, ends in sorted(self._waiting.items())
            for end in ends
        ]

    def _match(self, end: _End) -> _End | None:
        """Complete `end` with the first opposite end in its mailbox, or leave it there."""
        rank = end.batch.messenger.rank
        path = (rank, end.peer) if end.kind == "send" else (end.peer, rank)
        box = self._waiting.setdefault(path, deque())
        if not box or box[0].kind == end.kind:
            box.append(end)
            return None
        other = box.popleft()
        send, receive = (end, other) if end.kind == "send" else (other, end)
        _check_ends(send, receive)
        assert send.value is not None
        receive.value, send.value = send.value.clone(), None
        send.is_done = receive.is_done = True
        return other

    def _wake(self, rank: int) -> None:
        wait = self.turns.waiting.get(rank)
        if isinstance(wait, _Wait) and wait.is_over:
            self.turns.wake(rank)


def _check_ends(send: _End, receive: _End) -> None:
    ends = f"rank {receive.peer} in {send}, rank {send.peer} in {receive}"
    if (send.shape, send.dtype) != (receive.shape, receive.dtype):
        raise VerificationError(
            f"the ends of a message differ: {ends}",
            hint="messages from one rank to another are matched in the order of their posts",
        )
    assert send.value is not None
    if send.value._version != send.version:
        raise VerificationError(
            f"a tensor was changed in place before it was sent: {ends}",
            hint="call wait_sent() first, or send a copy",
        )


class ThreadMessenger(Messenger):
    """The messages of one thread rank; the module explains `rendezvous`."""

    def __init__(
        self, mail: Mailboxes, rank: int, n_ranks: int, context: RankContext, rendezvous: bool
    ) -> None:
        super().__init__(rank, n_ranks, context)
        self.turns = mail.turns
        self.queue: deque[_PostedBatch] = deque()
        self._mail = mail
        self.rendezvous = rendezvous

    def _post(self, sends: Sequence[Send], receives: Sequence[Receive]) -> Posted:
        self.turns.check()
        batch = _PostedBatch(self)
        batch.sends = [
            _End("send", peer, tuple(x.shape), x.dtype, batch, x, x._version) for x, peer in sends
        ]
        for shape, dtype, peer in receives:
            end = _End("receive", peer, tuple(shape), dtype, batch)
            if 0 in end.shape:
                end.value, end.is_done = torch.empty(end.shape, dtype=dtype), True
            batch.receives.append(end)
        if self.rendezvous:
            self.queue.append(batch)
            if self.queue[0] is not batch:
                return batch
        self._mail.bring(batch)
        return batch

    def next_batches(self) -> list[_PostedBatch]:
        """The batch that begins because the first of the queue is over, if any."""
        if not self.queue or not self.queue[0].is_over:
            return []
        self.queue.popleft()
        return [self.queue[0]] if self.queue else []
