"""Messages between ranks match in order and never block a post, on threads and on gloo.

With `rendezvous`, thread ranks wait as on NCCL: batches of one rank follow one another.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from autopar.errors import MeshError, VerificationError
from autopar.runtime.collectives import DistMessenger, Messenger, Receive
from autopar.runtime.groups import CollectiveCall, Recorder, make_edges, world_group
from autopar.runtime.launch import ThreadWorld, run_threads
from tests.helpers.pools import Pool

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool)
N_LARGE = 2**21  # float32 elements: 8 MiB, more than any socket buffers


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def incoming(x: Tensor, source: int) -> Receive:
    return tuple(x.shape), x.dtype, source


def of_dtypes(offset: int) -> list[Tensor]:
    """One tensor of each dtype, of different shapes; values differ between ranks."""
    return [(torch.arange(2 * i + 1) % 2 + offset).to(t) for i, t in enumerate(DTYPES)]


def exchange(messenger: Messenger) -> list[Tensor]:
    """Send and receive in one batch: every dtype, a scalar, and a tensor without elements."""
    mine, peer = messenger.rank, 1 - messenger.rank
    sent = [*of_dtypes(mine), torch.tensor(float(mine)), torch.empty(3, 0)]
    posted = messenger.post([(x, peer) for x in sent], [incoming(x, peer) for x in sent])
    received = posted.wait_received()
    assert posted.wait_received() == []
    posted.wait_sent()
    assert posted.is_sent()
    return received


def skip_connections(messenger: Messenger) -> list[Tensor]:
    """Rank 0 posts all sends first; rank 1 receives them in several batches, out of order."""
    if messenger.rank == 0:
        posts = [messenger.post([(x, 1)], []) for x in of_dtypes(0)]
        for posted in posts:
            posted.wait_sent()
        return []
    first = messenger.post([], [incoming(x, 0) for x in of_dtypes(0)[:2]])
    rest = [messenger.post([], [incoming(x, 0)]) for x in of_dtypes(0)[2:]]
    later = [x for posted in reversed(rest) for x in reversed(posted.wait_received())]
    return [*first.wait_received(), *reversed(later)]


def large_both_ways(messenger: Messenger) -> float:
    """This would hang if a post waited for its sends."""
    mine, peer = messenger.rank, 1 - messenger.rank
    x = torch.full((N_LARGE,), float(mine + 1))
    sent = messenger.post([(x, peer)], [])
    (received,) = messenger.post([], [incoming(x, peer)]).wait_received()
    sent.wait_sent()
    return received.double().mean().item()


def in_parts(messenger: Messenger) -> list[float]:
    """The second receive of a batch is sent only after the first was taken."""
    scalar = vector(0.0)
    if messenger.rank == 0:
        posted = messenger.post([(vector(1.0), 1)], [])
        (answer,) = messenger.post([], [incoming(scalar, 1)]).wait_received()
        messenger.post([(answer + 1, 1)], []).wait_sent()
        posted.wait_sent()
        return []
    posted = messenger.post([], [incoming(scalar, 0), incoming(scalar, 0)])
    (first,) = posted.wait_received(0, 1)
    messenger.post([(first + 1, 0)], []).wait_sent()
    (second,) = posted.wait_received()
    assert posted.wait_received() == []
    return [first.item(), second.item()]


def run_on_threads(job: Callable[[Messenger], object], rendezvous: bool) -> list[object]:
    return run_threads(lambda world: job(world.messenger(rendezvous)), 2)


def on_process(job: Callable[[Messenger], object]) -> object:
    return job(DistMessenger(torch.device("cpu")))


def by_edges(job: Callable[[Messenger], object]) -> object:
    """As on GPUs: a process group per directed edge."""
    return job(DistMessenger(torch.device("cpu"), make_edges([(0, 1), (1, 0)])))


Run = Callable[[Callable[[Messenger], object]], list[object]]


@pytest.fixture(params=["threads", "threads as nccl", "processes", "processes by edges"])
def run_pair(request: pytest.FixtureRequest) -> Run:
    """Runs a job on two ranks; the results by rank."""
    if request.param.startswith("processes"):
        pool = request.getfixturevalue("workers")(2)
        on_rank = on_process if request.param == "processes" else by_edges
        return lambda job: list(pool.run(on_rank, job))
    return lambda job: run_on_threads(job, request.param == "threads as nccl")


def assert_equal(found: object, wanted: list[Tensor]) -> None:
    assert isinstance(found, list)
    for x, y in zip(found, wanted, strict=True):
        assert torch.equal(x, y)
        assert x.dtype == y.dtype
        assert x.shape == y.shape


def test_both_directions_at_once(run_pair: Run) -> None:
    for rank, received in enumerate(run_pair(exchange)):
        peer = 1 - rank
        wanted = [*of_dtypes(peer), torch.tensor(float(peer)), torch.empty(3, 0)]
        assert_equal(received, wanted)


def test_skip_connections_of_several_dtypes(run_pair: Run) -> None:
    assert_equal(run_pair(skip_connections)[1], of_dtypes(0))


def test_a_receive_is_taken_before_others_of_its_batch(workers: Pool) -> None:
    assert run_on_threads(in_parts, False)[1] == [1.0, 3.0]
    for on_rank in (on_process, by_edges):
        assert workers(2).run(on_rank, in_parts)[1] == [1.0, 3.0]


def test_large_tensors_cross_without_blocking(workers: Pool) -> None:
    assert run_on_threads(large_both_ways, False) == [2.0, 1.0]
    assert workers(2).run(on_process, large_both_ways) == [2.0, 1.0]


def total_of_ranks() -> tuple[str, float]:
    g = world_group()
    return g.label, g.all_reduce(torch.tensor(float(g.rank + 1))).item()


def test_the_world_is_a_group(workers: Pool) -> None:
    """This holds even if jobs of other numbers of ranks run on the same workers."""

    def work(world: ThreadWorld) -> tuple[str, float]:
        g = world.world_group()
        return g.label, g.all_reduce(torch.tensor(float(g.rank + 1))).item()

    for n_ranks, total in ((4, 10.0), (2, 3.0), (3, 6.0), (2, 3.0)):
        assert workers(n_ranks).run(total_of_ranks) == [("world", total)] * n_ranks
    assert run_threads(work, 2) == [("world", 3.0)] * 2
    with pytest.raises(MeshError, match=r"a group of all ranks needs torch\.distributed"):
        world_group()


def test_messages_are_matched_in_order_of_their_posts_per_pair() -> None:
    def work(world: ThreadWorld) -> list[float]:
        messenger = world.messenger()
        if world.rank != 2:
            for i in range(3):
                messenger.post([(vector(10 * world.rank + i), 2)], [])
            return []
        scalar = ((1,), torch.float32)
        posts = [messenger.post([], [(*scalar, 1), (*scalar, 0)]) for _ in range(3)]
        return [x.item() for posted in reversed(posts) for x in posted.wait_received()]

    assert run_threads(work, 3)[2] == [12.0, 2.0, 11.0, 1.0, 10.0, 0.0]


def test_a_post_returns_before_its_messages_are_over() -> None:
    def work(world: ThreadWorld) -> tuple[bool, bool]:
        messenger, g = world.messenger(), world.world_group()
        if world.rank == 0:
            posted = messenger.post([(vector(1.0), 1)], [])
            before = posted.is_sent()
            g.all_reduce(vector(0.0))
            return before, posted.is_sent()
        receives = [incoming(vector(1.0), 0)]
        g.all_reduce(vector(float(len(messenger.post([], receives).wait_received()))))
        return True, True

    assert run_threads(work, 2)[0] == (False, True)


def test_sends_are_recorded_with_their_bytes() -> None:
    def work(world: ThreadWorld) -> list[CollectiveCall]:
        with Recorder() as recorder:
            exchange(world.messenger())
        return recorder.calls

    sizes = [x.nbytes for x in (*of_dtypes(0), vector(0.0)[0])]
    wanted = [CollectiveCall("send", ("pp",), size, "p2p") for size in sizes]
    assert run_threads(work, 2) == [wanted, wanted]


def test_what_is_received_belongs_to_the_receiver() -> None:
    def work(world: ThreadWorld) -> Tensor | None:
        x = torch.ones(2, requires_grad=True)
        messenger = world.messenger()
        if world.rank == 0:
            messenger.post([(x, 1)], []).wait_sent()
            with torch.no_grad():
                x.zero_()
            return None
        (received,) = messenger.post([], [incoming(x, 0)]).wait_received()
        assert not received.requires_grad
        return received

    assert torch.equal(run_threads(work, 2)[1], torch.ones(2))


def test_a_tensor_changed_before_it_is_sent_is_an_error() -> None:
    def work(world: ThreadWorld) -> None:
        messenger, x = world.messenger(), torch.ones(2)
        if world.rank == 0:
            messenger.post([(x, 1)], [])
            x.add_(1.0)
        else:
            messenger.post([], [incoming(x, 0)]).wait_received()

    with pytest.raises(VerificationError, match=r"changed in place before it was sent: rank 0 in"):
        run_threads(work, 2)


@pytest.mark.parametrize(
    "other", [torch.ones(2, 2), torch.ones(4).double()], ids=["shape", "dtype"]
)
def test_ends_that_differ_are_named(other: Tensor) -> None:
    def work(world: ThreadWorld) -> None:
        if world.rank == 0:
            world.messenger().post([(torch.ones(4), 1)], [])
        else:
            world.messenger().post([], [incoming(other, 0)])

    with pytest.raises(VerificationError, match="the ends of a message differ") as caught:
        run_threads(work, 2)
    assert "rank 0 in send(float32 [4]) to rank 1, rank 1 in receive(" in str(caught.value)


def test_receives_that_wait_for_each_other_are_named() -> None:
    def work(world: ThreadWorld) -> None:
        x, peer = torch.ones(4), 1 - world.rank
        messenger = world.messenger()
        messenger.post([], [incoming(x, peer)]).wait_received()
        messenger.post([(x, peer)], [])

    with pytest.raises(VerificationError, match="wait for each other for ever") as caught:
        run_threads(work, 2)
    for rank in range(2):
        text = f"rank {rank} in receive(float32 [4]) from rank {1 - rank}"
        assert text in str(caught.value)


def test_a_message_and_a_collective_may_wait_for_each_other() -> None:
    def work(world: ThreadWorld) -> None:
        x = torch.ones(4)
        if world.rank == 0:
            world.messenger().post([], [incoming(x, 1)]).wait_received()
        else:
            world.world_group().all_reduce(x)

    with pytest.raises(VerificationError, match=r"rank 0 in receive.*; rank 1 in all_reduce"):
        run_threads(work, 2)


def test_a_message_with_one_end_is_an_error_when_all_have_returned() -> None:
    def work(world: ThreadWorld) -> None:
        if world.rank == 1:
            world.messenger().post([(torch.ones(4), 0)], [])

    with pytest.raises(VerificationError, match=r"never met.*rank 1 in send\(float32 \[4\]\) to"):
        run_threads(work, 2)


@pytest.mark.parametrize("peer", [0, 2, -1])
def test_a_message_goes_to_another_rank(peer: int) -> None:
    with pytest.raises(VerificationError, match=rf"rank 0 of 2 has a message .* rank {peer}"):
        run_threads(lambda world: world.rank or world.messenger().post([(vector(1), peer)], []), 2)


def test_sends_in_batches_of_their_own_block_both_ranks_as_on_nccl() -> None:
    with pytest.raises(VerificationError, match="wait for each other for ever") as caught:
        run_on_threads(large_both_ways, True)
    receive = f"receive(float32 [{N_LARGE}]) from rank"
    send = f"queued behind send(float32 [{N_LARGE}]) to rank"
    assert f"rank 0 in {receive} 1, {send} 1; rank 1 in {receive} 0, {send} 0" in str(caught.value)


def test_on_nccl_a_send_waits_for_its_receive_behind_others() -> None:
    """Rank 0 posts to 1, then to 2; the message to 2 waits until 1 receives."""

    def work(world: ThreadWorld, rendezvous: bool) -> bool:
        messenger, x = world.messenger(rendezvous), torch.ones(4)
        if world.rank == 0:
            posts = [messenger.post([(x, peer)], []) for peer in (1, 2)]
            for posted in posts:
                posted.wait_sent()
        elif world.rank == 2:
            messenger.post([], [incoming(x, 0)]).wait_received()
            messenger.post([(x, 1)], []).wait_sent()
        else:  # a schedule in which the later message has to arrive first
            messenger.post([], [incoming(x, 2)]).wait_received()
            messenger.post([], [incoming(x, 0)]).wait_received()
        return True

    assert run_threads(work, 3, False) == [True] * 3
    with pytest.raises(VerificationError, match=r"rank 0 in send\(float32 \[4\]\) to rank 1; "):
        run_threads(work, 3, True)


def test_long_queues_of_batches_are_worked_off() -> None:
    n_batches = 3000  # deeper than any recursion

    def work(world: ThreadWorld) -> float:
        messenger = world.messenger(rendezvous=True)
        if world.rank == 0:
            posts = [messenger.post([(vector(float(i)), 1)], []) for i in range(n_batches)]
            for posted in posts:
                posted.wait_sent()
            return 0.0
        receive = incoming(vector(0.0), 0)
        posts = [messenger.post([], [receive]) for i in range(n_batches)]
        return sum(posted.wait_received()[0].item() for posted in posts)

    assert run_threads(work, 2)[1] == n_batches * (n_batches - 1) / 2
