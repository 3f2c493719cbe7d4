"""Habits of Lightning and Fabric: several optimizers, groups added later, clipping."""

from __future__ import annotations

from typing import Any

from autopar import BatchError, NotSupportedError
from tests.habits.table import Run, habit
from tests.habits.tasks import parallelize
from tests.habits.tutorial_models import GanOfBoth, numbers, turns

SECTION = "Lightning"


def new_fabric() -> Any:
    """Fabric on this rank; to import it takes two seconds."""
    from lightning.fabric import Fabric

    return Fabric(accelerator="cpu", devices=1)


@habit(SECTION, "two optimizers in turns, the turn a tensor: `torch.where(turn == 0, ...)`",
       kind=GanOfBoth)  # fmt: skip
def two_optimizers(run: Run) -> None:
    turns(run)


@habit(SECTION, "the same with `toggle_optimizer`", kind=GanOfBoth)
def toggled_optimizers(run: Run) -> None:
    turns(run, toggles=True)


@habit(SECTION, "the turn a string, each with a loss of its own", "pass it as a tensor",
       kind=GanOfBoth, refused=(BatchError, "`turn`"))  # fmt: skip
def turn_by_name(run: Run) -> None:
    batch = numbers(0, "noise", "real")
    parallelize(run, batch | {"turn": "g"})
    run.pm.step(**batch, turn="d")


@habit(SECTION, "`fabric.backward(loss)`, `self.manual_backward(loss)`", "leave it out",
       refused=(NotSupportedError, "backward already"))  # fmt: skip
def fabric(run: Run) -> None:
    f = new_fabric()
    f.backward(run.pm.step(**run.batch(0)))


@habit(SECTION, "`fabric.clip_gradients(pm, optimizer, max_norm=c)`")
def fabric_clip(run: Run) -> None:
    f = new_fabric()
    opts = run.optimizers()
    run.backward(run.batch(0))
    for m, o in zip(run.both(), opts, strict=True):
        f.clip_gradients(m, o, max_norm=0.01)
    run.update(opts)


@habit(SECTION, "`fabric.setup(pm, optimizer)`, then `step` of both")
def fabric_setup(run: Run) -> None:
    f = new_fabric()
    own, alone = run.optimizers()
    module, optimizer = f.setup(run.pm, own)
    for seed in range(2):
        found, wanted = module.step(**run.batch(seed)), run.alone(**run.batch(seed))
        wanted.backward()
        run.losses.append((found.item(), wanted.item()))
        run.update((optimizer, alone))
