"""Train a small model with Accelerate's loop, sharded by autopar.

    python -m examples.train_accelerate            starts 2 local processes itself
    torchrun --nproc-per-node 2 -m examples.train_accelerate

What differs from a script for one process: `AutoparAccelerator` for `Accelerator`, a model that
autopar has sharded, and `pm.step` for forward and `accelerator.backward`.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

import autopar
from autopar.integrations.accelerate import AutoparAccelerator
from examples.small_model import collate, make_model, rows

N_ACCUMULATED = 2


def train(n_epochs: int, mesh: Any, options: dict[str, Any] | None = None) -> dict[str, Any]:
    """One rank's part of the job, or with no mesh one process without autopar."""
    kind = Accelerator if mesh is None else AutoparAccelerator
    accelerator = kind(gradient_accumulation_steps=N_ACCUMULATED, cpu=not torch.cuda.is_available())
    set_seed(1)
    data: Any = rows()
    model: Any = make_model()
    if mesh is not None:
        model = autopar.parallelize(model, mesh, collate(data[:8]), **(options or {}))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = LambdaLR(optimizer, lambda i: 0.9**i)
    loader: Any = DataLoader(data, batch_size=8, shuffle=True, collate_fn=collate)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    losses = []
    for _ in range(n_epochs):
        for batch in loader:
            with accelerator.accumulate(model):
                if mesh is None:
                    loss = model(**batch)
                    accelerator.backward(loss)
                else:
                    loss = model.step(**batch, weight=1 / N_ACCUMULATED)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        accelerator.print(f"loss {losses[-1]:.4f}  learning rate {scheduler.get_last_lr()[0]:.2e}")
    weights = accelerator.get_state_dict(model)  # whole, on rank 0
    return {"weights": weights, "losses": losses, "rates": scheduler.get_last_lr()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=5)
    epochs = parser.parse_args().epochs
    if "RANK" in os.environ:
        train(epochs, (1, int(os.environ["WORLD_SIZE"])))
    else:
        autopar.launch(train, 2, epochs, (1, 2))


if __name__ == "__main__":
    main()
