"""Compare autopar with hand-written Megatron: losses, collectives, step times on two processes.

    make compare              or: python -m examples.compare [--pairs 15] [--activation gelu_new]

One GPT-2 on one mesh (1, 2), with the same weights, batches and AdamW, runs four ways: by the plan
that autopar chose, by the Megatron recipe through autopar (`Manual(tp=2)`), by DTensor's
`parallelize_module` on the same sharding (`examples/dtensor_gpt2.py`), and by hand
(`examples/megatron_gpt2.py`). DTensor shows that the hand-written baseline is not a slow one: its
ratio should not be below 1.

    losses        float64, every step side by side; they must agree to 1e-10
    collectives   of one recorded step. autopar's must be those that its plan predicts. The
                  recipe's and DTensor's must be those of the hand-written model
    step time     float32, forward to optimizer, with all models alive in the same processes. A
                  pair is a step of one model and a step of the baseline. Which goes first
                  alternates, and a barrier precedes each. A step's time is the slowest rank's.
                  The ratio is the median over pairs, with the 90% interval of bootstrap resamples

The default activation is the tanh GELU as one kernel in all models, so the ratio is about parallel
execution. `gelu_new` gives autopar Hugging Face's own form, which is eight small operators.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoConfig, AutoModelForCausalLM

import autopar
from autopar.runtime.groups.group import Recorder
from autopar.units import format_bytes, format_seconds
from examples.dtensor_gpt2 import DTensorGPT2
from examples.megatron_gpt2 import Call, MegatronGPT2, TensorParallel
from examples.train_gpt2 import LENGTH, batches

AUTO, RECIPE, DTENSOR = "autopar auto", "autopar Megatron recipe", "DTensor, same sharding"
BY_HAND = "hand-written Megatron"
MESH = (1, 2)
N_RANKS = 2
N_LOSSES, N_WARM_UP, N_RESAMPLES = 5, 3, 5000
Batch = dict[str, Any]


@dataclass(frozen=True)
class Size:
    """A GPT-2 without dropout."""

    n_layers: int = 4
    width: int = 256
    n_heads: int = 8
    vocabulary: int = 256
    n_positions: int = LENGTH
    activation: str = "gelu_pytorch_tanh"
    tied: bool = True

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        config = AutoConfig.for_model(
            "gpt2", n_layer=self.n_layers, n_embd=self.width, n_head=self.n_heads,
            vocab_size=self.vocabulary, n_positions=self.n_positions,
            activation_function=self.activation, resid_pdrop=0.0, embd_pdrop=0.0,
            attn_pdrop=0.0, bos_token_id=0, eos_token_id=0, tie_word_embeddings=self.tied,
        )  # fmt: skip
        model: nn.Module = AutoModelForCausalLM.from_config(config)
        return model


@dataclass(frozen=True)
class Contender:
    """A model in training; `record` runs a step and returns its loss and its collectives."""

    name: str
    step: Callable[[Batch], Tensor]
    record: Callable[[Batch], tuple[Tensor, Counter[Call]]]
    planned: Counter[Call] | None = None


@dataclass(frozen=True)
class Agreement:
    """One rank's losses, and the collectives of the last step, by contender."""

    losses: dict[str, list[float]]
    calls: dict[str, Counter[Call]]
    planned: dict[str, Counter[Call]]


def with_autopar(
    name: str, size: Size, precision: str, batch: Batch, manual: autopar.Manual | None
) -> Contender:
    """The unmodified Hugging Face model through `autopar.parallelize`."""
    module = autopar.parallelize(size.model(), MESH, batch, precision=precision, manual=manual)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)

    def step(batch: Batch) -> Tensor:
        loss = module.step(**batch)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def record(batch: Batch) -> tuple[Tensor, Counter[Call]]:
        with Recorder() as recorder:
            loss = step(batch)
        return loss, Counter(Call(c.kind, c.phase, c.size_bytes) for c in recorder.calls)

    planned: Counter[Call] = Counter()
    for row in module.plan.collectives():
        planned[Call(row.kind, row.phase, row.size_bytes)] += row.count
    return Contender(name, step, record, planned)


def by_dtensor(size: Size, precision: str) -> Contender:
    """The same weights under DTensor's `parallelize_module`."""
    mesh = init_device_mesh("cpu", (N_RANKS,))
    model = DTensorGPT2(values_of(size, precision), size.n_heads, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(batch: Batch, calls: Counter[Call] | None = None) -> Tensor:
        loss = model.forward_backward(calls, **batch)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def record(batch: Batch) -> tuple[Tensor, Counter[Call]]:
        calls: Counter[Call] = Counter()
        return step(batch, calls), calls

    return Contender(DTENSOR, step, record)


def by_hand(size: Size, precision: str) -> Contender:
    """The same weights in the hand-written model."""
    assert dist.group.WORLD is not None
    tp = TensorParallel(dist.group.WORLD)
    model = MegatronGPT2(values_of(size, precision), size.n_heads, tp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(batch: Batch) -> Tensor:
        loss: Tensor = model(**batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    def record(batch: Batch) -> tuple[Tensor, Counter[Call]]:
        tp.calls.clear()
        return step(batch), tp.calls.copy()

    return Contender(BY_HAND, step, record)


def values_of(size: Size, precision: str) -> dict[str, Tensor]:
    model = size.model().to(torch.float64 if precision == "fp64" else torch.float32)
    return model.state_dict()


def contenders(size: Size, precision: str, batch: Batch) -> tuple[Contender, ...]:
    return (
        with_autopar(AUTO, size, precision, batch, None),
        with_autopar(RECIPE, size, precision, batch, autopar.Manual(tp=N_RANKS)),
        by_dtensor(size, precision),
        by_hand(size, precision),
    )


def agree(size: Size, data: Sequence[Batch]) -> Agreement:
    """Train all models in float64, one step per batch."""
    models = contenders(size, "fp64", data[0])
    losses: dict[str, list[float]] = {m.name: [] for m in models}
    calls: dict[str, Counter[Call]] = {}
    for batch in data:
        for model in models:
            loss, calls[model.name] = model.record(batch)
            losses[model.name].append(loss.item())
    planned = {m.name: m.planned for m in models if m.planned is not None}
    return Agreement(losses, calls, planned)


def timed_pairs(
    size: Size, batch: Batch, n_pairs: int
) -> tuple[dict[str, Counter[Call]], dict[str, list[tuple[float, float]]]]:
    """Collectives in float32, and for each other model the pairs (time_s, time_s by hand)."""
    *others, hand = contenders(size, "model", batch)
    calls = {m.name: m.record(batch)[1] for m in (*others, hand)}
    for model in (*others, hand) * N_WARM_UP:
        model.step(batch)
    times: dict[str, list[tuple[float, float]]] = {m.name: [] for m in others}
    for index in range(n_pairs):
        for model in others:
            times[model.name].append(timed_pair(model.step, hand.step, batch, index % 2 == 1))
    return calls, times


def timed_pair(
    one: Callable[[Batch], object],
    other: Callable[[Batch], object],
    batch: Batch,
    other_first: bool,
) -> tuple[float, float]:
    """Seconds of one step of each, in the order of the arguments."""
    if other_first:
        return timed_pair(other, one, batch, False)[::-1]
    return step_time_s(one, batch), step_time_s(other, batch)


def step_time_s(step: Callable[[Batch], object], batch: Batch) -> float:
    """Seconds of one step on the slowest rank."""
    dist.barrier()
    begun = time.perf_counter()
    step(batch)
    elapsed = torch.tensor(time.perf_counter() - begun, dtype=torch.float64)
    dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
    return elapsed.item()


def median_ratio(pairs: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """The median of the ratios, and the 5% and 95% points of its bootstrap distribution."""
    ratios = torch.tensor([a / b for a, b in pairs], dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    picks = torch.randint(len(ratios), (N_RESAMPLES, len(ratios)), generator=generator)
    medians = ratios[picks].quantile(0.5, dim=1)
    low, high = medians.quantile(torch.tensor([0.05, 0.95], dtype=torch.float64)).tolist()
    return statistics.median(ratios.tolist()), low, high


def loss_table(losses: dict[str, list[float]], title: str) -> Table:
    table = Table(title=title)
    table.add_column("step", justify="right")
    for name in losses:
        table.add_column(name, justify="right")
    table.add_column("largest difference", justify="right")
    for index, row in enumerate(zip(*losses.values(), strict=True)):
        texts = [f"{loss:.12f}" for loss in row]
        table.add_row(str(index), *texts, f"{max(row) - min(row):.1e}")
    return table


def collective_table(calls: dict[str, Counter[Call]]) -> Table:
    table = Table(title="collectives of one step and rank, float32")
    for title in ("phase", "collective"):
        table.add_column(title)
    table.add_column("bytes of each", justify="right")
    for name in calls:
        table.add_column(name, justify="right")
    for call in sorted(set().union(*calls.values()), key=lambda c: (c.phase, c.kind, c.size_bytes)):
        counts = [str(c[call]) if call in c else "-" for c in calls.values()]
        table.add_row(call.phase, call.kind, str(call.size_bytes), *counts)
    sums = [sum(call.size_bytes * n for call, n in c.items()) for c in calls.values()]
    totals = [f"{c.total()}, {format_bytes(n)}" for c, n in zip(calls.values(), sums, strict=True)]
    table.add_section()
    table.add_row("all", "", "", *totals)
    return table


def time_table(times: dict[str, list[tuple[float, float]]], n_pairs: int, baseline: str) -> Table:
    """One row per contender; each of its pairs also has a time of the baseline."""
    table = Table(title=f"step time, float32, {n_pairs} interleaved pairs")
    table.add_column("")
    for title in ("median", baseline, "ratio", "90% interval"):
        table.add_column(title, justify="right")
    for name, pairs in times.items():
        ratio, low, high = median_ratio(pairs)
        medians = [format_seconds(statistics.median(column)) for column in zip(*pairs, strict=True)]
        table.add_row(name, *medians, f"{ratio:.3f}", f"{low:.3f} to {high:.3f}")
    return table


def disagreements(found: Agreement) -> list[str]:
    """The requirements that do not hold, as texts."""
    wrong = []
    for index, row in enumerate(zip(*found.losses.values(), strict=True)):
        tolerance = 1e-10 * max(1.0, abs(row[0]))
        if not all(abs(loss - row[0]) <= tolerance for loss in row):  # NaN is in no tolerance
            wrong.append(f"losses of step {index} differ: {row}")
    for name, planned in found.planned.items():
        if found.calls[name] != planned:
            wrong.append(f"{name} made {found.calls[name]}, its plan has {planned}")
    for name in (RECIPE, DTENSOR):
        if found.calls[name] != found.calls[BY_HAND]:
            wrong.append(f"{name} made {found.calls[name]}, by hand {found.calls[BY_HAND]}")
    return wrong


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--activation", default=Size.activation)
    given = parser.parse_args(argv)
    size, data = Size(activation=given.activation), batches(N_LOSSES)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    found = autopar.launch(agree, N_RANKS, size, data)[0]
    console.print(loss_table(found.losses, "loss per step, float64"))
    calls, times = autopar.launch(timed_pairs, N_RANKS, size, data[0], given.pairs)[0]
    console.print(collective_table(calls))
    console.print(time_table(times, given.pairs, "by hand"))
    wrong = disagreements(found)
    for line in wrong:
        console.print(line, markup=False, soft_wrap=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
