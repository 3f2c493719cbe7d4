"""Train a Hugging Face GPT-2 with the Hugging Face Trainer, sharded by autopar.

    python examples/train_transformers.py            starts 2 local processes itself
    torchrun --nproc-per-node 2 examples/train_transformers.py

What differs from a script for one process: `AutoparTrainer` with a mesh, for `Trainer`.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

import autopar
from autopar.integrations.transformers import AutoparTrainer

TEXT = Path(__file__).parent / "wisdom.txt"
LENGTH = 32


def make_model(width: int = 64) -> torch.nn.Module:
    """GPT2LMHeadModel over bytes, dropout off, random weights from a fixed seed."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "gpt2", n_layer=2, n_embd=width, n_head=4, vocab_size=256, n_positions=LENGTH,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model: torch.nn.Module = AutoModelForCausalLM.from_config(config)
    return model


def rows() -> list[dict[str, torch.Tensor]]:
    """The text, cut into rows; the labels of every third row begin late."""
    text = torch.frombuffer(bytearray(TEXT.read_bytes()), dtype=torch.uint8).long()
    out = []
    for i, ids in enumerate(text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)):
        labels = ids.clone()
        if i % 3 == 0:
            labels[: LENGTH // 2] = -100
        out.append({"input_ids": ids, "labels": labels})
    return out


def make_trainer(
    folder: str, n_steps: int, mesh: Any, options: dict[str, Any] | None = None
) -> Trainer:
    """The Trainer of one process if `mesh` is None, else the parallel one."""
    arguments = TrainingArguments(
        output_dir=folder, max_steps=n_steps, per_device_train_batch_size=8,
        gradient_accumulation_steps=2, learning_rate=3e-3, warmup_steps=2,
        lr_scheduler_type="cosine", weight_decay=0.1, max_grad_norm=1.0, logging_steps=5,
        eval_strategy="steps", eval_steps=10, save_strategy="no", report_to=[], disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )  # fmt: skip
    data = rows()
    train, test = data[:-16], data[-16:]
    model = make_model()
    if mesh is None:
        return Trainer(model, arguments, train_dataset=train, eval_dataset=test)
    return AutoparTrainer(
        model, arguments, train_dataset=train, eval_dataset=test, mesh=mesh, options=options
    )


def train(n_steps: int, mesh: Any, options: dict[str, Any] | None = None) -> dict[str, Any]:
    """One rank's part of the job; returns the trained weights and the losses logged."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(folder, n_steps, mesh, options)
        trainer.train()
        losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
        losses += [log["eval_loss"] for log in trainer.state.log_history if "eval_loss" in log]
        return {"weights": trainer.model.state_dict(), "losses": losses}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=20)
    steps = parser.parse_args().steps
    if "RANK" in os.environ:
        train(steps, (1, int(os.environ["WORLD_SIZE"])))
    else:
        autopar.launch(train, 2, steps, (1, 2))


if __name__ == "__main__":
    main()
