"""Habits of PyTorch's tutorials and recipes: schedules, averages, gradients and weights by hand."""

from __future__ import annotations

import copy
from collections import defaultdict
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn

from autopar import NotSupportedError
from tests.habits.table import WIDTH, Run, Small, adamw, all_refused, habit
from tests.habits.table import ZERO_FIRST as ALL

SECTION = "Schedules, averages and optimizers of tutorials"
BY_HAND = "Weights and gradients by hand"


class Normed(Small):
    """Batch norm behind the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.bn = nn.BatchNorm1d(WIDTH)

    def body(self, ids: Tensor) -> Tensor:
        return self.head(self.hidden(self.bn(self.embed(ids).transpose(1, 2)).transpose(1, 2)))


@habit(SECTION, "`ReduceLROnPlateau`: `scheduler.step(val_loss)`", layouts=ALL)
def plateau(run: Run) -> None:
    optimizers = run.optimizers()
    plans = [
        lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=0, threshold=10.0)
        for o in optimizers
    ]
    for seed in range(3):
        run.train(optimizers, 1, first=seed)
        with torch.no_grad():
            losses = run.pm.loss(**run.batch(9)), run.alone(**run.batch(9))
        for plan, loss in zip(plans, losses, strict=True):
            plan.step(loss)
    rates = [o.param_groups[0]["lr"] for o in optimizers]
    assert rates[0] == rates[1] < 1e-2


@habit(SECTION, "`CosineAnnealingWarmRestarts`, `step(epoch + i / n)`", layouts=ALL)
def warm_restarts(run: Run) -> None:
    optimizers = run.optimizers()
    plans = [lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=2) for o in optimizers]
    for seed in range(3):
        run.train(optimizers, 1, first=seed)
        for plan in plans:
            plan.step(seed + 0.5)


@habit(SECTION, "`SequentialLR` of `LinearLR` and cosine; its `state_dict` loaded", layouts=ALL)
def sequential(run: Run) -> None:
    def plan_of(optimizer: torch.optim.Optimizer) -> Any:
        warm = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
        down = lr_scheduler.CosineAnnealingLR(optimizer, 5)
        return lr_scheduler.SequentialLR(optimizer, [warm, down], milestones=[2])

    optimizers = run.optimizers()
    plans = [plan_of(o) for o in optimizers]
    for seed in range(4):
        run.train(optimizers, 1, first=seed)
        for i, plan in enumerate(plans):
            plan.step()
            kept = copy.deepcopy(plan.state_dict())
            plans[i] = plan_of(optimizers[i])
            plans[i].load_state_dict(kept)
            optimizers[i].param_groups[0]["lr"] = plans[i].get_last_lr()[0]


@habit(SECTION, "`lr=torch.tensor(1e-2)` with a scheduler", layouts=ALL)
def tensor_rate(run: Run) -> None:
    optimizers = run.optimizers(lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2)))
    plans = [lr_scheduler.ExponentialLR(o, 0.5) for o in optimizers]
    run.train(optimizers, 3, plans=plans)


@habit(SECTION, "gradual unfreezing: `optimizer.add_param_group(...)` later")
def group_added(run: Run) -> None:
    optimizers = [adamw(m.head.parameters()) for m in run.both()]
    run.train(optimizers)
    for optimizer, m in zip(optimizers, run.both(), strict=True):
        optimizer.add_param_group({"params": m.blocks.parameters(), "lr": 1e-3})
    run.train(optimizers, 2, first=2)


@habit(SECTION, "SWA: `AveragedModel`, `SWALR`, `update_bn(loader, swa_model)` without batch norm",
       layouts=ALL)  # fmt: skip
def swa(run: Run) -> None:
    optimizers = run.optimizers(lambda p: torch.optim.SGD(p, lr=0.1))
    averages = [AveragedModel(m) for m in run.both()]
    plans = [SWALR(o, swa_lr=0.05, anneal_epochs=2) for o in optimizers]
    for seed in range(3):
        run.train(optimizers, 1, first=seed)
        for average, m, plan in zip(averages, run.both(), plans, strict=True):
            average.update_parameters(m)
            plan.step()
    for average in averages:
        update_bn([run.batch(3)["ids"]], average)
        average.eval()
    with torch.no_grad():
        found, wanted = (average(**run.batch(4)) for average in averages)
    assert abs(found - wanted) < 1e-10


@habit(SECTION, "`update_bn(loader, pm)` of a model with batch norm", "it sets `bn.momentum`",
       kind=Normed, refused=(NotSupportedError, "bn.momentum"))  # fmt: skip
def batch_norm_updated(run: Run) -> None:
    run.pm.step(**run.batch(0))
    update_bn([run.batch(3)["ids"]], run.pm)


@habit(SECTION, "`m.reset_running_stats()`, `BatchNorm1d(momentum=None)`", kind=Normed, layouts=ALL)
def statistics_reset(run: Run) -> None:
    for m in (run.model, run.alone):
        m.bn.momentum = None  # type: ignore[union-attr]
    optimizers = run.optimizers()
    run.train(optimizers)
    for m in run.both():
        for layer in m.modules():
            if isinstance(layer, nn.BatchNorm1d) and "running_mean" in layer._buffers:
                layer.reset_running_stats()
    run.train(optimizers, 1, first=2)


@habit(SECTION, "step hooks of optimizers: `register_step_pre_hook`, `register_step_post_hook`",
       "they see and change the optimizer itself", layouts=ALL)  # fmt: skip
def step_hooks(run: Run) -> None:
    def before(optimizer: Any, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] *= 0.5
            for p in group["params"]:
                p.grad = p.grad * 0.25

    def after(optimizer: Any, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                optimizer.state[p]["exp_avg"].mul_(0.5)

    optimizers = run.optimizers()
    for optimizer in optimizers:
        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)
    run.train(optimizers, 3)


@habit(SECTION, "`optimizer.step(closure)` of SGD and AdamW", layouts=ALL)
def closures(run: Run) -> None:
    for make in (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), adamw):
        for optimizer, m in zip(run.optimizers(make), run.both(), strict=True):

            def closure(optimizer: Any = optimizer, m: Any = m) -> Tensor:
                optimizer.zero_grad()
                if m is run.pm:
                    return run.pm.step(**run.batch(0))
                loss: Tensor = m(**run.batch(0))
                loss.backward()
                return loss

            assert optimizer.step(closure) > 0
            optimizer.zero_grad()


@habit(SECTION, "`optimizer.state.clear()`, `state[p][k] = v * 0.5`", layouts=ALL)
def state_changed(run: Run) -> None:
    optimizers = run.optimizers()
    run.train(optimizers)
    for optimizer in optimizers:
        optimizer.state = defaultdict(dict)
    run.train(optimizers, 2, first=2)
    for optimizer in optimizers:
        for state in optimizer.state.values():
            state["exp_avg"] = state["exp_avg"].to("cpu") * 0.5
    run.train(optimizers, 2, first=4)


@habit(BY_HAND, "`p.data = p.data - lr * p.grad.data`", layouts=ALL)
def data_set(run: Run) -> None:
    for seed in range(2):
        run.backward(run.batch(seed))
        for m in run.both():
            for p in m.parameters():
                p.data = p.data - 0.1 * p.grad.data
            m.zero_grad()
    run.train(run.optimizers())


@habit(BY_HAND, "an average swapped in: `kept = p.data; p.data = ema[n]`, and back", layouts=ALL)
def average_swapped(run: Run) -> None:
    optimizers = run.optimizers()
    averages = [{n: p.detach().clone() for n, p in m.named_parameters()} for m in run.both()]
    for seed in range(2):
        run.train(optimizers, 1, first=seed)
        kept: list[dict[str, Tensor]] = [{}, {}]
        for m, ema, back in zip(run.both(), averages, kept, strict=True):
            for name, p in m.named_parameters():
                ema[name] = 0.5 * ema[name] + 0.5 * p.data
                back[name] = p.data
                p.data = ema[name]
        with torch.no_grad():
            assert abs(run.pm.loss(**run.batch(7)) - run.alone(**run.batch(7))) < 1e-10
        for m, back in zip(run.both(), kept, strict=True):
            for name, p in m.named_parameters():
                p.data = back[name]


def vector_of(run: Run) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    n = sum(p.numel() for p in run.alone.parameters())
    return torch.randn(n, generator=generator, dtype=torch.float64)


@habit(BY_HAND, "`vector_to_parameters(vector, pm.parameters())`")
def vector_set(run: Run) -> None:
    for m in run.both():
        vector_to_parameters(vector_of(run), m.parameters())
    run.train(run.optimizers())


@habit(BY_HAND, "the same with pipeline stages", "load tensors by name", layouts=("pp",),
       refused=(NotSupportedError, "pm.load_state_dict"))  # fmt: skip
def vector_set_of_a_stage(run: Run) -> None:
    vector_to_parameters(vector_of(run), run.pm.parameters())


@habit(BY_HAND, "`parameters_to_vector(pm.parameters())`", "use `pm.full_state_dict()`",
       layouts=ALL, refused=(NotSupportedError, ""))  # fmt: skip
def vector_read(run: Run) -> None:
    parameters_to_vector(run.pm.parameters())


@habit(BY_HAND, "`p.grad = p.grad.clamp(...)`, `p.grad.data = ...`, `p.grad = whole tensor`",
       layouts=ALL)  # fmt: skip
def gradients_set(run: Run) -> None:
    def clamp(m: Any) -> None:
        for p in m.parameters():
            p.grad = p.grad.clamp(-0.01, 0.01)
            p.grad.data = p.grad.data * 2

    optimizers = run.optimizers()
    run.train(optimizers, change=clamp)
    for m in run.both():
        for p in m.parameters():
            p.grad = torch.full(p.shape, 0.1, dtype=p.dtype)
    run.backward(run.batch(2))
    run.update(optimizers)


@habit(BY_HAND, "gradients of two batches kept and combined", layouts=ALL)
def gradients_combined(run: Run) -> None:
    run.backward(run.batch(0))
    kept = [[p.grad.clone() for p in m.parameters()] for m in run.both()]
    for m in run.both():
        m.zero_grad()
    run.backward(run.batch(1))
    for m, gradients in zip(run.both(), kept, strict=True):
        for p, gradient in zip(m.parameters(), gradients, strict=True):
            p.grad = gradient + 0.5 * p.grad
    run.update(run.optimizers())


@habit(BY_HAND, "gradient noise of one seed: `p.grad += torch.randn(p.shape, generator=g)`",
       layouts=ALL)  # fmt: skip
def gradient_noise(run: Run) -> None:
    optimizers = run.optimizers()
    for seed in range(2):
        run.backward(run.batch(seed))
        for m in run.both():
            for name, p in m.named_parameters():
                g = torch.Generator().manual_seed(len(name) + seed)
                p.grad += 0.01 * torch.randn(p.shape, generator=g, dtype=p.dtype)
        run.update(optimizers)


@habit(BY_HAND, "a histogram: `writer.add_histogram(n, p.detach().cpu().numpy())`, `p.tolist()`",
       "use `pm.full_state_dict()`", layouts=ALL,
       refused=(NotSupportedError, "pm.full_state_dict()"))  # fmt: skip
def histogram(run: Run) -> None:
    weight = next(iter(run.pm.parameters())).detach()
    all_refused(NotSupportedError, lambda: weight.cpu().numpy(), weight.tolist)


@habit(BY_HAND, "SAM: weights moved by `grad * rho / norm`, a second step, moved back")
def sam(run: Run) -> None:
    optimizers = run.optimizers()
    for seed in range(2):
        run.backward(run.batch(seed))
        moves: list[dict[Any, Tensor]] = []
        for m in run.both():
            norm = torch.stack([p.grad.norm(2) for p in m.parameters()]).norm(2)
            moves.append({p: p.grad * (0.05 / (norm + 1e-12)) for p in m.parameters()})
            m.zero_grad()
        with torch.no_grad():
            for move in moves:
                for p, by in move.items():
                    p.add_(by)
        run.backward(run.batch(seed))
        with torch.no_grad():
            for move in moves:
                for p, by in move.items():
                    p.sub_(by)
        run.update(optimizers)


@habit(BY_HAND, "EWC: `(fisher * (p - old) ** 2).sum().backward()` beside the step")
def ewc(run: Run) -> None:
    run.backward(run.batch(5))
    held = [
        [(p.grad.detach() ** 2, p.detach().clone()) for p in m.parameters()] for m in run.both()
    ]
    for m in run.both():
        m.zero_grad()
    optimizers = run.optimizers()
    for seed in range(3):
        run.backward(run.batch(seed))
        for m, of_m in zip(run.both(), held, strict=True):
            pairs = zip(m.parameters(), of_m, strict=True)
            (10.0 * sum((f * (p - old) ** 2).sum() for p, (f, old) in pairs)).backward()
        run.update(optimizers)


@habit(BY_HAND, "`torch.autograd.grad(l1_penalty, parameters)`")
def penalty_gradients(run: Run) -> None:
    def add(m: Any) -> None:
        parameters = list(m.parameters())
        penalty = sum(p.abs().sum() for p in parameters)
        for p, g in zip(parameters, torch.autograd.grad(penalty, parameters), strict=True):
            p.grad.add_(g, alpha=0.01)

    run.train(run.optimizers(), 1, change=add)


@habit(BY_HAND, "pruning by hand: `p.mul_(mask)` after each step", layouts=ALL)
def pruned_by_hand(run: Run) -> None:
    optimizers = run.optimizers()
    masks = [{p: (p.abs() > 0.1).to(p.dtype) for p in m.parameters()} for m in run.both()]
    for seed in range(2):
        run.train(optimizers, 1, first=seed)
        with torch.no_grad():
            for mask in masks:
                for p, keep in mask.items():
                    p.mul_(keep)


@habit(BY_HAND, "`dist.all_reduce(p.grad)`, `dist.broadcast(p.data, 0)`: averages by hand",
       "leave them out", layouts=ALL, refused=(NotSupportedError, "leave it out"))  # fmt: skip
def averaged_by_hand(run: Run) -> None:
    run.pm.step(**run.batch(0))
    parameters = list(run.pm.parameters())
    reduced = (partial(dist.all_reduce, p.grad) for p in parameters)
    all_refused(NotSupportedError, *reduced, *(partial(dist.broadcast, p, 0) for p in parameters))
