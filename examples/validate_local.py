"""Compare predictions with measurements on this machine: step times and memory of plans.

    make validate-local       or: python -m examples.validate_local [--profile P.toml] [--rounds 9]

Measures the machine as `autopar calibrate` does, or takes a profile. Then trains a GPT-2 and a
Llama on 2 and on 4 processes, each by the plans of `PLANS`. Calibration fits whole steps too, but
of programs, widths and lengths that differ from these.

    step time   forward to optimizer, of the slowest rank, after a barrier. One step of every plan
                makes a round. The result is the median over rounds; quartiles show the spread
    yardstick   matmuls alone, in the same rounds, predicted at their rate in steps.
                `autopar calibrate` prints the ratio of time in steps to time alone. If the error
                is larger than this ratio explains, the machine is not as busy as during
                calibration, and step times are off too
    memory      on every rank, the peak of live tensors over a step and its optimizer, beside the
                predicted peak of the rank's stage

The check passes if the median of |predicted / measured - 1| of step times is at most 20%, their
rank correlation (Spearman's) is at least 0.8, and no peak is more than 10% off.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import autopar
from autopar import Manual
from autopar.calibration import calibrate
from autopar.cost.hardware.hardware import resolve
from autopar.cost.laws.model import op_time_s
from autopar.measured.live_bytes import LiveBytes
from autopar.runtime.launch.processes import WorkerPool
from autopar.runtime.tensors import local_of
from autopar.units import format_bytes, format_seconds

ROWS, LENGTH, VOCABULARY = 8, 128, 512
YARDSTICK = (ROWS * LENGTH, 1024, 256)
MOST_TIME_ERROR, LEAST_CORRELATION, MOST_MEMORY_ERROR = 0.2, 0.8, 0.1
N_WARM_UP = 2
MOST_LOAD = 0.25  # load per core from other work, above which times are not reliable

# Ranks -> name of a plan, its recipe and its microbatches.
PLANS: dict[int, tuple[tuple[str, Manual, int], ...]] = {
    2: (
        ("dp", Manual(dp=2), 1),
        ("dp, 4 microbatches", Manual(dp=2), 4),
        ("dp, ZeRO-1", Manual(dp=2, zero=1), 1),
        ("dp, ZeRO-3", Manual(dp=2, zero=3), 1),
        ("tp", Manual(tp=2), 1),
        ("1F1B, 4 microbatches", Manual(pp=2), 4),
    ),
    4: (
        ("dp", Manual(dp=4), 1),
        ("dp, ZeRO-2, 2 microbatches", Manual(dp=4, zero=2), 2),
        ("dp x tp", Manual(dp=2, tp=2), 1),
        ("1F1B x dp, 4 microbatches", Manual(dp=2, pp=2), 4),
        ("1F1B of 4, 8 microbatches", Manual(pp=4), 8),
    ),
}
MODELS = ("GPT-2", "Llama")
N_LAYERS = {"GPT-2": 4, "Llama": 2}


@dataclass(frozen=True)
class Measured:
    """The measurements of one plan of one model; bytes are listed by rank."""

    model: str
    n_ranks: int
    plan: str
    predicted_s: float
    times_s: tuple[float, ...] = ()
    predicted_bytes: tuple[float, ...] = ()
    live_bytes: tuple[float, ...] = ()

    @property
    def time_s(self) -> float:
        return statistics.median(self.times_s)

    @property
    def time_error(self) -> float:
        return self.predicted_s / self.time_s - 1.0

    @property
    def memory_error(self) -> float:
        """The error of the rank that is furthest off."""
        errors = [p / m - 1.0 for p, m in zip(self.predicted_bytes, self.live_bytes, strict=True)]
        return max(errors, key=abs)


def make_batch() -> dict[str, Any]:
    ids = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def make_model(name: str) -> nn.Module:
    """A few layers of width 256, without dropout, from a fixed seed."""
    torch.manual_seed(0)
    if name == "GPT-2":
        config = AutoConfig.for_model(
            "gpt2", n_layer=N_LAYERS[name], n_embd=256, n_head=8, vocab_size=VOCABULARY,
            n_positions=LENGTH, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
            bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
    else:
        config = AutoConfig.for_model(
            "llama", num_hidden_layers=N_LAYERS[name], hidden_size=256, intermediate_size=704,
            num_attention_heads=8, num_key_value_heads=4, vocab_size=VOCABULARY,
            max_position_embeddings=LENGTH, use_cache=False,
        )  # fmt: skip
    model: nn.Module = AutoModelForCausalLM.from_config(config)
    return model


class Timed(ABC):
    """Something that all ranks do at once, and its time as the profile predicts it."""

    model: str
    name: str
    predicted_s: float

    @abstractmethod
    def step(self) -> None: ...

    def step_time_s(self) -> float:
        """Seconds of one step on the slowest rank."""
        dist.barrier()
        begun = time.perf_counter()
        self.step()
        elapsed = torch.tensor(time.perf_counter() - begun, dtype=torch.float64)
        dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
        return elapsed.item()

    def described(self) -> Measured:
        """Its row of the table, without the measured times."""
        return Measured(self.model, dist.get_world_size(), self.name, self.predicted_s)


class Yardstick(Timed):
    """Matmuls of one size."""

    model, name = "", "yardstick"
    n_products = 8

    def __init__(self, mesh: autopar.Mesh) -> None:
        m, n, k = YARDSTICK
        self.x, self.w = torch.randn(m, k), torch.randn(k, n)
        touched = self.x.nbytes + self.w.nbytes + 4 * m * n
        one_s = op_time_s(2.0 * m * n * k, touched, resolve(mesh).device, torch.float32)
        self.predicted_s = self.n_products * one_s

    def step(self) -> None:
        for _ in range(self.n_products):
            self.x @ self.w


class Training(Timed):
    """One plan of one model."""

    def __init__(self, model: str, name: str, mesh: autopar.Mesh, **options: Any) -> None:
        self.model, self.name, self.batch = model, name, make_batch()
        self.module = autopar.parallelize(make_model(model), mesh, self.batch, **options)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=1e-3)
        self.predicted_s = self.module.plan.predicted.step_time_s

    def step(self) -> None:
        self.module.step(**self.batch)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def described(self) -> Measured:
        peaks = of_all_ranks(self.predicted_bytes()), of_all_ranks(self.live_bytes())
        return replace(super().described(), predicted_bytes=peaks[0], live_bytes=peaks[1])

    def live_bytes(self) -> float:
        """The peak of live tensors of this rank over one step."""
        states = self.optimizer.state.values()
        tensors = [v for state in states for v in state.values() if isinstance(v, torch.Tensor)]
        kept = [*self.module.shards.values(), *map(local_of, tensors)]
        with LiveBytes([*kept, *self.batch.values()]) as live:
            self.step()
        return float(live.peak_bytes)

    def predicted_bytes(self) -> float:
        """The predicted peak of this rank's stage."""
        plan = self.module.plan
        stage = next(k for k, s in enumerate(plan.stages) if dist.get_rank() in s.ranks)
        return plan.predicted.peak_bytes_per_stage[stage]


# What a worker process keeps from one round to the next.
_timed: list[Timed] = []


def prepare(hardware: str) -> None:
    """In a worker process: plan and warm up everything that is timed later."""
    mesh = autopar.Mesh((1, dist.get_world_size()), hardware=hardware)
    _timed[:] = [Yardstick(mesh)]
    for model in MODELS:
        for name, manual, n in PLANS[mesh.n_ranks]:
            _timed.append(Training(model, name, mesh, manual=manual, microbatches=n))
    for _ in range(N_WARM_UP):
        one_round()


def one_round() -> list[float]:
    """Seconds of one step of each item of `_timed`."""
    return [timed.step_time_s() for timed in _timed]


def describe() -> list[Measured]:
    return [timed.described() for timed in _timed]


def measure(hardware: str, n_rounds: int) -> list[Measured]:
    """Every plan on 2 and on 4 processes, in rounds, so that a busy moment affects all plans."""
    with ExitStack() as stack:
        pools = [stack.enter_context(WorkerPool(n_ranks)) for n_ranks in PLANS]
        for pool in pools:
            pool.run(prepare, hardware)
        rounds = [
            [time_s for pool in pools for time_s in pool.run(one_round)[0]] for _ in range(n_rounds)
        ]
        rows = [row for pool in pools for row in pool.run(describe)[0]]
    return [
        replace(row, times_s=times)
        for row, times in zip(rows, zip(*rounds, strict=True), strict=True)
    ]


def of_all_ranks(value: float) -> tuple[float, ...]:
    values = torch.zeros(dist.get_world_size(), dtype=torch.float64)
    values[dist.get_rank()] = value
    dist.all_reduce(values)
    return tuple(values.tolist())


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's rank correlation of two sequences."""
    orders = [[sorted(values).index(value) for value in values] for values in (a, b)]
    return statistics.correlation(*orders)


def table_of(rows: Sequence[Measured], n_rounds: int) -> Table:
    table = Table(title=f"predicted and measured, {n_rounds} interleaved rounds")
    for title in ("model", "ranks", "plan"):
        table.add_column(title)
    for title in ("predicted", "median", "quartiles", "error", "peak predicted", "live", "error"):
        table.add_column(title, justify="right")
    for row in rows:
        low, _, high = statistics.quantiles(row.times_s, n=4)
        memory = ["", "", ""]
        if row.live_bytes:
            peaks = [format_bytes(max(found)) for found in (row.predicted_bytes, row.live_bytes)]
            memory = [*peaks, f"{row.memory_error:+.1%}"]
        times = format_seconds(row.predicted_s), format_seconds(row.time_s)
        spread = f"{format_seconds(low)} to {format_seconds(high)}"
        table.add_row(
            row.model, str(row.n_ranks), row.plan, *times, spread, f"{row.time_error:+.0%}", *memory
        )
    return table


def verdict(rows: Sequence[Measured]) -> tuple[str, bool]:
    """The three numbers as text, and whether the check passes."""
    rows = [row for row in rows if row.live_bytes]
    error = statistics.median(abs(row.time_error) for row in rows)
    correlation = rank_correlation([r.predicted_s for r in rows], [r.time_s for r in rows])
    memory_error = max(abs(row.memory_error) for row in rows)
    text = (
        f"{len(rows)} plans: step time median |error| {error:.1%} (at most {MOST_TIME_ERROR:.0%}), "
        f"rank correlation {correlation:.2f} (at least {LEAST_CORRELATION}), "
        f"largest error of a peak {memory_error:.1%} (at most {MOST_MEMORY_ERROR:.0%})"
    )
    holds = (
        error <= MOST_TIME_ERROR
        and correlation >= LEAST_CORRELATION
        and memory_error <= MOST_MEMORY_ERROR
    )
    return text, holds


def other_work() -> str:
    """A warning if the machine is busy before anything was started; empty if it is idle."""
    load, n_cores = os.getloadavg()[0], os.cpu_count() or 1
    if load < MOST_LOAD * n_cores:
        return ""
    return (
        f"load {load:.1f} on {n_cores} cores: something else keeps this machine busy, and what is "
        "measured now may not be what is measured a few minutes later"
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--profile", type=Path, help="as `autopar calibrate` writes it")
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args(argv)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    if warning := other_work():
        console.print(warning, soft_wrap=True)
    with tempfile.TemporaryDirectory() as folder:
        profile = given.profile
        if profile is None:
            profile = Path(folder) / "this-machine.toml"
            with console.status("measuring this machine") as status:
                calibrate(tuple(PLANS), progress=status.update).save(profile)
        with console.status("planning, then training round by round"):
            rows = measure(str(profile), given.rounds)
    console.print(table_of(rows, given.rounds))
    text, holds = verdict(rows)
    console.print(text, soft_wrap=True)
    return 0 if holds else 1


if __name__ == "__main__":
    raise SystemExit(main())
