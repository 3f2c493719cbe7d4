"""Habits about Python values, hooks and operators of the model's own."""

from __future__ import annotations

import random
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autopar import CaptureError, NotSupportedError
from tests.habits.table import BOTH, Run, Small, captured_again, habit, quiet
from tests.habits.table import ZERO_FIRST as ALL
from tests.habits.tasks import trains
from tests.helpers.functions import Reverse

SECTION = "What the model does in Python"


class Weighted(Small):
    """Its loss has a factor in an attribute."""

    beta = 1.0

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        return self.beta * super().forward(ids, targets)


class Reversed(Small):
    def body(self, ids: Tensor) -> Tensor:
        h = self.embed(ids)
        h = self.blocks[1](Reverse.apply(self.blocks[0](h), 0.5))
        return self.head(h)


@trains(SECTION, "a parameter read from a plain dict or list of the module",
        "read the attribute, or use `nn.ParameterDict`", layouts=BOTH,
        refused=(CaptureError, "plain container"))  # fmt: skip
class Contained(Small):
    """Keeps a parameter in a plain dict, too."""

    def __init__(self) -> None:
        super().__init__()
        self.held = {"bias": self.head.bias}

    def body(self, ids: Tensor) -> Tensor:
        return super().body(ids) + self.held["bias"]


@habit(SECTION, "a weight that changes: `model.beta = 0.5`", "captured again, with a notice",
       kind=Weighted, layouts=ALL)  # fmt: skip
def attribute(run: Run) -> None:
    optimizers = run.optimizers()
    with captured_again():
        for seed, beta in enumerate((1.0, 0.5, 1.0)):
            for model in (run.model, run.alone):
                model.beta = beta  # type: ignore[assignment]
            run.train(optimizers, 1, first=seed)


@habit(SECTION, "the same on the parallel module: `pm.beta = 0.5`", "set on the model",
       kind=Weighted)  # fmt: skip
def attribute_of_pm(run: Run) -> None:
    optimizers = run.optimizers()
    with captured_again():
        for seed, beta in enumerate((1.0, 0.25)):
            for model in run.both():
                model.beta = beta
            run.train(optimizers, 1, first=seed)


@habit(SECTION, "a `torch.autograd.Function`", "one operator with its own backward", kind=Reversed,
       layouts=ALL)  # fmt: skip
def function(run: Run) -> None:
    with quiet(".*Reversal"):
        run.train(run.optimizers())


@trains(SECTION, "`torch.utils.checkpoint`", "runs again in backward")
class Checkpointed(Small):
    def body(self, ids: Tensor) -> Tensor:
        h = self.embed(ids)
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=False)
        return self.head(h)


@trains(SECTION, "a counter in forward: `self.n_calls += 1`", "refused: it would be frozen",
        layouts=BOTH, refused=(CaptureError, "n_calls"))  # fmt: skip
class Counting(Small):
    n_calls = 0

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        self.n_calls += 1
        return super().forward(ids, targets) * (2.0 if self.n_calls > 1 else 1.0)


@trains(SECTION, "Python's random numbers in forward: LayerDrop", "refused: they would be frozen",
        layouts=BOTH, refused=(CaptureError, "random"))  # fmt: skip
class Skipping(Small):
    """LayerDrop with Python's random numbers."""

    def body(self, ids: Tensor) -> Tensor:
        h = self.embed(ids)
        for block in self.blocks:
            h = h if random.random() < 0.1 else block(h)
        return self.head(h)


@trains(SECTION, "a penalty on weights in forward: `sum(p.pow(2).sum() ...)`",
        layouts=("tp", "zero3"))  # fmt: skip
class Penalised(Small):
    """A penalty on its own weights, inside."""

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        penalty = sum(p.pow(2).sum() for p in self.parameters())
        return super().forward(ids, targets) + 1e-2 * penalty


@habit(SECTION, "a forward hook that changes what a module returns", "traced", layouts=ALL)
def forward_hook(run: Run) -> None:
    for model in (run.model, run.alone):
        head: Any = model.head
        head.register_forward_hook(lambda module, inputs, output: output * 0.5)
    run.train(run.optimizers())


@habit(SECTION, "a forward hook that keeps activations in a list", "use `outputs=`",
       refused=(CaptureError, "hint"))  # fmt: skip
def keeping_hook(run: Run) -> None:
    kept: list[Tensor] = []
    head: Any = run.model.head
    head.register_forward_hook(lambda module, inputs, output: kept.append(output))
    run.pm.step(**run.batch(0))


@habit(SECTION, "backward hooks on the model, and hooks on its parameters",
       "use `.grad`, or hooks on `pm.parameters()`",
       refused=(NotSupportedError, "hook"))  # fmt: skip
def backward_hook(run: Run) -> None:
    head: Any = run.model.head
    head.register_full_backward_hook(lambda module, inputs, outputs: None)
    run.pm.step(**run.batch(0))


@habit(SECTION, "hooks on the parallel module", "use `outputs=` and `.grad`",
       refused=(NotSupportedError, "hook"))  # fmt: skip
def hook_on_pm(run: Run) -> None:
    run.pm.register_forward_hook(lambda *args: None)


@habit(SECTION, "`parametrizations.weight_norm`", layouts=("tp", "zero3"))
def parametrized(run: Run) -> None:
    for model in (run.model, run.alone):
        head: Any = model.head
        nn.utils.parametrizations.weight_norm(head)
    run.train(run.optimizers())


@habit(SECTION, "freezing the original model later: `requires_grad_(False)`",
       "freeze `pm.parameters()`", refused=(CaptureError, "requires_grad"))  # fmt: skip
def frozen_original(run: Run) -> None:
    run.pm.step(**run.batch(0))
    run.model.head.requires_grad_(False)
    run.pm.step(**run.batch(1))


@habit(SECTION, "a module replaced in the original model later", "change it before",
       refused=(CaptureError, "head"))  # fmt: skip
def replaced_module(run: Run) -> None:
    run.pm.step(**run.batch(0))
    run.model.head = nn.Identity()
    run.pm.step(**run.batch(1))
