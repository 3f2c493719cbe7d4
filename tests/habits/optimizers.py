"""Habits about optimizers and schedules."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from autopar import NotSupportedError, OptionError, ParallelModule
from tests.habits.table import ZERO_FIRST as ALL
from tests.habits.table import Run, adamw, all_refused, habit

SECTION = "Optimizers"
Make = Callable[[Any], torch.optim.Optimizer]

ELEMENTWISE: dict[str, Make] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    "AdamW(foreach=True)": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "AdamW(fused=True)": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5),
    "NAdam": lambda p: torch.optim.NAdam(p),
    "RAdam": lambda p: torch.optim.RAdam(p),
    "Rprop": lambda p: torch.optim.Rprop(p),
    "Adagrad": lambda p: torch.optim.Adagrad(p),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "Adamax": lambda p: torch.optim.Adamax(p),
    "ASGD": lambda p: torch.optim.ASGD(p),
}


@habit(SECTION, "`torch.optim`: " + ", ".join(ELEMENTWISE), layouts=ALL)
def elementwise(run: Run) -> None:
    for make in ELEMENTWISE.values():
        run.train(run.optimizers(make), 2)


class Lamb(torch.optim.Optimizer):
    """LAMB as users write it: a ratio of norms for each tensor."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["m"], state["v"] = torch.zeros_like(p), torch.zeros_like(p)
                state["m"].mul_(0.9).add_(p.grad, alpha=0.1)
                state["v"].mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)
                update = state["m"] / (state["v"].sqrt() + 1e-6)
                size, length = p.norm(), update.norm()
                ratio = torch.where((size > 0) & (length > 0), size / length, 1.0)
                p.sub_(group["lr"] * ratio * update)


@habit(SECTION, "norms of each tensor: LARS, LAMB", "one all_reduce of a number", layouts=ALL)
def norms(run: Run) -> None:
    run.train(run.optimizers(Lamb), 3)


WHOLE: dict[str, Make] = {
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "Muon": lambda p: torch.optim.Muon([q for q in p if q.ndim == 2], lr=1e-2),
}


@habit(SECTION, "Muon, Adafactor, Shampoo: updates of whole matrices",
       "refused before anything changes",
       refused=(NotSupportedError, "optimizer_gather="))  # fmt: skip
def whole_matrices(run: Run) -> None:
    before = copy.deepcopy(run.pm.full_state_dict())
    optimizers = [make(run.pm.parameters()) for make in WHOLE.values()]
    run.pm.step(**run.batch(0))
    try:
        all_refused(NotSupportedError, *(optimizer.step for optimizer in optimizers))
    finally:
        after = run.pm.full_state_dict()
        assert all(torch.equal(after[name], value) for name, value in before.items())


@habit(SECTION, 'the same with `optimizer_gather=["*"]`', "gathered for the update",
       optimizer_gather=["*"])  # fmt: skip
def whole_matrices_gathered(run: Run) -> None:
    for make in WHOLE.values():
        run.train(run.optimizers(make), 2)


class Whitening(torch.optim.Optimizer):
    """An optimizer that autopar has never heard of, which multiplies matrices."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.ndim == 2:
                    tall = p.grad if p.shape[0] >= p.shape[1] else p.grad.T
                    q = torch.linalg.qr(tall + 1.0)[0]
                    p.sub_(1e-2 * (q if p.shape[0] >= p.shape[1] else q.T))


@habit(SECTION, "an unknown optimizer that needs whole tensors",
       "refused by its first such operator",
       refused=(NotSupportedError, "optimizer_gather="))  # fmt: skip
def unknown(run: Run) -> None:
    run.train(run.optimizers(Whitening))


@habit(SECTION, "the same with `optimizer_gather=[\"*\"]`  ", "gathered", layouts=ALL,
       optimizer_gather=["*"])  # fmt: skip
def unknown_gathered(run: Run) -> None:
    run.train(run.optimizers(Whitening))


@habit(SECTION, "LBFGS with a closure, `optimizer_gather=[\"*\"]`", "gathered",
       optimizer_gather=["*"])  # fmt: skip
def lbfgs(run: Run) -> None:
    first, second = run.optimizers(lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3))
    batch = run.batch(0)

    def of_pm() -> Tensor:
        first.zero_grad()
        return run.pm.step(**batch)

    def of_one() -> Tensor:
        second.zero_grad()
        loss: Tensor = run.alone(**batch)
        loss.backward()
        return loss

    first.step(of_pm)
    second.step(of_one)


@habit(SECTION, "an optimizer built before: `AdamW(model.parameters())`",
       "build it from `pm.parameters()`", refused=(OptionError, "pm.parameters()"),
       layouts=ALL)  # fmt: skip
def built_before(run: Run) -> None:
    optimizer = torch.optim.AdamW(run.model.parameters())
    run.pm.step(**run.batch(0))
    optimizer.step()


@habit(SECTION, "`clip_grad_norm_(model.parameters(), c)` of the original model",
       "use `pm.parameters()`", refused=(OptionError, "pm.clip_grad_norm_"),
       layouts=ALL)  # fmt: skip
def clip_of_the_original(run: Run) -> None:
    run.pm.step(**run.batch(0))
    torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)


@habit(SECTION, "`model.zero_grad()` of the original model", "a warning at the next step",
       layouts=ALL)  # fmt: skip
def zero_grad_of_the_original(run: Run) -> None:
    optimizer = adamw(run.pm.parameters())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for seed in range(2):
            run.pm.step(**run.batch(seed))
            optimizer.step()
            run.model.zero_grad()
    assert any("zero_grad() of the original" in str(w.message) for w in caught)
    run.pm.load_state_dict(run.alone.state_dict())


@habit(SECTION, "schedulers: `LambdaLR`, `OneCycleLR`, warm-up", layouts=ALL)
def schedulers(run: Run) -> None:
    optimizers = run.optimizers()
    plans = [torch.optim.lr_scheduler.OneCycleLR(o, 1e-2, total_steps=4) for o in optimizers]
    run.train(optimizers, 3, plans=plans)


@habit(SECTION, "`optimizer.state_dict()` and `load_state_dict` in one job", layouts=ALL)
def state_of_optimizers(run: Run) -> None:
    optimizers = run.optimizers()
    run.train(optimizers, 2)
    others = run.optimizers()
    for old, new in zip(optimizers, others, strict=True):
        new.load_state_dict(old.state_dict())
    run.train(others, 1, first=2)


@habit(SECTION, "`zero_grad(set_to_none=False)`, `pm.zero_grad()`", layouts=ALL)
def zero_grad(run: Run) -> None:
    optimizers = run.optimizers()
    for seed in range(3):
        run.backward(run.batch(seed))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        if seed == 1:
            for m in run.both():
                m.zero_grad()


@habit(SECTION, "an average by hand: `ema[n].lerp_(p, 0.1)`", layouts=ALL)
def average_by_hand(run: Run) -> None:
    optimizers = run.optimizers()
    averages = [{n: p.detach().clone() for n, p in m.named_parameters()} for m in run.both()]
    for seed in range(2):
        run.train(optimizers, 1, first=seed)
        for m, ema in zip(run.both(), averages, strict=True):
            for name, p in m.named_parameters():
                ema[name].lerp_(p.detach(), 0.1)
    for m, ema in zip(run.both(), averages, strict=True):
        with torch.no_grad():
            for name, p in m.named_parameters():
                p.copy_(ema[name])


@habit(SECTION, "`AveragedModel(pm)`, `copy.deepcopy(pm)`", "parameters of their own", layouts=ALL)
def averaged(run: Run) -> None:
    optimizers = run.optimizers()
    averages = [AveragedModel(m, multi_avg_fn=get_ema_multi_avg_fn(0.5)) for m in run.both()]
    for seed in range(3):
        run.train(optimizers, 1, first=seed)
        for average, m in zip(averages, run.both(), strict=True):
            average.update_parameters(m)
    found, wanted = (average.module for average in averages)
    run.check()
    assert isinstance(found, ParallelModule)
    run.pm, run.alone = found, wanted
    run.losses.clear()
