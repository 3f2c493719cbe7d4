"""What saving takes, and what training loses by it: `make bench-checkpoints`.

A GPT-2 trains on two processes. Three things are measured in one run: steps alone, `autopar.save`,
and steps while an `AsyncSaver` writes. Its stall is the time inside `saver.save`; steps beside the
writing take longer where the two share cores, which is counted apart.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import autopar
from autopar import Manual
from autopar.units import format_bytes, format_seconds

N_FIRST = 5  # steps that warm up


@dataclass(frozen=True)
class Times:
    """Seconds on rank 0; medians, but for `first_stall_s`, in which buffers are made."""

    step_s: float
    save_s: float
    load_s: float
    first_stall_s: float
    stall_s: float
    beside_s: float
    n_bytes: int


def make_model(width: int, n_layers: int) -> nn.Module:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "gpt2", n_layer=n_layers, n_embd=width, n_head=8, vocab_size=8192, n_positions=128
    )
    return AutoModelForCausalLM.from_config(config)


def job(folder: str, width: int, n_layers: int, n_steps: int, n_saves: int, zero: int) -> Times:
    """`n_saves` saves beside training, one every `n_steps` steps."""
    torch.manual_seed(0)
    tokens = torch.randint(8192, (8, 128))
    batch: dict[str, Any] = {"input_ids": tokens, "labels": tokens}
    module = autopar.parallelize(
        make_model(width, n_layers), (1, 2), batch, manual=Manual(dp=2, zero=zero)
    )
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)

    def step() -> None:
        module.step(**batch)
        optimizer.step()
        optimizer.zero_grad()

    alone = [timed(step) for _ in range(N_FIRST + n_steps)][N_FIRST:]
    plain = f"{folder}/plain"
    saves = [timed(lambda: autopar.save(module, optimizer, plain)) for _ in range(3)]
    loads = [timed(lambda: autopar.load(module, optimizer, plain)) for _ in range(3)]
    stalls, beside = [], []
    with autopar.AsyncSaver(f"{folder}/steps", keep_last=2) as saver:
        for k in range(n_saves + 1):
            number = k
            stalls.append(timed(lambda: saver.save(module, optimizer, step=number)))  # noqa: B023
            written = Path(folder) / "steps" / f"step-{k:08d}"
            for _ in range(n_steps):
                is_beside = not written.exists()
                took_s = timed(step)
                if is_beside:
                    beside.append(took_s)
    return Times(
        statistics.median(alone), statistics.median(saves), statistics.median(loads), stalls[0],
        statistics.median(stalls[1:]),
        statistics.median(beside or [0.0]),
        sum(f.stat().st_size for f in Path(plain).iterdir()),
    )  # fmt: skip


def timed(run: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10, help="measured between two saves")
    parser.add_argument("--every", type=int, default=100, help="steps of the interval in print")
    parser.add_argument("--saves", type=int, default=3)
    parser.add_argument("--zero", type=int, default=3, help="0: parameters are replicas, compared")
    given = parser.parse_args()
    folder = tempfile.mkdtemp()
    try:
        sizes = given.width, given.layers, given.steps, given.saves, given.zero
        found = autopar.launch(job, 2, folder, *sizes)[0]
    finally:
        shutil.rmtree(folder)
    seconds = format_seconds
    print(f"checkpoint {format_bytes(found.n_bytes)}, step {seconds(found.step_s)}")
    print(f"autopar.save {seconds(found.save_s)}, autopar.load {seconds(found.load_s)}")
    print(
        f"AsyncSaver: stall {seconds(found.stall_s)} (first {seconds(found.first_stall_s)}), "
        f"{100 * found.stall_s / (given.every * found.step_s):.2f}% of {given.every} steps; "
        f"a step beside the writing {seconds(found.beside_s)}"
    )


if __name__ == "__main__":
    main()
