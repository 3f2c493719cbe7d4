"""What the processes of `test_loops.py` run: the examples, and what frameworks are refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from accelerate.state import AcceleratorState
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.utils.data import DataLoader

import autopar
from autopar import AutoparError, Manual
from autopar.integrations.accelerate import AutoparAccelerator
from examples import train_accelerate, train_lightning, train_loop
from examples.small_model import collate, make_model, rows

LAYOUTS = {"tp": Manual(tp=2), "zero3": Manual(dp=2, zero=3), "pp": Manual(pp=2)}
EXAMPLES = ("torch", "accelerate", "lightning")
Result = dict[str, Any]


def example(name: str, mesh: Any, folder: str | None, options: dict[str, Any] | None) -> Result:
    if name == "torch":
        return train_loop.train(5, mesh, options)
    if name == "accelerate":
        try:
            return train_accelerate.train(2, mesh, options)
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)
    return train_lightning.train(2, mesh, folder, options)


def alone() -> dict[str, Result]:
    return {name: example(name, None, None, None) for name in EXAMPLES}


def parallel(folder: str) -> dict[Any, Result]:
    out = {}
    for layout, manual in LAYOUTS.items():
        for name in EXAMPLES:
            place = str(Path(folder) / layout)
            out[name, layout] = example(name, (1, 2), place, {"manual": manual})
    return out | {"refused": refusals(folder), "loaded": loaded(folder)}


def sharded() -> Any:
    return autopar.parallelize(make_model(), (1, 2), collate(rows(8)), manual=LAYOUTS["zero3"])


def loaded(folder: str) -> dict[str, Any]:
    """Lightning's checkpoint of one plan, in another."""
    model = sharded()
    autopar.load(model, None, Path(folder) / "tp" / "last")
    return model.full_state_dict()


def automatic(folder: str) -> None:
    """Lightning's own optimisation, of a loss whose backward has run."""

    class Automatic(train_lightning.OneProcess):
        def training_step(self, batch: Any, index: int) -> Any:
            return self.model.step(**batch)

    fit(Automatic(sharded()), folder)


def own_checkpoints(folder: str) -> None:
    fit(train_lightning.Sharded(sharded()), folder, enable_checkpointing=True)


def fit(module: Any, folder: str, **how: Any) -> None:
    how = {"enable_checkpointing": False, "enable_progress_bar": False, **how}
    trainer = pl.Trainer(
        max_epochs=1, devices=1, strategy=SingleDeviceStrategy("cpu"), logger=False,
        enable_model_summary=False, default_root_dir=folder, **how,
    )  # fmt: skip
    data: Any = rows(16)
    trainer.fit(module, DataLoader(data, batch_size=8, collate_fn=collate))


def with_accelerator(ask: Callable[[AutoparAccelerator], Any], **how: Any) -> None:
    try:
        ask(AutoparAccelerator(cpu=True, **how))
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


# Part of the message -> what is refused.
REFUSED: Mapping[str, Callable[[str], None]] = {
    "loss.backward()": automatic,
    "of which this rank has a shard": own_checkpoints,
    "mixed_precision='bf16'": lambda _: with_accelerator(lambda a: None, mixed_precision="bf16"),
    "accelerator.save_state": lambda folder: with_accelerator(lambda a: a.save_state(folder)),
    "accelerator.load_state": lambda folder: with_accelerator(lambda a: a.load_state(folder)),
    "accelerator.save_model": lambda folder: with_accelerator(
        lambda a: a.save_model(torch.nn.Linear(1, 1), folder)
    ),
}


def refusals(folder: str) -> dict[str, str]:
    out = {}
    for words, run in REFUSED.items():
        try:
            run(folder)
            out[words] = "not refused"
        except AutoparError as error:
            out[words] = str(error)
    return out
