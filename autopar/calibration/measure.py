"""Start ranks and measure on them.

    one rank per core or GPU         matmuls, memory-bound and small operators while all ranks are
    (at most the largest group)      busy; collectives of every group size that divides the ranks;
                                     on a CPU, whole training steps
    every larger group (CPU only)    the same collectives; a few operators again, to measure the
                                     cost of sharing cores

Profiles are for jobs that keep all ranks busy. A process that computes alone may be faster than the
profile says, if cores share caches and power.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from autopar.calibration import samples as grids
from autopar.calibration.machine import LocalMachine, count_slots, this_machine
from autopar.calibration.operators import (
    attention_samples,
    issue_samples,
    operator_samples,
    turn_samples,
)
from autopar.calibration.result import Calibration
from autopar.calibration.samples import (
    OperatorSample,
    SampleGrid,
    Samples,
    StepSample,
    TransferSample,
)
from autopar.calibration.steps import step_samples
from autopar.calibration.transfers import transfer_samples
from autopar.errors import OptionError
from autopar.runtime.launch import WorkerPool, init_from_environment

CPU_GROUPS = (2, 4)
Report = Callable[[str], object]


def calibrate(
    ranks: Sequence[int] | None = None, quick: bool = False, progress: Report = lambda text: None
) -> Calibration:
    """Measure this machine; `ranks` are the sizes of the groups whose collectives are timed.

    The default is 2 and 4 processes, or on GPUs all powers of two up to their number. A script
    must call it under `if __name__ == "__main__":`, as with `autopar.launch`. `quick` measures
    fewer sizes, fewer times.

    Raises:
        OptionError: a group of one rank, or of more ranks than there are GPUs.
        CalibrationError: the measurements fit no positive constants.
    """
    n_slots = count_slots()
    groups = _group_sizes(ranks, n_slots)
    samples = Samples(n_busy=min(n_slots, max(groups, default=1)))
    with WorkerPool(samples.n_busy) as pool:
        machine = pool.run(_of_rank)[0]
        _measure_operators(samples, pool, quick, progress)
        _measure_transfers(samples, pool, groups, quick, progress)
        _measure_steps(samples, pool, machine, quick, progress)
    for n_ranks in (n for n in groups if n > samples.n_busy):
        with WorkerPool(n_ranks) as pool:
            progress(f"{n_ranks} ranks sharing {n_slots} cores")
            shared = pool.run(_on_rank, turn_samples, quick)[0]
            samples.turns.append((n_ranks, _ratio(shared, samples.operators)))
            _measure_transfers(samples, pool, groups, quick, progress)
    return Calibration.of(samples, machine)


def _measure_operators(samples: Samples, pool: WorkerPool, quick: bool, progress: Report) -> None:
    progress(f"matmuls and memory-bound operators on {samples.n_busy} ranks")
    samples.operators += pool.run(_on_rank, operator_samples, quick)[0]
    if torch.cuda.is_available():
        progress("fused attention, and the interpreter's time per operator")
        samples.attention += pool.run(_on_rank, attention_samples, quick)[0]
        samples.issue += pool.run(_on_rank, issue_samples, quick)[0]


def _measure_transfers(
    samples: Samples, pool: WorkerPool, groups: Sequence[int], quick: bool, progress: Report
) -> None:
    """Time transfers over groups of every size that divides the pool."""
    sizes = [n for n in groups if pool.n_ranks % n == 0]
    if sizes:
        progress(f"collectives and messages on {pool.n_ranks} ranks")
        turns = max(1.0, pool.n_ranks / count_slots())
        samples.transfers += pool.run(_transfers_on_rank, sizes, turns, quick)[0]


def _measure_steps(
    samples: Samples, pool: WorkerPool, machine: LocalMachine, quick: bool, progress: Report
) -> None:
    """Time whole steps; constants fitted to the samples so far predict their times."""
    if machine.is_cuda:
        return
    progress(f"whole training steps on {samples.n_busy} ranks")
    with tempfile.TemporaryDirectory() as folder:
        profile = Path(folder) / "of-operators.toml"
        Calibration.of(samples, machine).save(profile)
        samples.steps += pool.run(_steps_on_rank, str(profile), quick)[0]


def _group_sizes(ranks: Sequence[int] | None, n_slots: int) -> tuple[int, ...]:
    is_cuda = torch.cuda.is_available()
    if ranks is None:
        return tuple(1 << i for i in range(1, n_slots.bit_length())) if is_cuda else CPU_GROUPS
    for n_ranks in ranks:
        if n_ranks < 2:
            raise OptionError(f"a group of {n_ranks} has no collectives", hint="give 2 or more")
        if is_cuda and n_ranks > n_slots:
            raise OptionError(
                f"{n_ranks} ranks need as many GPUs, and this machine has {n_slots}",
                hint='give fewer, or set CUDA_VISIBLE_DEVICES="" to measure the CPU',
            )
    return tuple(sorted(set(ranks)))


def _grid(device: torch.device, quick: bool) -> SampleGrid:
    if device.type == "cuda":
        return grids.QUICK_CUDA if quick else grids.CUDA
    return grids.QUICK_CPU if quick else grids.CPU


def _of_rank() -> LocalMachine:
    """The machine as a rank sees it, after its backend has made its buffers."""
    dist.barrier()
    return this_machine()


def _on_rank(
    measure: Callable[[SampleGrid, torch.device], list[OperatorSample]], quick: bool
) -> list[OperatorSample]:
    device = init_from_environment()
    return measure(_grid(device, quick), device)


def _transfers_on_rank(sizes: Sequence[int], turns: float, quick: bool) -> list[TransferSample]:
    device = init_from_environment()
    return transfer_samples(sizes, turns, _grid(device, quick), device)


def _steps_on_rank(profile: str, quick: bool) -> list[StepSample]:
    device = init_from_environment()
    return step_samples(profile, _grid(device, quick), device)


def _ratio(shared: Sequence[OperatorSample], alone: Sequence[OperatorSample]) -> float:
    """The median over operators of their time on shared cores / their time alone."""
    known = {(s.name, s.dtype, s.size_bytes): s.time_s for s in alone}
    return statistics.median(s.time_s / known[s.name, s.dtype, s.size_bytes] for s in shared)
