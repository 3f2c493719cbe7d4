"""Compare autopar's 1F1B with that of `torch.distributed.pipelining`, on two processes.

    python -m examples.compare_pipeline [--pairs 15] [--microbatches 4 8] [--layers 4]

One GPT-2 with an untied head, with the same two stages, weights, batches and AdamW, runs two ways:
through `autopar.parallelize` with these stages and this schedule, and by `Schedule1F1B` with
hand-written stages (`examples/pipeline_gpt2.py`).

    losses        float64, every step side by side; they must agree to 1e-10
    step time     float32, in interleaved pairs, as in `examples/compare.py`. The ratio is the
                  median over pairs, with the 90% interval of bootstrap resamples

Losses are read on the last stage, because under torch no other stage has them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

import torch
from rich.console import Console
from torch import Tensor

import autopar
from examples.compare import (
    MESH,
    N_LOSSES,
    N_RANKS,
    N_WARM_UP,
    Batch,
    Size,
    loss_table,
    time_table,
    timed_pair,
    values_of,
)
from examples.pipeline_gpt2 import PipelineGPT2
from examples.train_gpt2 import batches

TOLERANCE = 1e-10
AUTOPAR, TORCH = "autopar 1F1B", "torch Schedule1F1B"
Step = Callable[[Batch], Tensor | None]
Stage = tuple[list[str], tuple[int, int]]
Losses = dict[str, list[float]]
Pairs = list[tuple[float, float]]


def stages(size: Size) -> list[Stage]:
    """The modules of each stage, as in `PipelineGPT2`; each stage has one rank."""
    half = size.n_layers // 2
    blocks = [f"transformer.h.{i}" for i in range(size.n_layers)]
    return [
        (["transformer.wte", "transformer.wpe", *blocks[:half]], (1, 1)),
        ([*blocks[half:], "transformer.ln_f", "lm_head"], (1, 1)),
    ]


def with_autopar(size: Size, precision: str, batch: Batch, n_microbatches: int) -> Step:
    """The unmodified Hugging Face model."""
    module = autopar.parallelize(
        size.model(), MESH, batch, precision=precision, stages=stages(size), schedule="1f1b",
        microbatches=n_microbatches,
    )  # fmt: skip
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)

    def step(batch: Batch) -> Tensor:
        loss = module.step(**batch)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def with_torch(size: Size, precision: str, batch: Batch, n_microbatches: int) -> Step:
    """The same weights in stages written by hand."""
    rows, length = batch["input_ids"].shape
    values = values_of(size, precision)
    pipeline = PipelineGPT2(values, size.n_heads, rows, length, n_microbatches, "1f1b")
    optimizer = torch.optim.AdamW(pipeline.module.parameters(), lr=1e-3)

    def step(batch: Batch) -> Tensor | None:
        loss = pipeline.step(**batch)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def agree(size: Size, data: Sequence[Batch], n_microbatches: int) -> Losses:
    """Train both in float64, one step per batch."""
    given = size, "fp64", data[0], n_microbatches
    steps = {AUTOPAR: with_autopar(*given), TORCH: with_torch(*given)}
    losses: Losses = {name: [] for name in steps}
    for batch in data:
        for name, step in steps.items():
            loss = step(batch)
            if loss is not None:
                losses[name].append(loss.item())
    return losses


def timed_pairs(size: Size, batch: Batch, n_microbatches: int, n_pairs: int) -> Pairs:
    """Pairs (autopar's time_s, torch's time_s), in float32."""
    given = size, "model", batch, n_microbatches
    ours, theirs = with_autopar(*given), with_torch(*given)
    for step in (ours, theirs) * N_WARM_UP:
        step(batch)
    return [timed_pair(ours, theirs, batch, i % 2 == 1) for i in range(n_pairs)]


def disagreements(found: Losses, n_steps: int) -> list[str]:
    """The requirements that do not hold, as texts."""
    wrong = []
    for name, losses in found.items():
        if len(losses) != n_steps:
            wrong.append(f"{name} has {len(losses)} losses of {n_steps} steps")
    for index, (a, b) in enumerate(zip(*found.values(), strict=False)):
        if not abs(a - b) <= TOLERANCE * max(1.0, abs(b)):  # NaN is in no tolerance
            wrong.append(f"losses of step {index} differ: {a}, {b}")
    return wrong


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--layers", type=int, default=Size.n_layers)
    given = parser.parse_args(argv)
    size, data = Size(n_layers=given.layers, tied=False), batches(N_LOSSES)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    times: dict[str, Pairs] = {}
    wrong: list[str] = []
    for n in given.microbatches:
        found = autopar.launch(agree, N_RANKS, size, data, n)[-1]
        console.print(loss_table(found, f"loss per step, {n} microbatches, float64"))
        wrong += [f"{n} microbatches: {line}" for line in disagreements(found, len(data))]
        pairs = autopar.launch(timed_pairs, N_RANKS, size, data[0], n, given.pairs)[-1]
        times[f"{AUTOPAR}, {n} microbatches"] = pairs
    console.print(time_table(times, given.pairs, TORCH))
    for line in wrong:
        console.print(line, markup=False, soft_wrap=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
