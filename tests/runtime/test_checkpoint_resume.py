"""A script that is stopped and resumed: the same bits as one that is not, with all it draws."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import OneCycleLR

import autopar
from autopar import Manual
from tests.helpers.jobs import machine
from tests.helpers.pools import Pool

N_STEPS, N_SAVED = 6, 3
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp": {"tp": 2},
    "zero-3": {"dp": 2, "zero": 3},
    "pp": {"pp": 2},
}


class Noisy(nn.Module):
    """The first weight is used again at the end, so two stages hold it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(8, 16), nn.Dropout(0.3), nn.Linear(16, 8)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.down(self.drop(self.up(x).relu())))
        return F.linear(hidden, self.up.weight).square().mean()


class Script:
    """Draws its batches from all generators, and has a schedule of its learning rate."""

    def __init__(self, seed: int, layout: Manual) -> None:
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        self.pm = autopar.parallelize(Noisy(), machine((1, 2)), {"x": draw()}, manual=layout)
        self.optimizer = AdamW(self.pm.parameters(), lr=1e-2)
        self.states = {"schedule": OneCycleLR(self.optimizer, 0.1, 2 * N_STEPS)}

    def train(self, n_steps: int) -> list[float]:
        losses = []
        for _ in range(n_steps):
            losses.append(self.pm.step(x=draw()).item())
            losses.append(self.pm.clip_grad_norm_(0.5).item())
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.states["schedule"].step()
        return losses


def draw() -> Tensor:
    scale = random.random() + float(np.random.rand())
    return torch.randn(8, 8) * scale


def stop_and_resume(path: str, before: Manual, after: Manual) -> list[Any]:
    """The losses and norms of the last steps, without a stop and with; the step that was loaded."""
    script = Script(0, before)
    with autopar.AsyncSaver(path, keep_last=1) as saver:
        script.train(N_SAVED - 1)
        saver.save(script.pm, script.optimizer, step=N_SAVED - 1, states=script.states)
        script.train(1)
        saver.save(script.pm, script.optimizer, step=N_SAVED, states=script.states)
        straight = script.train(N_STEPS - N_SAVED)
    again = Script(1, after)
    step, _ = autopar.load(again.pm, again.optimizer, path, states=again.states)
    return [straight, again.train(N_STEPS - step), step]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_bits(layout: str, workers: Pool, tmp_path: Path) -> None:
    job = workers(2).run(stop_and_resume, str(tmp_path), LAYOUTS[layout], LAYOUTS[layout])
    for straight, resumed, step in job:
        assert step == N_SAVED
        assert resumed == straight


@pytest.mark.parametrize(("before", "after"), [("tp", "zero-3"), ("zero-3", "pp"), ("pp", "tp")])
def test_onto_another_plan(before: str, after: str, workers: Pool, tmp_path: Path) -> None:
    job = workers(2).run(stop_and_resume, str(tmp_path / "c"), LAYOUTS[before], LAYOUTS[after])
    for straight, resumed, _ in job:
        torch.testing.assert_close(resumed, straight, rtol=1e-5, atol=0)
