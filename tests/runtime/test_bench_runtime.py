"""What `make bench-runtime` prints of a tiny model, and delayed collectives by a clock of the test.

Losses of every row agree before it is timed. No time is compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.placement import Split
from autopar.runtime.groups import DistGroup, Pending
from autopar.runtime.launch import WorkerPool
from examples import bench_runtime
from examples.bench_delays import Delays
from examples.bench_runtime import N_LOSSES, ROWS, Launch, Measured, Overlap, disagreements

TINY = ["--pairs", "2", "--layers", "2", "--width", "32"]
ALPHA_S, BETA_S_PER_BYTE = 1.0, 0.25


@pytest.fixture
def found() -> dict[str, Any]:
    """What ranks measured, by row: `launch` fills it."""
    return {}


@pytest.fixture
def launch(workers: Callable[[int], WorkerPool], found: dict[str, Any]) -> Launch:
    """`autopar.launch` on processes that other tests use too."""

    def run(job: Callable[..., Any], n_ranks: int, name: str, *args: Any) -> list[Any]:
        ranks = workers(n_ranks).run(job, name, *args)
        found[name] = ranks[0]
        return ranks

    return run


def test_parity_of_the_rows(
    launch: Launch, found: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["tp", "ddp", "zero-3", "1f1b"]
    assert bench_runtime.main(["--rows", ",".join(names), *TINY], launch) == 0
    printed = capsys.readouterr().out
    assert [*found] == names
    for name in names:
        measured: Measured = found[name]
        assert f" {name} " in printed and ROWS[name].theirs in printed
        assert disagreements(name, measured.losses) == []
        assert len({loss for loss, _ in measured.losses}) == N_LOSSES
        assert len(measured.pairs) == 2
        assert all(time_s > 0 for pair in measured.pairs for time_s in pair)


def test_parity_beside_eager(launch: Launch, found: dict[str, Any]) -> None:
    assert bench_runtime.main(["--rows", "eager", *TINY], launch) == 0
    assert len(found["eager"].pairs) == 2


def test_parity_rows_with_delays(
    launch: Launch, found: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench_runtime.main(["--delayed", *TINY], launch) == 0
    printed = capsys.readouterr().out
    for name in ("ddp", "zero-3"):
        seen: Overlap = found[name]
        assert f" {name} " in printed
        assert len(seen.pairs) == 2
        assert seen.n_calls > 1 and seen.size_bytes > 0 and seen.delay_s > 0
    assert found["zero-3"].n_calls > found["ddp"].n_calls


def test_losses_that_differ_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = Measured([(1.0, 1.0), (1.0, 1.1), (float("nan"), 1.0)], [])
    assert len(disagreements("ddp", wrong.losses)) == 2
    assert bench_runtime.main(["--rows", "ddp"], lambda *args: [wrong]) == 1
    assert "losses of step 1 differ: autopar 1.0, torch DDP 1.1" in capsys.readouterr().out


def test_the_ratio_of_a_delayed_step() -> None:
    """Communication is the longer in one pair, compute in the other two."""
    seen = Overlap([(1.0, 3.0), (4.0, 6.0), (3.0, 6.0)], 1, 8, 2.0)
    assert seen.compute_s == 3.0
    assert seen.ratio()[0] == 1.5


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--rows", "ddp,zero-9"], "'zero-9' is not one of eager, tp, ddp, zero-3, 1f1b"),
        (["--delayed", "--rows", "tp"], "--delayed has the rows ddp, zero-3, not tp"),
    ],
)
def test_unknown_rows_are_refused(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        bench_runtime.main(argv)
    assert words in capsys.readouterr().err


class Clock:
    """Time that passes only in `sleep` and by hand."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, time_s: float) -> None:
        self.now_s += time_s


class Handle:
    """An all_reduce that was issued."""

    kind = "all_reduce"

    def __init__(self, result: Tensor) -> None:
        self.result = result

    def wait(self) -> Tensor:
        return self.result


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def delays(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Iterator[Delays]:
    """Delays of groups that compute nothing. `issue` is a collective with a handle."""

    def issue(group: DistGroup, x: Tensor) -> Handle:
        group._record("all_reduce", x.nbytes)
        return Handle(x)

    monkeypatch.setattr(DistGroup, "_all_reduce", lambda group, x, op, owns: Pending(x))
    monkeypatch.setattr(DistGroup, "issue", issue, raising=False)
    with Delays(ALPHA_S, BETA_S_PER_BYTE, clock, clock.sleep) as delays:
        yield delays


def group_of(*ranks: int) -> Any:
    no_process_group: Any = None
    return DistGroup(ranks, 0, ("dp",), no_process_group)


def test_a_blocking_call_sleeps(delays: Delays, clock: Clock) -> None:
    """Two calls of 8 and 16 bytes: 3 and 5 seconds."""
    group = group_of(0, 1)
    group.all_reduce(torch.zeros(2))
    assert clock.now_s == 3.0
    group.all_reduce(torch.zeros(4))
    assert clock.now_s == 8.0
    assert (delays.n_calls, delays.size_bytes, delays.delay_s) == (2, 24, 8.0)
    delays.clear()
    assert (delays.n_calls, delays.size_bytes, delays.delay_s) == (0, 0, 0.0)


def test_a_handle_sleeps_in_its_wait(delays: Delays, clock: Clock) -> None:
    """Work meanwhile hides the delay; calls of one group follow each other."""
    group, x = group_of(0, 1), torch.zeros(2)
    first, second = group.issue(x), group.issue(x)
    assert clock.now_s == 0.0
    clock.now_s = 4.0  # the rank works, longer than the first call takes
    assert first.wait() is x
    assert clock.now_s == 4.0
    assert second.wait() is x
    assert clock.now_s == 6.0
    assert second.kind == "all_reduce"
    later = group.issue(x)
    group.all_reduce(x)  # waits for the network, which carries `later` first
    assert clock.now_s == 12.0
    later.wait()
    assert clock.now_s == 12.0


def test_what_is_done_to_a_result_keeps_its_delay(delays: Delays, clock: Clock) -> None:
    pending = group_of(0, 1).start("all_reduce", torch.ones(2)).then(lambda x: x * 2)
    assert clock.now_s == 0.0
    assert pending.wait().tolist() == [2.0, 2.0]
    assert clock.now_s == 3.0


def test_groups_of_other_ranks_do_not_wait(delays: Delays, clock: Clock) -> None:
    one, other = group_of(0, 1).issue(torch.zeros(2)), group_of(0, 2).issue(torch.zeros(2))
    one.wait()
    other.wait()
    assert clock.now_s == 3.0


def test_delays_end_with_their_block() -> None:
    before = dict(vars(DistGroup))
    with Delays(ALPHA_S, BETA_S_PER_BYTE):
        assert "all_reduce" in vars(DistGroup).keys() - before.keys()
    assert dict(vars(DistGroup)) == before


def test_only_what_communicates_is_delayed(delays: Delays, clock: Clock) -> None:
    assert group_of(0, 1).slice(torch.zeros(4), Split(0)).shape == (2,)
    assert (clock.now_s, delays.n_calls) == (0.0, 0)
