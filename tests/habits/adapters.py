"""Habits of adapter libraries: layers that wrap layers, adapters by name, prompts, factors."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar import CaptureError, NotSupportedError, PlanError
from tests.habits.table import ALL, Block, Run, Small, captured_again, habit
from tests.habits.tasks import of_learning, trains

SECTION = "Adapter libraries"
RANK = 2


class LoraLinear(nn.Module):
    """A linear layer with low-rank adapters by name, as peft writes it."""

    def __init__(self, base_layer: nn.Linear, names: tuple[str, ...] = ("default",)) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.r: dict[str, int] = {}
        self.scaling: dict[str, float] = {}
        self.lora_dropout, self.lora_A = nn.ModuleDict({}), nn.ModuleDict({})
        self.lora_B = nn.ModuleDict({})
        self._active_adapter: str | list[str] = names[0]
        self._disable_adapters = False
        self.merged_adapters: list[str] = []
        for name in names:
            self.update_layer(name)

    def update_layer(self, name: str, alpha: int = 4) -> None:
        base = self.base_layer
        self.r[name], self.scaling[name] = RANK, alpha / math.sqrt(RANK)
        self.lora_dropout[name] = nn.Identity()
        self.lora_A[name] = nn.Linear(base.in_features, RANK, bias=False)
        self.lora_B[name] = nn.Linear(RANK, base.out_features, bias=False)

    @property
    def active_adapters(self) -> list[str]:
        active = self._active_adapter
        return [active] if isinstance(active, str) else active

    @property
    def merged(self) -> bool:
        return bool(self.merged_adapters)

    def set_adapter(self, names: str | list[str]) -> None:
        self._active_adapter = names

    def delta(self, name: str) -> Tensor:
        a: Any = self.lora_A[name]
        b: Any = self.lora_B[name]
        return b.weight @ a.weight * self.scaling[name]

    def merge(self) -> None:
        for name in self.active_adapters:
            self.base_layer.weight.data += self.delta(name)
            self.merged_adapters.append(name)

    def forward(self, x: Tensor) -> Tensor:
        if self._disable_adapters or self.merged:
            return self.base_layer(x)
        result = self.base_layer(x)
        dtype = result.dtype
        for name in self.active_adapters:
            if name not in self.lora_A:
                continue
            a: Any = self.lora_A[name]
            b, drop = self.lora_B[name], self.lora_dropout[name]
            result = result + b(a(drop(x.to(a.weight.dtype)))) * self.scaling[name]
        return result.to(dtype)


@trains(SECTION, "LoRA layers with `ModuleDict` of adapters and a dict of scales")
class Wrapped(nn.Module):
    """The base model of a `PeftModel`: every `up` and `down` has adapters of these names."""

    names: tuple[str, ...] = ("default",)

    def __init__(self) -> None:
        super().__init__()
        self.base_model = Small()
        for block in self.base_model.blocks:
            assert isinstance(block, Block)
            block.up = LoraLinear(block.up, self.names)  # type: ignore[assignment]
            block.down = LoraLinear(block.down, self.names)  # type: ignore[assignment]
        for name, p in self.named_parameters():
            p.requires_grad = "lora_" in name

    def layers(self) -> Iterator[LoraLinear]:
        return (m for m in self.modules() if isinstance(m, LoraLinear))

    def set_adapter(self, names: str | list[str]) -> None:
        for layer in self.layers():
            layer.set_adapter(names)

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        for layer in self.layers():
            layer._disable_adapters = True
        yield
        for layer in self.layers():
            layer._disable_adapters = False

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        return self.base_model(ids, targets)


class Adapted(Small):
    """Frozen, with layers of one kind around those of its blocks."""

    layer: Any
    down = True

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        for block in self.blocks:
            block.up = self.layer(block.up)
            if self.down:
                block.down = self.layer(block.down)


class TwoAdapters(Wrapped):
    names = ("first", "second")


@habit(SECTION, "another adapter later: `model.set_adapter(name)`",
       "`autopar.parallelize` again after it", kind=TwoAdapters, layouts=ALL,
       refused=(PlanError, "parallelize again"))  # fmt: skip
def adapter_by_name(run: Run) -> None:
    run.pm.step(**run.batch(0))
    with captured_again():
        run.model.set_adapter("second")  # type: ignore[operator]
        run.pm.step(**run.batch(0))


@habit(SECTION, "a scale of an adapter: `layer.scaling[name] *= 2`", "captured again",
       kind=Wrapped, layouts=ALL)  # fmt: skip
def adapter_scale(run: Run) -> None:
    optimizers = of_learning(run)
    with captured_again():
        for seed in range(3):
            for model in (run.model, run.alone):
                for layer in model.layers():  # type: ignore[operator]
                    layer.scaling["default"] *= 1.5
            run.train(optimizers, 1, first=seed)


@habit(SECTION, "the scale on a layer of `pm`: `pm.base_model.blocks[0].up.scaling[name] = 3`",
       kind=Wrapped)  # fmt: skip
def adapter_scale_of_pm(run: Run) -> None:
    optimizers = of_learning(run)
    with captured_again():
        for seed in range(2):
            for model in run.both():
                model.base_model.blocks[0].up.scaling["default"] = 3.0 - seed
            run.train(optimizers, 1, first=seed)


@habit(SECTION, "`set_adapter` of peft, which freezes the other adapters",
       "freeze `pm.parameters()`", kind=TwoAdapters,
       refused=(CaptureError, "requires_grad"))  # fmt: skip
def adapter_frozen(run: Run) -> None:
    run.pm.step(**run.batch(0))
    for layer in run.model.layers():  # type: ignore[operator]
        layer.set_adapter("second")
        layer.lora_A["first"].requires_grad_(False)
    run.pm.step(**run.batch(0))


@trains(SECTION,
        "a reference without adapters in one forward: `with self.disable_adapter():`",
        "a switch that is put back")  # fmt: skip
class Referenced(Wrapped):
    """Its reference is itself, without its adapters."""

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        with torch.no_grad(), self.disable_adapter():
            reference = self.base_model.body(ids).log_softmax(-1)
        logits = self.base_model.body(ids)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        kl = (reference.exp() * (reference - logits.log_softmax(-1))).sum(-1).mean()
        return loss + 0.1 * kl


@habit(SECTION, "evaluation `with model.disable_adapter():`", "captured again", kind=Wrapped,
       layouts=ALL)  # fmt: skip
def evaluated_without_adapters(run: Run) -> None:
    optimizers = of_learning(run)
    with captured_again():
        for seed in range(2):
            run.train(optimizers, 1, first=seed)
            run.pm.eval()
            for _ in range(2):
                with run.model.disable_adapter(), run.alone.disable_adapter():  # type: ignore[operator]
                    found = run.pm.loss(**run.batch(7)).item()
                    run.losses.append((found, run.alone(**run.batch(7)).item()))
                found = run.pm.loss(**run.batch(7)).item()
                run.losses.append((found, run.alone(**run.batch(7)).item()))
            run.pm.train()


@habit(SECTION, "merging into `pm`: `layer.merge()`, a product of matrices",
       "merge `pm.full_state_dict()`", kind=Wrapped,
       refused=(NotSupportedError, "aten.mm"))  # fmt: skip
def merged_layer(run: Run) -> None:
    run.pm.base_model.blocks[0].up.merge()


@habit(SECTION, "merging into `pm` with `optimizer_gather=[\"*lora*\"]`, then evaluation",
       "gathered, and captured again", kind=Wrapped, optimizer_gather=["*lora*"])  # fmt: skip
def merged_layer_gathered(run: Run) -> None:
    run.train(of_learning(run))
    for m in run.both():
        for block in m.base_model.blocks:
            block.up.merge()
    for m in run.both():
        m.eval()
    with captured_again():
        run.losses.append((run.pm.loss(**run.batch(3)).item(), run.alone(**run.batch(3)).item()))


@habit(SECTION, "merging into the original model: `layer.merge()`, then evaluation of `pm`",
       "a warning: `pm.load_state_dict(...)` takes the weights over", kind=Wrapped)  # fmt: skip
def merged_original(run: Run) -> None:
    run.train(of_learning(run))
    run.alone.load_state_dict(run.model.state_dict())
    run.pm.eval()
    models: list[Any] = [run.model, run.alone]
    for m in models:
        m.eval()
        for block in m.base_model.blocks:
            nn.init.ones_(block.up.lora_B["default"].weight)
            block.up.merge()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        before = run.pm.loss(**run.batch(0))
    told = [w for w in caught if "Parameters of the original model" in str(w.message)]
    assert len(told) == (dist.get_rank() == 0)
    run.pm.load_state_dict(run.model.state_dict())
    run.losses.append((run.pm.loss(**run.batch(0)).item(), run.alone(**run.batch(0)).item()))
    assert before.item() != run.losses[-1][0]
