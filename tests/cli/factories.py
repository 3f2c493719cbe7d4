"""A folder with model factories (`tiny.py`) and a configuration, where commands run."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import Result

from tests.helpers.commands import command

Run = Callable[..., Result]

FACTORIES = """
import os
import torch
from torch import nn


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return self.down(torch.relu(self.up(x))).square().mean()


class Rare(Mlp):
    def forward(self, x):
        return torch.fake_quantize_per_tensor_affine(self.up(x), 0.1, 0, 0, 255).mean()


class Columns(Mlp):
    def forward(self, x):
        return torch.renorm(self.up(x), 2, 1, 0.1).mean()


def mlp():
    print("printed by the factory")
    os.write(1, b"written by a library\\n")
    torch.manual_seed(0)
    return Mlp(), {"x": torch.randn(8, 16)}


def rare():
    return Rare(), {"x": torch.randn(8, 16)}


def columns():
    return Columns(), {"x": torch.randn(8, 16)}


def predictor():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    return model, (torch.randn(8, 16),)


def squares(outputs, batch):
    return (outputs - batch[0]).square().mean()


class Loss:
    pass


number = 3


def broken():
    return 1 / 0


def alone():
    return Mlp()
"""
CONFIG = {
    "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": 1, "n_embd": 32,
    "n_head": 4, "vocab_size": 64, "n_positions": 16, "bos_token_id": 0, "eos_token_id": 0,
    "loss_type": "ForCausalLM",
}  # fmt: skip
SIZES = ("--batch", "4", "--seq", "16")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Runs one command in a folder with `tiny.py` and `config.json`."""
    (tmp_path / "tiny.py").write_text(FACTORIES)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield command
    sys.modules.pop("tiny", None)
