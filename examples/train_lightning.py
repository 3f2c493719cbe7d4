"""Train a small model with Lightning's loop, sharded by autopar.

    python -m examples.train_lightning            starts 2 local processes itself
    torchrun --nproc-per-node 2 -m examples.train_lightning

Every rank runs a Trainer of its own, for one device, and autopar synchronises them. The module
optimises by hand, because `pm.step` runs forward and backward. `SaveShards` writes checkpoints:
those of Lightning would have one rank's shards, and are refused.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

import autopar
from examples.small_model import collate, make_model, rows


class OneProcess(pl.LightningModule):
    """The module without autopar: Lightning optimises."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.losses: list[float] = []

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor | None:
        loss: Tensor = self.model(**batch)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: dict[str, Tensor], index: int) -> None:
        self.losses.append(self.model(**batch).item())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        scheduler = LambdaLR(optimizer, lambda i: 0.9**i)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Sharded(OneProcess):
    """The same around a parallel module."""

    def __init__(self, model: autopar.ParallelModule) -> None:
        super().__init__(model)
        self.automatic_optimization = False

    def training_step(self, batch: dict[str, Tensor], index: int) -> None:
        optimizer, scheduler = self.optimizers(), self.lr_schedulers()
        loss = self.model.step(**batch)
        self.model.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        self.log("loss", loss)
        self.losses.append(loss.item())


class SaveShards(pl.Callback):
    """A checkpoint after each epoch, which any mesh and plan can load."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def on_train_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        (optimizer,) = trainer.optimizers
        autopar.save(module.model, optimizer, self.folder / "last", step=trainer.global_step)


def train(
    n_epochs: int, mesh: Any, folder: str | None = None, options: dict[str, Any] | None = None
) -> dict[str, Any]:
    """One rank's part of the job, or with no mesh one process without autopar."""
    data: Any = rows()
    model: Any = make_model()
    module: type[OneProcess] = OneProcess
    how: dict[str, Any] = {"gradient_clip_val": 0.5}
    if mesh is not None:
        model = autopar.parallelize(model, mesh, collate(data[:8]), **(options or {}))
        module, how = Sharded, {"callbacks": [SaveShards(folder)] if folder else []}
    pl.seed_everything(1, verbose=False)  # the same order of data on every rank
    device = (
        torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
    )
    trainer = pl.Trainer(
        max_epochs=n_epochs, devices=1, strategy=SingleDeviceStrategy(device),
        use_distributed_sampler=False, enable_checkpointing=False, logger=False,
        enable_progress_bar=False, enable_model_summary=False, **how,
    )  # fmt: skip
    own = module(model)
    loaders: list[Any] = [
        DataLoader(data, batch_size=8, shuffle=True, collate_fn=collate),
        DataLoader(data[:16], batch_size=8, collate_fn=collate),
    ]
    trainer.fit(own, *loaders)
    whole = model.state_dict() if mesh is None else model.full_state_dict()  # on rank 0
    return {"weights": whole, "losses": own.losses}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=5)
    epochs = parser.parse_args().epochs
    if "RANK" in os.environ:
        print(train(epochs, (1, int(os.environ["WORLD_SIZE"])))["losses"][-1])
    else:
        print(autopar.launch(train, 2, epochs, (1, 2))[0]["losses"][-1])


if __name__ == "__main__":
    main()
