"""nanoGPT's training loop in plain torch, sharded by autopar.

    python -m examples.train_loop            starts 2 local processes itself
    torchrun --nproc-per-node 2 -m examples.train_loop

A DataLoader, warm-up and cosine learning rate, gradient accumulation, clipping, an estimate of the
loss in evaluation mode, weight decay for matrices only.
"""

from __future__ import annotations

import argparse
import math
import os
from typing import Any

import torch
from torch.utils.data import DataLoader

import autopar
from examples.small_model import collate, make_model, rows

N_ACCUMULATED, N_WARM, RATE = 2, 2, 1e-2


def learning_rate(step: int, n_steps: int) -> float:
    """Warm-up, then half a cosine to a tenth."""
    if step < N_WARM:
        return RATE * (step + 1) / (N_WARM + 1)
    done = (step - N_WARM) / max(1, n_steps - N_WARM)
    return RATE * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


@torch.no_grad()
def estimate_loss(model: Any, batches: list[Any]) -> float:
    """The mean over batches, in evaluation mode."""
    model.eval()
    losses = [model(**batch).item() for batch in batches]
    model.train()
    return sum(losses) / len(losses)


def train(n_steps: int, mesh: Any, options: dict[str, Any] | None = None) -> dict[str, Any]:
    """One rank's part of the job, or with no mesh one process without autopar."""
    data: Any = rows()
    model: Any = make_model()
    if mesh is not None:
        model = autopar.parallelize(model, mesh, collate(data[:8]), **(options or {}))
    decay = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=RATE
    )
    order = torch.Generator().manual_seed(1)  # the same batches on every rank
    loader: Any = DataLoader(data, batch_size=8, shuffle=True, collate_fn=collate, generator=order)
    held_out = [collate(data[:8]), collate(data[8:16])]
    losses, batches = [], iter(loader)
    for step in range(n_steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, n_steps)
        if step % 2 == 0:
            losses.append(estimate_loss(model, held_out))
        for _ in range(N_ACCUMULATED):
            batch = next(batches, None)
            if batch is None:
                batches = iter(loader)
                batch = next(batches)
            if mesh is None:
                loss = model(**batch)
                (loss / N_ACCUMULATED).backward()
            else:
                loss = model.step(**batch, weight=1 / N_ACCUMULATED)
        clip = torch.nn.utils.clip_grad_norm_ if mesh is None else clip_parallel
        clip(model.parameters() if mesh is None else model, 0.5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    weights = model.state_dict() if mesh is None else model.full_state_dict()  # on rank 0
    return {"weights": weights, "losses": losses}


def clip_parallel(model: autopar.ParallelModule, max_norm: float) -> torch.Tensor:
    """Over all stages; without stages `clip_grad_norm_(pm.parameters(), c)` does the same."""
    return model.clip_grad_norm_(max_norm)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=20)
    steps = parser.parse_args().steps
    if "RANK" in os.environ:
        print(train(steps, (1, int(os.environ["WORLD_SIZE"])))["losses"][-1])
    else:
        print(autopar.launch(train, 2, steps, (1, 2))[0]["losses"][-1])


if __name__ == "__main__":
    main()
