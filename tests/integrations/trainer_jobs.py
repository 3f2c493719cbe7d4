"""What the processes of `test_transformers.py` run: Trainers, plain and parallel."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from autopar import AutoparError, Manual
from autopar.integrations.transformers import AutoparTrainer
from examples import train_transformers

VOCABULARY, LENGTH, ROWS = 32, 8, 44
LAYOUTS = {"tp": Manual(tp=2), "zero3": Manual(dp=2, zero=3), "pp": Manual(pp=2)}
Result = dict[str, Any]


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "gpt2", n_layer=2, n_embd=16, n_head=2, vocab_size=VOCABULARY, n_positions=LENGTH,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model: nn.Module = AutoModelForCausalLM.from_config(config)
    return model.double()


class Own(nn.Module):
    """A model whose forward takes no count of labels: the Trainer takes means of means."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm = nn.Embedding(VOCABULARY, 16), nn.LayerNorm(16)
        self.head = nn.Linear(16, VOCABULARY)
        self.double()

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.norm(self.embed(input_ids)))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


def rows(n: int = ROWS) -> list[dict[str, Tensor]]:
    """Rows whose number of labels differs."""
    generator = torch.Generator().manual_seed(1)
    out = []
    for i, ids in enumerate(torch.randint(VOCABULARY, (n, LENGTH), generator=generator)):
        labels = ids.clone()
        labels[: i % 5] = -100
        out.append({"input_ids": ids, "labels": labels})
    return out


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return iter(rows())


class Norms(TrainerCallback):  # type: ignore[misc]
    """A callback that looks at the model that trains."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
        self.seen.append(sum(p.detach().pow(2).sum().item() for p in model.parameters()))


def metrics(prediction: Any) -> dict[str, float]:
    best = prediction.predictions.argmax(-1)
    return {
        "accuracy": float((best == prediction.label_ids).mean()),
        "square": float((prediction.predictions**2).mean()),
    }


def squared(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """A loss of one's own: the first output is the logits, as there are no labels."""
    loss = nn.functional.cross_entropy(
        outputs[0].flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=-100
    )
    return loss / num_items_in_batch + 0.01 * outputs["logits"].pow(2).mean()


# Name -> (model, arguments, keywords of the Trainer).
WAYS: Mapping[str, tuple[Callable[[], nn.Module], dict[str, Any], dict[str, Any]]] = {
    "accumulated": (gpt2, {"gradient_accumulation_steps": 2, "weight_decay": 0.1}, {}),
    "smoothed": (gpt2, {"label_smoothing_factor": 0.1}, {}),
    "own loss": (gpt2, {"gradient_accumulation_steps": 2}, {"compute_loss_func": squared}),
    "means": (Own, {"gradient_accumulation_steps": 3, "num_train_epochs": 1, "max_steps": -1}, {}),
    "stream": (Own, {"logging_strategy": "no"}, {"train_dataset": Stream()}),
    "sgd": (
        Own,
        {"max_grad_norm": 0.0, "lr_scheduler_type": "cosine"},
        {"optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})},
    ),
}


def make_trainer(name: str, folder: str, layout: str | None, **more: Any) -> Trainer:
    make, own, keywords = WAYS[name]
    arguments: dict[str, Any] = {
        "max_steps": 4, "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4,
        "learning_rate": 1e-2, "max_grad_norm": 0.5, "warmup_steps": 1, "logging_steps": 1,
        "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "no", "report_to": [],
        "use_cpu": True, "disable_tqdm": True, "seed": 3, **own, **more,
    }  # fmt: skip
    given: dict[str, Any] = {
        "train_dataset": rows(), "eval_dataset": rows(8), "compute_metrics": metrics, **keywords
    }  # fmt: skip
    if layout is None:
        trainer = Trainer(make(), TrainingArguments(folder, **arguments), **given)
    else:
        manual = Manual() if layout == "alone" else LAYOUTS[layout]
        trainer = AutoparTrainer(
            make(), TrainingArguments(folder, **arguments),
            mesh=(1, manual.n_ranks), options={"manual": manual}, **given,
        )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    return trainer


def result(trainer: Trainer) -> Result:
    """Weights, and all that was logged but times."""
    logs = [
        {k: v for k, v in log.items() if "runtime" not in k and "per_second" not in k}
        for log in trainer.state.log_history
    ]
    return {"weights": trainer.model.state_dict(), "logs": logs}


def all_ways(folder: str, layout: str | None) -> dict[str, Result]:
    """Each way under one layout; None: the plain Trainer."""
    out = {}
    for name in WAYS if layout in (None, "zero3") else ("accumulated",):
        callback = Norms()
        trainer = make_trainer(name, f"{folder}/{name}", layout)
        if layout != "pp":  # a rank has the parameters of its own stage
            trainer.add_callback(callback)
        trainer.train()
        out[name] = result(trainer) | {"norms": callback.seen}
        if name == "accumulated":
            trainer.save_model(f"{folder}/saved")
    return out


def resumed(folder: str, layout: str | None) -> list[Result]:
    """Four steps with checkpoints, the best of which is loaded; the last two again."""
    how = {"save_strategy": "steps", "save_steps": 2, "load_best_model_at_end": True,
           "metric_for_best_model": "eval_square", "greater_is_better": False}  # fmt: skip
    first = make_trainer("accumulated", folder, layout, **how)
    first.train()
    again = make_trainer("accumulated", folder, layout, **how)
    again.train(resume_from_checkpoint=str(Path(folder) / "checkpoint-2"))
    return [result(first), result(again)]


class OwnLoss(AutoparTrainer):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Tensor:
        raise AssertionError("never called")


REFUSED: Mapping[str, tuple[type[AutoparTrainer], dict[str, Any], dict[str, Any]]] = {
    "bf16=True": (AutoparTrainer, {"bf16": True}, {}),
    "activation_checkpointing=True": (AutoparTrainer, {"gradient_checkpointing": True}, {}),
    "neftune_noise_alpha": (AutoparTrainer, {"neftune_noise_alpha": 5.0}, {}),
    "lomo": (AutoparTrainer, {"optim": "lomo"}, {}),
    "OwnLoss.compute_loss": (OwnLoss, {}, {}),
    "compute_loss_func with Own": (AutoparTrainer, {}, {"compute_loss_func": squared}),
    "optimizers=": (
        AutoparTrainer,
        {},
        {"optimizers": (torch.optim.SGD([nn.Parameter(torch.ones(1))]), None)},
    ),
}


def refusals(folder: str) -> dict[str, str]:
    """Part of a message -> the whole message."""
    out = {}
    for name, (kind, arguments, keywords) in REFUSED.items():
        given = TrainingArguments(folder, use_cpu=True, report_to=[], **arguments)
        try:
            kind(Own(), given, mesh=(1, 1), train_dataset=rows(), **keywords)
            out[name] = "not refused"
        except AutoparError as error:
            out[name] = str(error)
    return out


def job(folder: str, layouts: list[str | None]) -> dict[Any, Any]:
    """All that one process does, so that few are started."""
    out: dict[Any, Any] = {layout: all_ways(f"{folder}/{layout}", layout) for layout in layouts}
    parallel = layouts != [None]
    out["resumed"] = resumed(f"{folder}/resumed", "zero3" if parallel else None)
    mesh, options = ((1, 2), {"manual": LAYOUTS["tp"]}) if parallel else (None, None)
    out["example"] = train_transformers.train(4, mesh, options)
    return out
