"""Interleaved medians: every case once per round, so a busy moment of the machine affects all.

All ranks time the same cases in the same order, each after a barrier. A case is called equally
often on all ranks: as often as its mean time over ranks needs to fill `sample_s`. Its time in a
round is the mean over ranks, or the slowest rank's. Its result is the median over rounds.

    CPU    `time.perf_counter` around the calls
    CUDA   events around the calls. The calls are queued behind enough other work that the device
           never waits for the interpreter: kernels run back to back, as in a busy step
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

# A GPU's queue has room for about a thousand kernels, and a call may launch a dozen.
_MOST_CALLS = {"cpu": 1000, "cuda": 50}


@dataclass(frozen=True)
class TimedCall:
    """`run(i)` is timed; i counts calls, so that each call can use other buffers.

    `prepare` runs before each call, untimed: what a rank does before it meets others. `share` is
    the part of the time that counts: half of a round trip for one message. `by_slowest`: a round's
    time is that of the slowest rank, because all wait for it.
    """

    run: Callable[[int], object]
    prepare: Callable[[], object] | None = None
    share: float = 1.0
    by_slowest: bool = False


def medians_s(
    cases: Sequence[TimedCall], device: torch.device, sample_s: float, n_rounds: int
) -> list[float]:
    """Seconds of one call of each case."""
    n_calls = [_n_calls(case, device, sample_s) for case in cases]
    rounds: list[list[float]] = [[] for _ in cases]
    for _ in range(n_rounds):
        for case, n, times_s in zip(cases, n_calls, rounds, strict=True):
            dist.barrier()
            time_s = _time_s(case, n, device) / n * case.share
            times_s.append(_rank_times(time_s, device, case.by_slowest))
    return [statistics.median(times_s) for times_s in rounds]


def _n_calls(case: TimedCall, device: torch.device, sample_s: float) -> int:
    """The number of calls that fills `sample_s`, equal on all ranks; the first call warms up."""
    _time_s(case, 1, device)
    pilot_s = _rank_times(_time_s(case, 3, device) / 3, device)
    return max(1, min(_MOST_CALLS[device.type], round(sample_s / max(pilot_s, 1e-7))))


def _rank_times(value: float, device: torch.device, is_largest: bool = False) -> float:
    """The mean over ranks, or the largest value."""
    values = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(values, op=dist.ReduceOp.MAX if is_largest else dist.ReduceOp.SUM)
    return values.item() / (1 if is_largest else dist.get_world_size())


def _time_s(case: TimedCall, n_calls: int, device: torch.device) -> float:
    """Seconds of `n_calls` calls together."""
    timed = _gpu_time_s if device.type == "cuda" else _cpu_time_s
    if case.prepare is None:
        return timed(case.run, range(n_calls), device)
    total_s = 0.0
    for i in range(n_calls):
        case.prepare()
        total_s += timed(case.run, range(i, i + 1), device)
    return total_s


def _cpu_time_s(run: Callable[[int], object], calls: range, device: torch.device) -> float:
    begun_s = time.perf_counter()
    for i in calls:
        run(i)
    return time.perf_counter() - begun_s


def _gpu_time_s(run: Callable[[int], object], calls: range, device: torch.device) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    _occupy(device, len(calls))
    begin.record()
    for i in calls:
        run(i)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e-3


def _occupy(device: torch.device, n_calls: int) -> None:
    """Queue two matmuls per call, of about 0.1 ms or more each: longer than issuing it takes."""
    x = torch.ones(4096, 4096, dtype=torch.float16, device=device)
    for _ in range(2 * n_calls):
        x @ x


def issue_time_s(run: Callable[[int], object], device: torch.device, n_calls: int = 200) -> float:
    """Seconds the interpreter needs for one call, without the device's work; the median of 9."""
    times_s = []
    for _ in range(9):
        torch.cuda.synchronize(device)
        times_s.append(_cpu_time_s(run, range(n_calls), device) / n_calls)
    return statistics.median(times_s)
