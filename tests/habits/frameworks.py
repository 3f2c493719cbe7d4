"""Habits of mixed precision, wrappers and frameworks; `tests/integrations` has whole loops."""

from __future__ import annotations

import copy

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DataParallel, DistributedDataParallel

from autopar import NotSupportedError
from tests.habits.table import STAGES_FIRST as ALL
from tests.habits.table import Run, habit
from tests.habits.tasks import trains

SECTION = "Wrappers and frameworks"


def rows(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(8, 8, generator=generator, dtype=torch.float64)}


class Holder(nn.Module):
    """A user's module around a parallel one."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.own = inner, nn.Linear(2, 2)


@habit(SECTION, "`FullyShardedDataParallel(pm)`", "the plan shards, ZeRO-3 included",
       refused=(NotSupportedError, "FSDP"), layouts=ALL)  # fmt: skip
def fsdp(run: Run) -> None:
    FullyShardedDataParallel(run.pm, device_id=torch.device("cpu"))


@habit(SECTION, "`fully_shard(pm)`", "the plan shards, ZeRO-3 included",
       refused=(NotSupportedError, "FSDP"), layouts=ALL)  # fmt: skip
def sharded_fully(run: Run) -> None:
    fully_shard(run.pm)


@habit(SECTION, "`DistributedDataParallel(own)`, `own` a module that contains `pm`",
       "call `pm.step` itself", refused=(NotSupportedError, "contains"), layouts=ALL)  # fmt: skip
def ddp_around(run: Run) -> None:
    DistributedDataParallel(Holder(run.pm))


@habit(SECTION, "`DataParallel(pm)(**batch)`", "call `pm.step` itself",
       refused=(NotSupportedError, "pm.step"))  # fmt: skip
def data_parallel(run: Run) -> None:
    DataParallel(run.pm)(**run.batch(0))


@habit(SECTION, "`own.load_state_dict(...)`", "use `autopar.load`",
       refused=(NotSupportedError, "autopar.load"))  # fmt: skip
def load_around(run: Run) -> None:
    Holder(run.pm).load_state_dict({}, strict=False)


@habit(SECTION, "`torch.compile(pm)`, then `step` and evaluation",
       "the generated program runs as it is", layouts=ALL)  # fmt: skip
def compiled(run: Run) -> None:
    optimizers, pm = run.optimizers(), torch.compile(run.pm)
    for seed in range(2):
        batch = run.batch(seed)
        loss = pm.step(**batch)  # type: ignore[attr-defined]
        alone: Tensor = run.alone(**batch)
        alone.backward()
        run.losses.append((loss.item(), alone.item()))
        run.update(optimizers)
    for m in run.both():
        m.eval()
    batch = run.batch(3)
    run.losses.append((pm(**batch).item(), run.alone(**batch).item()))


@trains(SECTION, "`model.layers[i] = torch.compile(model.layers[i])`, as torchtitan",
        batches=rows, layouts=ALL)  # fmt: skip
class CompiledLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.layers[1] = torch.compile(self.layers[1], backend="eager")  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x.square().mean()


@habit(SECTION, 'the loss: `f"{loss:.3f}"`, `copy.deepcopy(loss)`, `torch.stack(losses)`',
       layouts=ALL)  # fmt: skip
def loss_kept(run: Run) -> None:
    found = run.pm.step(**run.batch(0))
    losses = torch.stack([copy.deepcopy(found), found, found.clone()])
    wanted = run.alone(**run.batch(0)).item()
    assert f"{found:.9f}" == f"{wanted:.9f}"
    run.losses += [(loss.item(), wanted) for loss in losses]


@habit(SECTION, "`scaler.scale(loss).backward()`: `GradScaler`", "leave the scaler out",
       refused=(NotSupportedError, "backward already"))  # fmt: skip
def scaled(run: Run) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(run.pm.step(**run.batch(0))).backward()


@habit(SECTION, "`GradScaler(enabled=False)`, `scaler.step(optimizer)` without `backward`")
def scaler_disabled(run: Run) -> None:
    optimizers = run.optimizers()
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for seed in range(2):
        run.backward(run.batch(seed))
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


@habit(SECTION, "`accelerator.backward(loss)`", "leave it out",
       refused=(NotSupportedError, "backward already"))  # fmt: skip
def accelerator_backward(run: Run) -> None:
    try:
        Accelerator(cpu=True).backward(run.pm.step(**run.batch(0)))
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


@habit(SECTION, "`accelerator.prepare(pm)` of Accelerate's own `Accelerator`",
       "use `AutoparAccelerator` (docs/frameworks.md)",
       refused=(NotSupportedError, "DistributedDataParallel"))  # fmt: skip
def accelerator_prepare(run: Run) -> None:
    try:
        Accelerator(cpu=True).prepare(run.pm)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
