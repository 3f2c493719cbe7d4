"""Habits about the module as a whole: wrapping, moving, walking over it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from autopar import NotSupportedError
from tests.habits.table import STAGES_FIRST as ALL
from tests.habits.table import Run, Small, captured_again, habit

SECTION = "The module"


@habit(SECTION, "`DistributedDataParallel(pm)`", "call `pm.step` itself",
       refused=(NotSupportedError, "DistributedDataParallel"), layouts=ALL)  # fmt: skip
def ddp(run: Run) -> None:
    DistributedDataParallel(run.pm)


@habit(SECTION, "`pm.half()`, `pm.to(torch.bfloat16)`", "convert the model before",
       refused=(NotSupportedError, "before autopar.parallelize"))  # fmt: skip
def cast(run: Run) -> None:
    run.pm.to(torch.bfloat16)


@habit(SECTION, "`pm.to(device)`, `pm.double()` where nothing changes", layouts=ALL)
def moved(run: Run) -> None:
    assert run.pm.to("cpu").double() is run.pm
    run.train(run.optimizers())


@habit(SECTION, "`pm.apply(fn)`, `for m in pm.modules(): if isinstance(m, nn.LayerNorm)`",
       layouts=ALL)  # fmt: skip
def applied(run: Run) -> None:
    def zero_bias(module: torch.nn.Module) -> None:
        if isinstance(module, torch.nn.LayerNorm) and hasattr(module, "bias"):
            torch.nn.init.ones_(module.bias)

    optimizers = run.optimizers()
    for m in run.both():
        m.apply(zero_bias)
    run.train(optimizers)


@habit(SECTION, "`pm.generate(...)`", "use `pm.unsharded().generate(...)`",
       refused=(NotSupportedError, "unsharded"))  # fmt: skip
def generated(run: Run) -> None:
    run.pm.generate()


@habit(SECTION, "`pm.requires_grad_(False)` and back", layouts=ALL)
def frozen_whole(run: Run) -> None:
    optimizers = run.optimizers()
    for m in run.both():
        m.requires_grad_(False)
        m.requires_grad_(True)
    run.train(optimizers)


class Masked(Small):
    """Scales its logits by a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))
        self.scale: Tensor

    def body(self, ids: Tensor) -> Tensor:
        return super().body(ids) * self.scale


@habit(SECTION, "writing to a buffer of the original model: `model.scale.fill_(0.5)`",
       "captured again, with a notice", kind=Masked, layouts=ALL)  # fmt: skip
def buffer_of_the_original(run: Run) -> None:
    optimizers = run.optimizers()
    run.train(optimizers, 1)
    for model in (run.model, run.alone):
        model.scale.fill_(0.5)  # type: ignore[operator]
    with captured_again():
        run.train(optimizers, 1, first=1)
    run.alone.scale.fill_(1.0)  # type: ignore[operator]
    found = run.pm.full_state_dict()
    assert not found or found["scale"] == 1.0, "the module's copy stays as it was"


@habit(SECTION, "writing to a buffer of the parallel module", "write to the original's",
       kind=Masked, refused=(NotSupportedError, "as a constant"), layouts=ALL)  # fmt: skip
def buffer_of_pm(run: Run) -> None:
    run.pm.step(**run.batch(0))
    for _, buffer in run.pm.named_buffers():
        buffer.fill_(0.5)
    run.pm.step(**run.batch(1))
