"""Habits of image training: clipping by row, averages of weights, optimizers around optimizers."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar import NotSupportedError
from tests.habits.table import ZERO_FIRST as ALL
from tests.habits.table import Run, adamw, habit
from tests.habits.tasks import parallelize, train
from tests.habits.vision import SECTION, Convs, Vit, cross_entropy, images


def unitwise_norm(x: Tensor) -> Tensor:
    if x.ndim <= 1:
        return x.norm(2.0)
    return x.norm(2.0, dim=tuple(range(1, x.ndim)), keepdim=True)


def adaptive_clip_grad(
    parameters: Iterable[Any], clip_factor: float = 0.01, eps: float = 1e-3
) -> None:
    for p in parameters:
        if p.grad is None:
            continue
        p_data, g_data = p.detach(), p.grad.detach()
        max_norm = unitwise_norm(p_data).clamp_(min=eps).mul_(clip_factor)
        grad_norm = unitwise_norm(g_data)
        clipped = g_data * (max_norm / grad_norm.clamp(min=1e-6))
        p.grad.detach().copy_(torch.where(grad_norm < max_norm, g_data, clipped))


@habit(SECTION, "`adaptive_clip_grad(pm.parameters(), c)`: norms by row",
       "`optimizer_gather=`", kind=Vit,
       refused=(NotSupportedError, "linalg_vector_norm"))  # fmt: skip
def agc(run: Run) -> None:
    parallelize(run, images(0), loss_fn=cross_entropy)
    run.pm.step(**images(0))
    adaptive_clip_grad(run.pm.parameters())


@habit(SECTION, 'the same with `optimizer_gather=["*"]`', "gathered", kind=Vit,
       optimizer_gather=["*"])  # fmt: skip
def agc_gathered(run: Run) -> None:
    train(run, images, cross_entropy, change=lambda m: adaptive_clip_grad(m.parameters()))


@habit(SECTION, 'gradients centred by row, with `optimizer_gather=["*"]`', "gathered", kind=Vit,
       optimizer_gather=["*"])  # fmt: skip
def centralized(run: Run) -> None:
    def center(m: Any) -> None:
        for p in m.parameters():
            if p.dim() > 1:
                p.grad.add_(-p.grad.mean(dim=tuple(range(1, p.grad.dim())), keepdim=True))

    train(run, images, cross_entropy, change=center)


class ModelEmaV2(nn.Module):
    """An average of everything in `state_dict()`."""

    def __init__(self, model: nn.Module, decay: float = 0.9) -> None:
        super().__init__()
        self.module = copy.deepcopy(model)
        self.module.eval()
        self.decay = decay

    def update(self, model: nn.Module) -> None:
        with torch.no_grad():
            for ema_v, model_v in zip(
                self.module.state_dict().values(), model.state_dict().values(), strict=True
            ):
                ema_v.copy_(self.decay * ema_v + (1.0 - self.decay) * model_v)


class ModelEmaV3(ModelEmaV2):
    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        ema, own = [], []
        for ema_v, model_v in zip(
            self.module.state_dict().values(), model.state_dict().values(), strict=True
        ):
            if ema_v.is_floating_point():
                ema.append(ema_v)
                own.append(model_v)
            else:
                ema_v.copy_(model_v)
        torch._foreach_lerp_(ema, own, weight=1.0 - self.decay)


class V3NoBuffers(ModelEmaV2):
    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        torch._foreach_lerp_(
            list(self.module.parameters()), list(model.parameters()), weight=1.0 - self.decay
        )
        for a, b in zip(self.module.buffers(), model.buffers(), strict=True):
            a.copy_(b)


def ema_of(run: Run, kind: Any) -> None:
    parallelize(run, images(0), loss_fn=cross_entropy)
    averages = [kind(m) for m in run.both()]
    optimizers = run.optimizers()
    for seed in range(3):
        train(run, images, cross_entropy, optimizers, n_steps=1, first=seed)
        for average, m in zip(averages, run.both(), strict=True):
            average.update(m)
    whole = averages[0].module.full_state_dict()
    if dist.get_rank() == 0:
        for n, v in averages[1].module.state_dict().items():
            assert (whole[n] - v).abs().max() < 1e-10, n
    found = averages[0].module.loss(**images(5))
    run.losses.append(
        (found.item(), cross_entropy(averages[1].module(images(5)["x"]), images(5)).item())
    )


@habit(SECTION, "`ModelEmaV2(pm)`: `state_dict().values()` of a copy, batch norm included",
       kind=Convs, layouts=ALL)  # fmt: skip
def ema_v2(run: Run) -> None:
    ema_of(run, ModelEmaV2)


@habit(SECTION, "`ModelEmaV3(pm)`: `_foreach_lerp_` of `state_dict().values()`", kind=Vit,
       layouts=ALL)  # fmt: skip
def ema_v3(run: Run) -> None:
    ema_of(run, ModelEmaV3)


@habit(SECTION, "`ModelEmaV3(pm, exclude_buffers=True)`: `_foreach_lerp_` of parameters",
       kind=Convs, layouts=ALL)  # fmt: skip
def ema_v3_buffers(run: Run) -> None:
    ema_of(run, V3NoBuffers)


class Lookahead(torch.optim.Optimizer):
    def __init__(self, base: Any, alpha: float = 0.5, k: int = 2) -> None:
        self._backward_hooks: dict[str, Any] = {}
        defaults = {"lookahead_alpha": alpha, "lookahead_k": k, "lookahead_step": 0}
        self._base_optimizer = base
        self.param_groups = base.param_groups
        self.defaults = base.defaults
        self.defaults.update(defaults)
        self.state = defaultdict(dict)
        for name, default in defaults.items():
            for group in self._base_optimizer.param_groups:
                group.setdefault(name, default)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self._base_optimizer.step()
        for group in self._base_optimizer.param_groups:
            group["lookahead_step"] += 1
            if group["lookahead_step"] % group["lookahead_k"] == 0:
                for fast in group["params"]:
                    if fast.grad is None:
                        continue
                    state = self._base_optimizer.state[fast]
                    if "lookahead_slow_buff" not in state:
                        state["lookahead_slow_buff"] = torch.empty_like(fast)
                        state["lookahead_slow_buff"].copy_(fast)
                    slow = state["lookahead_slow_buff"]
                    slow.add_(fast - slow, alpha=group["lookahead_alpha"])
                    fast.copy_(slow)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._base_optimizer.zero_grad(set_to_none)


@habit(SECTION, "Lookahead around another optimizer", kind=Vit, layouts=ALL)
def lookahead(run: Run) -> None:
    parallelize(run, images(0), loss_fn=cross_entropy)
    optimizers = [Lookahead(adamw(m.parameters())) for m in run.both()]
    train(run, images, cross_entropy, optimizers, n_steps=5)


def decay_groups(model: Any) -> Any:
    skip = model.no_weight_decay() if hasattr(model, "no_weight_decay") else set()
    decay: list[Any] = []
    rest: list[Any] = []
    for n, p in model.named_parameters():
        (rest if p.ndim <= 1 or n.endswith(".bias") or n in skip else decay).append(p)
    return torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.3}, {"params": rest, "weight_decay": 0.0}], lr=1e-2
    )


@habit(SECTION, "`if hasattr(model, \"no_weight_decay\"): skip = model.no_weight_decay()`",
       "ask the original model", kind=Vit,
       refused=(NotSupportedError, "no_weight_decay"))  # fmt: skip
def no_weight_decay(run: Run) -> None:
    parallelize(run, images(0), loss_fn=cross_entropy)
    decay_groups(run.pm)
