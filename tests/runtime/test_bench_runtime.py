"""What `make bench-runtime` prints of a tiny model, and collectives delayed by a clock."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.cost.simulate import simulate
from autopar.placement import Split
from autopar.runtime.collectives import DistMessenger, Posted
from autopar.runtime.groups import DistGroup, Pending
from autopar.schedule import devices_of, script_of, zero_bubble_v
from examples import bench_runtime
from examples.bench_delays import Delays
from examples.bench_messages import Delayed, MessageDelays, stage_times
from examples.bench_runtime import N_LOSSES, ROWS, Launch, Measured, Overlap, disagreements
from tests.helpers.nightly import nightly
from tests.helpers.pools import Pool

# Messages of rank 0 in a step: four microbatches on each edge of stages that leaves it.
N_SENT = {"1f1b": 4, "interleaved": 12, "zero-bubble": 4, "zero-bubble-v": 8}
TINY = ["--pairs", "2", "--layers", "4", "--width", "32"]


@pytest.fixture
def measured() -> dict[str, Any]:
    """What ranks measured, by row: `launch` fills it."""
    return {}


@pytest.fixture
def launch(workers: Pool, measured: dict[str, Any]) -> Launch:
    """`autopar.launch` on processes that other tests use too."""

    def run(job: Callable[..., Any], n_ranks: int, name: str, *args: Any) -> list[Any]:
        ranks = workers(n_ranks).run(job, name, *args)
        measured[name] = ranks[0]
        return ranks

    return run


@nightly
@pytest.mark.parametrize(
    "names",
    [["eager"], ["tp", "ddp", "zero-3", "1f1b"], ["interleaved", "zero-bubble", "zero-bubble-v"]],
)
@pytest.mark.parametrize("activation", ["gelu_pytorch_tanh", "gelu_new"])
def test_parity_of_the_rows(
    names: list[str],
    activation: str,
    launch: Launch,
    measured: dict[str, Measured],
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--rows", ",".join(names), "--activation", activation, *TINY]
    assert bench_runtime.main(words, launch) == 0
    printed = capsys.readouterr().out
    assert [*measured] == names
    for name, row in measured.items():
        assert f" {name} " in printed and ROWS[name].theirs in printed
        assert disagreements(name, row.losses) == []
        assert len({loss for loss, _ in row.losses}) == N_LOSSES
        assert len(row.pairs) == 2
        assert all(time_s > 0 for pair in row.pairs for time_s in pair)


@nightly
@pytest.mark.parametrize("words", [[], ["--compiled"]], ids=["eager", "compiled"])
def test_parity_rows_with_delays(
    words: list[str],
    launch: Launch,
    measured: dict[str, Overlap],
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = "--rows", "ddp,zero-3"
    assert bench_runtime.main(["--delayed", *words, *rows, *TINY], launch) == 0
    assert ("ddp, compiled" in capsys.readouterr().out) == bool(words)
    for row in measured.values():
        assert len(row.pairs) == 2
        assert row.n_calls > 1 and row.size_bytes > 0 and row.delay_s > 0
    assert measured["zero-3"].n_calls > measured["ddp"].n_calls


@nightly
def test_parity_of_pipelines_with_delays(
    launch: Launch, measured: dict[str, Delayed], capsys: pytest.CaptureFixture[str]
) -> None:
    """How close they are is measured, not tested: that depends on what else runs."""
    rows = "--rows", ",".join(bench_runtime.PIPELINES)
    assert bench_runtime.main(["--delayed", *rows, *TINY], launch) == 0
    assert "beside its simulation" in capsys.readouterr().out
    for name, row in measured.items():
        assert row.n_messages == N_SENT[name]
        for (time_s, free_s), (_, slow_s) in zip(row.without, row.pairs, strict=True):
            assert time_s > 0
            assert 0 < free_s <= slow_s  # equal where a rank was so slow that messages hide


def test_losses_that_differ_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = Measured([(1.0, 1.0), (1.0, 1.1), (float("nan"), 1.0)], [])
    assert len(disagreements("ddp", wrong.losses)) == 2
    assert bench_runtime.main(["--rows", "ddp"], lambda *args: [wrong]) == 1
    assert "losses of step 1 differ: autopar 1.0, torch DDP 1.1" in capsys.readouterr().out


class Clock:
    """Time that passes only in `sleep` and by hand."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, time_s: float) -> None:
        self.now_s += time_s


class Alone(DistGroup):
    """A group whose sums are there at once."""

    def __init__(self, *ranks: int) -> None:
        no_process_group: Any = None
        super().__init__(ranks, 0, ("dp",), no_process_group)

    def _all_reduce(self, x: Tensor, op: Any, owns: bool) -> Pending[Tensor]:
        return Pending(x)


def test_delays_last_unless_a_rank_works_meanwhile() -> None:
    """A second a call, and a quarter of a second a byte; calls of one group follow each other."""
    before, clock = dict(vars(DistGroup)), Clock()
    group, other, x = Alone(0, 1), Alone(0, 2), torch.ones(2)
    with Delays(1.0, 0.25, clock, clock.sleep) as delays:
        group.all_reduce(torch.zeros(4))
        assert clock.now_s == 5.0
        assert group.slice(x, Split(0)).shape == (1,)  # does not communicate
        first, second = (group.start("all_reduce", x).then(lambda y: 2 * y) for _ in range(2))
        elsewhere = other.start("all_reduce", x)
        assert clock.now_s == 5.0
        clock.now_s = 9.0  # the rank works, longer than the first call takes
        assert first.wait().tolist() == [2.0, 2.0]
        elsewhere.wait()
        assert clock.now_s == 9.0
        second.wait()
        assert clock.now_s == 11.0
        assert (delays.n_calls, delays.size_bytes, delays.delay_s) == (4, 40, 14.0)
        delays.clear()
        assert (delays.n_calls, delays.size_bytes, delays.delay_s) == (0, 0, 0.0)
    assert dict(vars(DistGroup)) == before


class Arrived(Posted):
    """A batch that is there at once."""

    def wait_received(self, start: int = 0, end: int | None = None) -> list[Tensor]:
        return []

    def is_sent(self) -> bool:
        return True

    def wait_sent(self) -> None:
        pass


def test_messages_one_way_follow_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two a batch, three seconds each, to a rank that posts its receives two seconds later."""
    monkeypatch.setattr(DistMessenger, "post", lambda *args: Arrived())
    before, clock, x = DistMessenger.post, Clock(), torch.ones(2)
    ends = [SimpleNamespace(rank=rank) for rank in (0, 1)]
    clock.now_s = 1.0
    with MessageDelays(3.0, tmp_path / "posted", 2, clock, clock.sleep) as delays:
        post: Any = DistMessenger.post
        sent = post(ends[0], [(x, 1), (x, 1)], [])
        clock.now_s = 3.0
        received = post(ends[1], [], [((2,), x.dtype, 0)] * 2)
        received.wait_received(0, 1)
        assert clock.now_s == 6.0
        sent.wait_sent()
        assert clock.now_s == 9.0
        clock.now_s = 20.0  # the rank worked, longer than the messages took
        received.wait_received(1, 2)
        assert clock.now_s == 20.0
        post(ends[0], [(x, 1)], [], "ties").wait_sent()
        assert (clock.now_s, delays.n_messages) == (20.0, 2)
    assert DistMessenger.post is before


def test_seconds_of_stages_are_those_of_their_actions() -> None:
    schedule = zero_bubble_v(devices_of("zero-bubble-v", 2, 2), 2)
    texts = [[str(action) for action in row] for row in schedule.rows]
    own_s = [{"begin": 4.0, "0SF0>1": 12.0} | dict.fromkeys(row, 1.0) for row in texts]
    own_s[1]["1F1"] = 5.0
    stages = stage_times(script_of(schedule), own_s)
    assert [stage.before.compute_s for stage in stages] == [4.0, 4.0, 0.0, 0.0]
    assert [stage.forward.compute_s for stage in stages] == [2.0, 4.0, 2.0, 2.0]
    step_s = simulate(schedule, stages, 0.0).step_time_s
    assert step_s >= max(sum(seconds.values()) for seconds in own_s)
    assert simulate(schedule, stages, 1.0).step_time_s > step_s
