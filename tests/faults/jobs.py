"""The run that faults hit: two ranks train, and save every second step; it goes on if it can."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import autopar
from autopar import Manual
from tests.faults.faults import Fault, arm, disarm
from tests.helpers.jobs import machine

N_RANKS, N_STEPS = 2, 8
LAYOUTS = {"one stage": Manual(dp=2, zero=3), "two stages": Manual(pp=2, microbatch_size=4)}


class Model(nn.Module):
    """Dropout, so that resumed random numbers count, and layers for two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(16, 32), nn.Dropout(0.1), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.drop(self.up(x).relu())).square().mean()


def batch(step: int) -> dict[str, Any]:
    return {"x": torch.randn(8, 16, generator=torch.Generator().manual_seed(step))}


def train(folder: str, layout: str, fault: Fault | None) -> str:
    """A digest of all parameters after `N_STEPS` steps; goes on from the newest checkpoint.

    Every other save is made beside training.
    """
    torch.manual_seed(0)
    manual = LAYOUTS[layout]
    pm = autopar.parallelize(Model(), machine((1, N_RANKS)), batch(0), manual=manual)
    optimizer = torch.optim.AdamW(pm.parameters(), lr=1e-2)
    checkpoints, done = Path(folder) / "checkpoints", 0
    if any(checkpoints.glob("step-*")):
        done, _ = autopar.load(pm, optimizer, checkpoints)
    arm(fault, Path(folder))
    saver = autopar.AsyncSaver(checkpoints, keep_last=2)
    for step in range(done, N_STEPS):
        pm.step(**batch(step))
        optimizer.step()
        optimizer.zero_grad()
        if step % 4 == 1:
            saver.save(pm, optimizer, step=step + 1)
        elif step % 4 == 3:
            saver.wait()
            autopar.save(pm, optimizer, checkpoints / f"step-{step + 1}", step=step + 1)
    saver.wait()
    disarm()
    whole = pm.full_state_dict()
    hashed = hashlib.sha256()
    for name in sorted(whole):
        hashed.update(whole[name].numpy().tobytes())
    return hashed.hexdigest() if whole else ""
