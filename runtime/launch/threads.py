"""Ranks as threads of one process: the same `Group` interface without a launcher.

On the CPU, backward runs in the calling thread, so generated programs run unmodified on thread
ranks. That makes this the in-process oracle for everything that needs several ranks.

Ranks take turns (`_Scheduler`): one runs until it must wait for a collective or a message, then
the next. So runs are repeatable, no lock is held, and a switch costs microseconds, whereas
free-running threads would fight for the interpreter. At a `_Rendezvous` the members leave their
tensors. The last to arrive computes every member's result, summing in rank order, so results
are bit-equal on all ranks and in every run.

Errors are immediate: members whose calls differ, and waits that can never end. When a rank fails,
all others are released. Messages are in `thread_messages.py`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.errors import MeshError, VerificationError
from autopar.mesh import LogicalMesh
from autopar.placement import Split
from autopar.runtime.collectives import Messenger
from autopar.runtime.groups import (
    WORLD_AXIS,
    Group,
    Pending,
    RankContext,
    ReduceOp,
    axis_subsets,
    set_thread_context,
)
from autopar.runtime.launch.thread_messages import Mailboxes, ThreadMessenger, Waits

# The caller checks for failures at this interval, and gives each rank this long to unwind.
_POLL_S = 1.0


class _Released(BaseException):
    """Unwinds a rank after another one failed; never reaches the user."""


@dataclass(frozen=True)
class _Call:
    """What the members of a group must agree on; `detail` is the reduction or the splits."""

    kind: str
    label: str
    detail: ReduceOp | tuple[Split, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        if isinstance(self.detail, tuple):
            detail = " -> ".join(f"dim {s.dim} outer {s.outer}" for s in self.detail)
        else:
            detail = self.detail
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.kind}({dtype} {list(self.shape)}, {detail}) over {self.label}"


class _Scheduler:
    """Runs one rank at a time; a rank that must wait passes the turn on.

    Only the rank with the turn touches the shared state, so there is no lock. After a failure every
    rank is woken at once, and unwinds at its next collective.
    """

    def __init__(self, n_ranks: int, timeout_s: float) -> None:
        self.n_ranks = n_ranks
        self.timeout_s = timeout_s
        self.running = 0
        self.ready = deque(range(1, n_ranks))
        self.waiting: dict[int, Waits] = {}
        self.n_returned = 0
        self.failure: tuple[int, BaseException] | None = None
        self.rendezvous: dict[tuple[int, ...], _Rendezvous] = {}
        self.mail = Mailboxes(self)
        # Releasing a rank's signal gives it the turn.
        self.signals = [threading.Lock() for _ in range(n_ranks)]
        for signal in self.signals:
            signal.acquire()

    def meeting(self, ranks: tuple[int, ...]) -> _Rendezvous:
        if ranks not in self.rendezvous:
            self.rendezvous[ranks] = _Rendezvous(self, ranks)
        return self.rendezvous[ranks]

    def check(self) -> None:
        """Unwind the calling rank if another one failed."""
        if self.failure is not None:
            raise _Released

    def wait(self, rank: int, reason: Waits) -> None:
        """Pass the turn on until another rank calls `wake(rank)`."""
        self.waiting[rank] = reason
        self.hand_on()
        self.await_turn(rank)

    def wake(self, rank: int) -> None:
        del self.waiting[rank]
        self.ready.append(rank)

    def await_turn(self, rank: int) -> None:
        if not self.signals[rank].acquire(timeout=self.timeout_s):
            raise VerificationError(
                f"rank {rank} waited {self.timeout_s:g} s for rank {self.running}, "
                "which neither returned nor called a collective",
                hint="raise timeout_s, or let the ranks wait for each other in collectives only",
            )
        self.check()
        self.running = rank

    def hand_on(self) -> None:
        """Pass the turn to the next rank; raises if all remaining ranks wait."""
        if self.ready:
            self.signals[self.ready.popleft()].release()
        elif self.waiting:
            raise self._deadlock()

    def leave(self, rank: int) -> None:
        """Called when a rank returned or failed."""
        self.n_returned += 1
        if self.failure is None:
            try:
                self.hand_on()
            except VerificationError as error:
                self.fail(next(iter(self.waiting)), error)

    def fail(self, rank: int, error: BaseException) -> None:
        """Keep the first failure, and wake every rank so that it unwinds."""
        if self.failure is None:
            self.failure = (rank, error)
        for signal in self.signals:
            # RuntimeError: the rank was given the turn already and has not taken it yet.
            with suppress(RuntimeError):
                signal.release()

    def _deadlock(self) -> VerificationError:
        calls = [f"rank {r} in {m.describe()}" for r, m in sorted(self.waiting.items())]
        if self.n_returned:
            calls.append(f"{self.n_returned} of {self.n_ranks} ranks have returned")
        return VerificationError(
            "ranks wait for each other for ever: " + "; ".join(calls),
            hint="all ranks of a group must call its collectives in the same order, and every "
            "message needs both its ends",
        )


class _Rendezvous:
    """The meeting point of one set of ranks, reused for every collective they run."""

    def __init__(self, scheduler: _Scheduler, ranks: tuple[int, ...]) -> None:
        self.scheduler = scheduler
        self.ranks = ranks
        self.inputs: dict[int, Tensor] = {}
        self.outputs: dict[int, Tensor] = {}
        self.call: _Call | None = None

    def describe(self) -> str:
        missing = [r for r in self.ranks if r not in self.inputs]
        return f"{self.call} of ranks {list(self.ranks)}, without {missing}"

    def meet(
        self, rank: int, call: _Call, x: Tensor, compute: Callable[[list[Tensor]], list[Tensor]]
    ) -> Tensor:
        """Leave `x`; returns this rank's item of `compute(all inputs in rank order)`."""
        scheduler = self.scheduler
        scheduler.check()
        self._check_in(rank, call, x)
        if len(self.inputs) == len(self.ranks):
            outputs = compute([self.inputs[r] for r in self.ranks])
            self.outputs.update(zip(self.ranks, outputs, strict=True))
            self.inputs.clear()
            for other in self.ranks:
                if other != rank:
                    scheduler.wake(other)
        else:
            scheduler.wait(rank, self)
        return self.outputs.pop(rank)

    def _check_in(self, rank: int, call: _Call, x: Tensor) -> None:
        if not self.inputs:
            self.call = call
        elif call != self.call:
            first = next(iter(self.inputs))
            raise VerificationError(
                f"ranks of one group call different collectives: rank {first} calls "
                f"{self.call}, rank {rank} calls {call}",
                hint="all ranks of a group must call its collectives in the same order",
            )
        self.inputs[rank] = x


class ThreadGroup(Group):
    """A group whose members are threads of this process."""

    def __init__(
        self,
        world: ThreadWorld,
        ranks: Sequence[int],
        axes: Sequence[str],
        meeting: _Rendezvous,
    ) -> None:
        super().__init__(ranks, tuple(ranks).index(world.rank), axes, world.context)
        self._world_rank = world.rank
        self._meeting = meeting

    def _meet(
        self,
        kind: str,
        detail: ReduceOp | tuple[Split, ...],
        x: Tensor,
        compute: Callable[[list[Tensor]], list[Tensor]],
    ) -> Tensor:
        call = _Call(kind, self.label, detail, tuple(x.shape), x.dtype)
        return self._meeting.meet(self._world_rank, call, x, compute)

    def _met(self, *call: Any) -> Pending[Tensor]:
        """Threads meet at once: nothing is under way."""
        return Pending(self._meet(*call))

    def _all_reduce(self, x: Tensor, op: ReduceOp, owns: bool) -> Pending[Tensor]:
        return self._met("all_reduce", op, x, lambda xs: _copies(_reduced(xs, op), len(xs)))

    def _all_gather(self, x: Tensor, split: Split) -> Pending[Tensor]:
        return self._met("all_gather", (split,), x, lambda xs: _copies(torch.stack(xs), len(xs)))

    def _reduce_scatter(self, stack: Tensor, split: Split) -> Pending[Tensor]:
        def compute(stacks: list[Tensor]) -> list[Tensor]:
            return [_reduced([s[i] for s in stacks], "sum") for i in range(len(stacks))]

        return self._met("reduce_scatter", (split,), stack, compute)

    def _all_to_all(self, stack: Tensor, source: Split, target: Split) -> Pending[Tensor]:
        def compute(stacks: list[Tensor]) -> list[Tensor]:
            return [torch.stack([s[i] for s in stacks]) for i in range(len(stacks))]

        return self._met("all_to_all", (source, target), stack, compute)

    def _shift(self, x: Tensor) -> Pending[Tensor]:
        return self._met("send_recv", (), x, lambda xs: [xs[i - 1].clone() for i in range(len(xs))])

    def _all_to_all_rows(
        self, rows: Tensor, n_sent: Sequence[int], n_received: Sequence[int]
    ) -> Pending[Tensor]:
        # Row counts may differ among members, so they exchange the counts first.
        along = (Split(0, 1),)
        sent = self._all_gather(torch.tensor(n_sent), *along).wait()
        if sent[:, self.rank].tolist() != list(n_received):
            raise VerificationError(
                f"rank {self.ranks[self.rank]} expects {list(n_received)} rows of ranks "
                f"{list(self.ranks)}, which send it {sent[:, self.rank].tolist()}",
                hint="exchange the numbers of rows before the rows",
            )

        def compute(all_rows: list[Tensor]) -> list[Tensor]:
            parts = [x.split(n.tolist()) for x, n in zip(all_rows, sent, strict=True)]
            return [torch.cat(column) for column in zip(*parts, strict=True)]

        call = _Call("all_to_all_rows", self.label, along, tuple(rows.shape[1:]), rows.dtype)
        return Pending(self._meeting.meet(self._world_rank, call, rows, compute))


def _reduced(xs: Sequence[Tensor], op: ReduceOp) -> Tensor:
    """The reduction in list order, in the tensors' own dtype."""
    total = xs[0].clone(memory_format=torch.contiguous_format)
    for x in xs[1:]:
        if op == "sum":
            total.add_(x)
        else:
            torch.maximum(total, x, out=total)
    return total


def _copies(x: Tensor, n: int) -> list[Tensor]:
    return [x, *(x.clone() for _ in range(n - 1))]


class ThreadWorld:
    """One thread rank: the counterpart of `torch.distributed` in a process."""

    def __init__(self, scheduler: _Scheduler, rank: int) -> None:
        self.rank = rank
        self.n_ranks = scheduler.n_ranks
        self.context = RankContext()
        self._scheduler = scheduler

    def make_groups(self, mesh: LogicalMesh) -> dict[tuple[int, ...], Group]:
        """This rank's groups of `mesh`, keyed by sorted axis indices; {} outside it."""
        if mesh.ranks[-1] >= self.n_ranks:
            raise MeshError(
                f"mesh {mesh.axes} uses ranks up to {mesh.ranks[-1]}, "
                f"but run_threads started {self.n_ranks}"
            )
        groups: dict[tuple[int, ...], Group] = {}
        for axes in axis_subsets(mesh):
            for ranks in mesh.groups(axes):
                if self.rank in ranks:
                    names = [mesh.names[i] for i in axes]
                    meeting = self._scheduler.meeting(ranks)
                    groups[axes] = ThreadGroup(self, ranks, names, meeting)
        return groups

    def world_group(self) -> Group:
        """The group of all ranks, over all stages; its axis is called "world"."""
        ranks = tuple(range(self.n_ranks))
        return ThreadGroup(self, ranks, (WORLD_AXIS,), self._scheduler.meeting(ranks))

    def messenger(self, rendezvous: bool = False) -> Messenger:
        """This rank's messenger. With `rendezvous` batches run one after another, as in NCCL."""
        return ThreadMessenger(
            self._scheduler.mail, self.rank, self.n_ranks, self.context, rendezvous
        )


def run_threads(
    fn: Callable[..., Any], n_ranks: int, *args: Any, timeout_s: float = 60.0
) -> list[Any]:
    """Run `fn(world, *args)` on `n_ranks` thread ranks; returns the results by rank.

    `timeout_s` bounds the wait in one collective, which includes the turns of all other ranks.
    Arguments are shared, not copied.

    Raises the first error of any rank, with a note that names the rank, and `VerificationError`
    for collectives and messages that do not match or can never complete.
    """
    scheduler = _Scheduler(n_ranks, timeout_s)
    results: list[Any] = [None] * n_ranks

    def work(rank: int) -> None:
        world = ThreadWorld(scheduler, rank)
        set_thread_context(world.context)
        try:
            scheduler.await_turn(rank)
            results[rank] = fn(world, *args)
        except _Released:
            pass
        except BaseException as error:  # noqa: BLE001 - raised again by the caller
            scheduler.fail(rank, error)
        finally:
            scheduler.leave(rank)

    # Daemons: a rank stuck in its own code after a failure must not block the exit.
    threads = [
        threading.Thread(target=work, args=(rank,), name=f"rank {rank}", daemon=True)
        for rank in range(n_ranks)
    ]
    for thread in threads:
        thread.start()
    scheduler.signals[0].release()
    try:
        for thread in threads:
            while thread.is_alive() and scheduler.failure is None:
                thread.join(timeout=_POLL_S)
    except BaseException as interrupt:  # Ctrl-C: let no rank wait for ever
        scheduler.fail(-1, interrupt)
        raise
    if scheduler.failure is not None:
        for thread in threads:
            thread.join(timeout=_POLL_S)
        rank, error = scheduler.failure
        error.add_note(f"raised on rank {rank} of {n_ranks}")
        raise error
    if unmet := scheduler.mail.unmet():
        raise VerificationError(
            "messages never met their other end: " + "; ".join(unmet),
            hint="every send needs a receive on the other rank",
        )
    return results
