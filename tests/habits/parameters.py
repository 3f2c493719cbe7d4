"""Habits about parameters, their gradients and norms."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm

from autopar import NotSupportedError
from autopar.runtime.tensors import Sharded
from tests.habits.table import ALL, Run, adamw, habit
from tests.habits.tasks import learning

SECTION = "Parameters and gradients"


def gradients(module: torch.nn.Module) -> list[Any]:
    return [p.grad for p in module.parameters()]


@habit(SECTION, "`torch.nn.utils.clip_grad_norm_(pm.parameters(), c)`", "the norm of the whole")
def clip_norm(run: Run) -> None:
    optimizers = run.optimizers()
    for seed, order in enumerate((2.0, 1.0, math.inf)):
        run.backward(run.batch(seed))
        norms = [clip_grad_norm_(m.parameters(), 0.1, order) for m in run.both()]
        assert abs(norms[0] - norms[1]) < 1e-10
        run.update(optimizers)


@habit(SECTION, "`clip_grad_norm_(pm.parameters(), c)` with pipeline stages",
       "use `pm.clip_grad_norm_(c)`", layouts=("pp",),
       refused=(NotSupportedError, "pm.clip_grad_norm_(c)"))  # fmt: skip
def clip_norm_of_a_stage(run: Run) -> None:
    run.backward(run.batch(0))
    clip_grad_norm_(run.pm.parameters(), 0.1)


@habit(SECTION, "`clip_grad_norm_(..., foreach=True)`, `get_total_norm`", "one all_reduce for all")
def clip_norm_of_lists(run: Run) -> None:
    optimizers = run.optimizers()
    run.backward(run.batch(0))
    norms = [get_total_norm([p.grad for p in m.parameters()], foreach=True) for m in run.both()]
    assert abs(norms[0] - norms[1]) < 1e-10
    for m in run.both():
        clip_grad_norm_(m.parameters(), 0.1, foreach=True)
    run.update(optimizers)


@habit(SECTION, "`pm.clip_grad_norm_(c)`", "the norm over all stages", layouts=ALL)
def own_clip(run: Run) -> None:
    optimizers = run.optimizers()
    run.backward(run.batch(0))
    norm = run.pm.clip_grad_norm_(0.1)
    assert abs(norm - clip_grad_norm_(run.alone.parameters(), 0.1)) < 1e-10
    run.update(optimizers)


@habit(SECTION, "`clip_grad_value_(pm.parameters(), c)`", layouts=ALL)
def clip_value(run: Run) -> None:
    run.train(run.optimizers(), 1, change=lambda m: clip_grad_value_(m.parameters(), 1e-2))


@habit(SECTION, "a norm by hand: `sum(p.grad.pow(2).sum() for p in ...)`")
def norm_by_hand(run: Run) -> None:
    optimizers = run.optimizers()
    run.backward(run.batch(0))
    norms = [sum(g.pow(2).sum() for g in gradients(m)) ** 0.5 for m in run.both()]
    assert abs(norms[0] - norms[1]) < 1e-10
    for m, norm in zip(run.both(), norms, strict=True):
        for p in m.parameters():
            p.grad.mul_(0.1 / (norm + 1e-6))
    run.update(optimizers)


@habit(SECTION, "the same with pipeline stages", "use `pm.clip_grad_norm_(c)`", layouts=("pp",),
       refused=(NotSupportedError, "pipeline stages"))  # fmt: skip
def norm_by_hand_of_a_stage(run: Run) -> None:
    run.backward(run.batch(0))
    _ = sum(g.pow(2).sum().item() for g in gradients(run.pm)) ** 0.5


@habit(SECTION, "`sum(p.numel() for p in pm.parameters())`, `p.shape`", "of whole tensors")
def counts(run: Run) -> None:
    found, wanted = [{n: p.shape for n, p in m.named_parameters()} for m in run.both()]
    assert found == wanted
    numbers = [sum(p.numel() for p in m.parameters() if p.requires_grad) for m in run.both()]
    assert numbers[0] == numbers[1]


@habit(SECTION, "`print(p)`", "the shape, this rank's shape, and the shard")
def printed(run: Run) -> None:
    name, parameter = next(iter(run.pm.named_parameters()))
    text = repr(parameter)
    assert name in text
    assert str(tuple(parameter.shape)) in text
    assert isinstance(parameter, Sharded)
    assert str(tuple(parameter.to_local().shape)) in text


@habit(SECTION, "statistics: `p.mean()`, `p.abs().max()`, `p.min()`, `(p == 0).sum()`")
def statistics(run: Run) -> None:
    run.backward(run.batch(0))

    def of(p: Tensor) -> list[float]:
        assert p.grad is not None
        return [
            v.item()
            for x in (p.detach(), p.grad)
            for v in (x.mean(), x.abs().max(), x.min(), x.sum(), x.norm(), x.norm(1), (x > 0).sum())
        ]

    for found, wanted in zip(*(m.parameters() for m in run.both()), strict=True):
        for a, b in zip(of(found), of(wanted), strict=True):
            assert abs(a - b) < 1e-10 * max(1.0, abs(b))


@habit(SECTION, "`torch.isfinite(p.grad).all()`, `p.grad.isnan().any()`")
def finite(run: Run) -> None:
    run.backward(run.batch(0))
    for p in run.pm.parameters():
        assert p.grad is not None
        assert torch.isfinite(p.grad).all()
        assert not p.grad.isnan().any()
    # One element on one rank: every rank must see it.
    first = next(iter(run.pm.parameters()))
    assert isinstance(first.grad, Sharded)
    with torch.no_grad():
        first.grad.to_local().view(-1)[:1] = math.nan
    assert first.grad.isnan().any()
    assert math.isnan(first.grad.max().item())
    for m in run.both():
        m.zero_grad()


@habit(SECTION, "an update by hand under `no_grad`: `p -= lr * p.grad`", layouts=ALL)
def update_by_hand(run: Run) -> None:
    for seed in range(2):
        run.backward(run.batch(seed))
        for m in run.both():
            with torch.no_grad():
                for p in m.parameters():
                    p -= 0.1 * p.grad
                    p.grad = None


@habit(SECTION, "`p.data.add_(p.grad, alpha=-lr)`, `p.grad.zero_()`", layouts=ALL)
def update_of_data(run: Run) -> None:
    for seed in range(2):
        run.backward(run.batch(seed))
        for m in run.both():
            for p in m.parameters():
                p.data.add_(p.grad, alpha=-0.1)
                p.grad.zero_()


@habit(SECTION, "setting weights: `p.copy_(tensor)`, `nn.init.zeros_(p)`", layouts=ALL)
def copied(run: Run) -> None:
    generator = torch.Generator().manual_seed(3)
    values = {
        name: torch.randn(p.shape, generator=generator, dtype=p.dtype)
        for name, p in run.alone.named_parameters()
    }
    for m in run.both():
        with torch.no_grad():
            for name, p in m.named_parameters():
                p.copy_(values[name])
        torch.nn.init.zeros_(dict(m.named_parameters()).get("head.bias", torch.empty(1)))
    run.train(run.optimizers())


@habit(SECTION, "random numbers into a parameter: `nn.init.normal_(p)`",
       "initialise the model before", refused=(NotSupportedError, "other numbers"))  # fmt: skip
def initialised_later(run: Run) -> None:
    torch.nn.init.normal_(next(iter(run.pm.parameters())))


@habit(SECTION, "`p[0] = 0`, `p.svd()`, `p.T @ p`: operators on the whole of a sharded parameter",
       "refused, unless `optimizer_gather=` names it",
       refused=(NotSupportedError, "optimizer_gather="))  # fmt: skip
def whole_operator(run: Run) -> None:
    for p in run.pm.parameters():
        with torch.no_grad():
            p[0] = 0.0


@habit(SECTION, 'the same with `optimizer_gather=["*"]`', "gathered, and written back", layouts=ALL,
       optimizer_gather=["*"])  # fmt: skip
def whole_operator_gathered(run: Run) -> None:
    for m in run.both():
        with torch.no_grad():
            for p in m.parameters():
                p[0] = 0.0
                if p.ndim == 2:
                    p.view(-1)[1:3].add_(1.0)
                    p.T[0].mul_(2.0)
                    p.add_(1e-3 * (p @ p.T @ p))
    run.train(run.optimizers())


@habit(SECTION, "weight decay by groups: `p.ndim < 2`, by name", layouts=ALL)
def groups(run: Run) -> None:
    optimizers = []
    for m in run.both():
        decayed = [p for p in m.parameters() if p.ndim >= 2]
        others = [p for p in m.parameters() if p.ndim < 2]
        optimizers.append(
            torch.optim.AdamW(
                [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
                lr=1e-2,
            )
        )
    run.train(optimizers)


@habit(SECTION, "an L2 term outside the model: `(0.1 * sum(p.pow(2).sum() ...)).backward()`")
def penalty(run: Run) -> None:
    def decay(m: Any) -> None:
        sum(0.1 * p.pow(2).sum() for p in m.parameters()).backward()

    run.train(run.optimizers(), 1, change=decay)


@habit(SECTION, "`loss.backward()` after `pm.step`", "`pm.step` has run it",
       refused=(NotSupportedError, "pm.step"))  # fmt: skip
def backward_again(run: Run) -> None:
    (run.pm.step(**run.batch(0)) / 2).backward()


@habit(SECTION, "gradient accumulation: `(loss / n).backward()`", "`pm.step(..., weight=1 / n)`",
       layouts=ALL)  # fmt: skip
def accumulation(run: Run) -> None:
    optimizers = run.optimizers()
    for seed in range(2):
        for k in range(2):
            run.backward(run.batch(2 * seed + k), weight=0.5)
        run.update(optimizers)


@habit(SECTION, "freezing later: `p.requires_grad_(False)`", "no gradient from then on",
       layouts=ALL)  # fmt: skip
def frozen_later(run: Run) -> None:
    optimizers = run.optimizers()
    run.train(optimizers, 1)
    for m in run.both():
        for name, p in m.named_parameters():
            p.requires_grad_("blocks" not in name)
    run.train(optimizers, 2, first=1)


@habit(SECTION, "unfreezing later", "set `requires_grad` before",
       refused=(NotSupportedError, "requires grad now"))  # fmt: skip
def unfrozen_later(run: Run) -> None:
    for p in run.model.blocks.parameters():  # type: ignore[union-attr]
        p.requires_grad_(False)
    for p in run.pm.parameters():
        p.requires_grad_(True)
    run.pm.step(**run.batch(0))


@habit(SECTION, "frozen layers, `filter(lambda p: p.requires_grad, pm.parameters())`", layouts=ALL)
def frozen(run: Run) -> None:
    for m in (run.model, run.alone):
        for p in m.embed.parameters():  # type: ignore[union-attr]
            p.requires_grad_(False)
    run.train([adamw(learning(m)) for m in run.both()])


@habit(SECTION, "a hook on a gradient: `p.register_hook(lambda g: g.clamp(-c, c))`", layouts=ALL)
def gradient_hook(run: Run) -> None:
    for m in run.both():
        for p in m.parameters():
            p.register_hook(lambda g: g.clamp(-0.01, 0.01) * 2)
    run.train(run.optimizers(), 3)


@habit(SECTION, "a hook that scales a gradient to norm 1: `lambda g: g / g.norm()`")
def norm_hook(run: Run) -> None:
    for m in run.both():
        for p in m.parameters():
            p.register_hook(lambda g: g / (g.norm() + 1e-3))
    run.train(run.optimizers(), 2)


@habit(SECTION, "optimizers in backward: `p.register_post_accumulate_grad_hook(step)`",
       "called after the step", layouts=ALL)  # fmt: skip
def optimizer_in_backward(run: Run) -> None:
    for m in run.both():
        own = {p: torch.optim.AdamW([p], lr=1e-2) for p in m.parameters()}

        def step(p: Tensor, own: dict[Any, torch.optim.AdamW] = own) -> None:
            own[p].step()
            own[p].zero_grad()

        for p in m.parameters():
            p.register_post_accumulate_grad_hook(step)
    for seed in range(3):
        run.backward(run.batch(seed))


@habit(SECTION, "hooks on `p.expand_as(p).grad_fn.next_functions[0][0]`, the AccumulateGrad node",
       "`p.register_post_accumulate_grad_hook`", layouts=ALL,
       refused=(NotSupportedError, "register_post_accumulate_grad_hook"))  # fmt: skip
def accumulate_node(run: Run) -> None:
    for p in run.pm.parameters():
        node: Any = p.expand_as(p).grad_fn
        node.next_functions[0][0].register_hook(lambda *_: None)
