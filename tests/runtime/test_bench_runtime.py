"""What `make bench-runtime` prints of a tiny model, and collectives delayed by a clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.placement import Split
from autopar.runtime.groups import DistGroup, Pending
from examples import bench_runtime
from examples.bench_delays import Delays
from examples.bench_runtime import N_LOSSES, ROWS, Launch, Measured, Overlap, disagreements
from tests.helpers.nightly import nightly
from tests.helpers.pools import Pool

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
    "names", [["eager"], ["tp", "ddp", "zero-3", "1f1b"], ["interleaved", "zero-bubble-v"]]
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
    assert bench_runtime.main(["--delayed", *words, *TINY], launch) == 0
    assert ("ddp, compiled" in capsys.readouterr().out) == bool(words)
    for row in measured.values():
        assert len(row.pairs) == 2
        assert row.n_calls > 1 and row.size_bytes > 0 and row.delay_s > 0
    assert measured["zero-3"].n_calls > measured["ddp"].n_calls


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
