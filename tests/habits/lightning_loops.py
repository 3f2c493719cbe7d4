"""Habits of Lightning and Fabric: several optimizers, groups added later, clipping."""

from __future__ import annotations

from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.nn import functional as F

from autopar import BatchError, NotSupportedError
from tests.habits.table import Batch, Run, adamw, habit
from tests.habits.tasks import backward, parallelize

SECTION = "Lightning"


class Gan(nn.Module):
    """Both losses of a generator and a discriminator; `turn` says which one counts."""

    def __init__(self) -> None:
        super().__init__()
        self.gen = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6))
        self.disc = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, z: Tensor, real: Tensor, turn: Any) -> Tensor:
        made = self.gen(z)
        of_gen = F.softplus(-self.disc(made)).mean()
        fooled = F.softplus(self.disc(made.detach())).mean()
        of_disc = F.softplus(-self.disc(real)).mean() + fooled
        if isinstance(turn, str):
            return of_gen if turn == "gen" else of_disc
        return torch.where(turn == 0, of_gen, of_disc)


def noise(seed: int, turn: Any) -> Batch:
    g = torch.Generator().manual_seed(seed)
    z = torch.randn(8, 4, generator=g, dtype=torch.float64)
    return {"z": z, "real": torch.randn(8, 6, generator=g, dtype=torch.float64), "turn": turn}


def turns(run: Run, toggles: bool) -> None:
    """Two optimizers step in turns; a toggled one freezes what is not its own."""
    kinds = ("gen", "disc")
    parallelize(run, noise(0, torch.tensor(0)))
    optimizers = [[adamw(getattr(m, kind).parameters()) for m in run.both()] for kind in kinds]
    for seed in range(2):
        for turn, kind in enumerate(kinds):
            for m in run.both():
                for name, p in m.named_parameters():
                    p.requires_grad = not toggles or name.startswith(kind)
            backward(run, noise(seed, torch.tensor(turn)))
            for optimizer in optimizers[turn]:
                optimizer.step()
            for m in run.both():
                m.requires_grad_(True).zero_grad()


@habit(SECTION, "two optimizers in turns, the turn a tensor: `torch.where(turn == 0, ...)`",
       kind=Gan)  # fmt: skip
def two_optimizers(run: Run) -> None:
    turns(run, toggles=False)


@habit(SECTION, "the same with `toggle_optimizer`", kind=Gan)
def toggled_optimizers(run: Run) -> None:
    turns(run, toggles=True)


@habit(SECTION, "the turn a string, each with a loss of its own", "pass it as a tensor", kind=Gan,
       refused=(BatchError, "`turn`"))  # fmt: skip
def turn_by_name(run: Run) -> None:
    parallelize(run, noise(0, "gen"))
    run.pm.step(**noise(0, "disc"))


@habit(SECTION, "`fabric.backward(loss)`, `self.manual_backward(loss)`", "leave it out",
       refused=(NotSupportedError, "backward already"))  # fmt: skip
def fabric(run: Run) -> None:
    f = Fabric(accelerator="cpu", devices=1)
    f.backward(run.pm.step(**run.batch(0)))


@habit(SECTION, "`fabric.clip_gradients(pm, optimizer, max_norm=c)`")
def fabric_clip(run: Run) -> None:
    f = Fabric(accelerator="cpu", devices=1)
    opts = run.optimizers()
    run.backward(run.batch(0))
    for m, o in zip(run.both(), opts, strict=True):
        f.clip_gradients(m, o, max_norm=0.01)
    run.update(opts)


@habit(SECTION, "`fabric.setup(pm, optimizer)`, then `step` of both")
def fabric_setup(run: Run) -> None:
    f = Fabric(accelerator="cpu", devices=1)
    own, alone = run.optimizers()
    module, optimizer = f.setup(run.pm, own)
    for seed in range(2):
        found, wanted = module.step(**run.batch(seed)), run.alone(**run.batch(seed))
        wanted.backward()
        run.losses.append((found.item(), wanted.item()))
        run.update((optimizer, alone))
