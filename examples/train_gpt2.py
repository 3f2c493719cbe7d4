"""Train an unmodified Hugging Face GPT-2 on four processes with the plan autopar chose.

    python examples/train_gpt2.py            starts 4 local processes itself
    torchrun --nproc-per-node 4 examples/train_gpt2.py

A byte-level GPT-2 (4 layers, width 256) learns a book of wisdom for 40 steps. It is trained in
float32, beside the same model on rank 0 alone, and in mixed precision (bfloat16). All start from
the same weights, and their losses are printed side by side.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from transformers import AutoConfig, AutoModelForCausalLM

import autopar
from autopar.measured.live_bytes import LiveBytes
from autopar.runtime.tensors import local_of
from autopar.units import format_bytes, format_seconds

TEXT = Path(__file__).parent / "wisdom.txt"
LENGTH = 64
ROWS = 16
MEASURED_STEP = 2  # the step whose live tensors are counted: the optimizer has its state by then


def make_model() -> torch.nn.Module:
    """GPT2LMHeadModel over bytes, dropout off, random weights from a fixed seed."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "gpt2", n_layer=4, n_embd=256, n_head=8, vocab_size=256, n_positions=LENGTH,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model: torch.nn.Module = AutoModelForCausalLM.from_config(config)
    return model


def batches(n_steps: int) -> list[dict[str, torch.Tensor]]:
    """The same global batches on every rank."""
    text = torch.frombuffer(bytearray(TEXT.read_bytes()), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(1)
    out = []
    for _ in range(n_steps):
        starts = torch.randint(0, len(text) - LENGTH, (ROWS,), generator=generator)
        rows = torch.stack([text[s : s + LENGTH] for s in starts.tolist()])
        out.append({"input_ids": rows, "labels": rows.clone()})
    return out


def train(n_steps: int) -> None:
    """One rank's part of the job."""
    rank = int(os.environ.get("RANK", "0"))
    console = Console(quiet=rank != 0, highlight=False)
    model, data = make_model(), batches(n_steps)
    console.print("planning ...")
    begun = time.perf_counter()
    pm = autopar.parallelize(model, (1, 4), example_inputs=data[0])
    console.print(f"planned in {format_seconds(time.perf_counter() - begun)}\n")
    console.print(pm.plan.explain(), markup=False, soft_wrap=True)
    console.print(f"\ngenerated code: {pm.code_path}", markup=False)
    if rank == 0:
        page = pm.code_path.with_name("plan.html")
        pm.plan.report(page, replan=False)  # the other ranks wait
        console.print(f"the plan as a page: {page}\n", markup=False)
    optimizer = torch.optim.AdamW(pm.parameters(), lr=1e-3)
    alone = torch.optim.AdamW(model.parameters(), lr=1e-3) if rank == 0 else None
    mixed = autopar.parallelize(make_model(), (1, 4), data[0], precision="bf16-mixed")
    mixed_optimizer = torch.optim.AdamW(mixed.parameters(), lr=1e-3)

    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    times_s: list[float] = []
    live_bytes = 0
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("training", total=n_steps)
        for i, batch in enumerate(data, start=1):
            begun = time.perf_counter()
            if i == MEASURED_STEP:
                with LiveBytes([*pm.shards.values(), *optimizer_tensors(optimizer)]) as live:
                    loss = parallel_step(pm, optimizer, batch)
                live_bytes = live.peak_bytes
            else:
                loss = parallel_step(pm, optimizer, batch)
            if i > MEASURED_STEP:
                times_s.append(time.perf_counter() - begun)
            in_half = parallel_step(mixed, mixed_optimizer, batch)
            reference = one_process_step(model, alone, batch)
            progress.advance(task)
            if reference is not None and (i % 10 == 0 or i == 1):
                progress.print(
                    f"step {i:3}  loss {loss:.6f}  one process {reference:.6f} "
                    f"({loss.item() - reference:+.0e})  bf16-mixed {in_half:.4f}"
                )
    predicted = pm.plan.predicted
    console.print(
        f"\nfloat32:\nstep time      predicted {format_seconds(predicted.step_time_s)}, "
        f"measured {format_seconds(statistics.median(times_s))} (median)\n"
        f"peak memory    predicted {format_bytes(predicted.peak_bytes)}, "
        f"measured {format_bytes(live_bytes)} of live tensors per rank"
    )


def parallel_step(pm: Any, optimizer: Any, batch: Any) -> torch.Tensor:
    """One training step of the sharded model."""
    loss: torch.Tensor = pm.step(**batch)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The optimizer's state, which lives between steps."""
    states = optimizer.state.values()
    tensors = [v for state in states for v in state.values() if isinstance(v, torch.Tensor)]
    return [local_of(v) for v in tensors]


def one_process_step(model: torch.nn.Module, optimizer: Any, batch: Any) -> float | None:
    """The same step without autopar, on rank 0 only; the others wait for it."""
    if optimizer is None:
        return None
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=40)
    steps = parser.parse_args().steps
    if "RANK" in os.environ:
        train(steps)
    else:
        autopar.launch(train, 4, steps)


if __name__ == "__main__":
    main()
