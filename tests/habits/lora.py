"""Habits of fine-tuning: adapters on frozen weights, biases alone, a head on a frozen backbone."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import autopar
from tests.habits.table import LENGTH, VOCABULARY, WIDTH, Block, Run, Small, adamw, habit, make
from tests.habits.table import STAGES_FIRST as ALL
from tests.habits.tasks import learning
from tests.helpers.jobs import machine

SECTION = "Fine-tuning"


class Lora(nn.Module):
    """A frozen linear layer, and a trained product of two narrow matrices beside it."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Linear(base.in_features, rank, bias=False)
        self.b = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 0.5 * self.b(self.a(x))

    def merged(self) -> Tensor:
        return self.base.weight + 0.5 * self.b.weight @ self.a.weight


class Adapted(Small):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        for block in self.blocks:
            assert isinstance(block, Block)
            block.up, block.down = Lora(block.up), Lora(block.down)  # type: ignore[assignment]


class Probe(Small):
    """A head on features that are computed without gradients."""

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        with torch.no_grad():
            h = self.hidden(self.embed(ids))
        logits = self.head(h.detach())
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def check_frozen(run: Run) -> None:
    """No gradient and no optimizer state for what is frozen."""
    optimizers = [adamw(learning(m)) for m in run.both()]
    run.train(optimizers, 1)
    run.backward(run.batch(1))
    for name, p in run.pm.named_parameters():
        assert p.requires_grad is run.alone.get_parameter(name).requires_grad
        assert (p.grad is not None) is p.requires_grad
    run.update(optimizers)


@habit(SECTION, "LoRA by hand: frozen weights, adapters that train", layouts=ALL, kind=Adapted)
def lora(run: Run) -> None:
    check_frozen(run)


@habit(SECTION, "LoRA merged: `pm.full_state_dict()` into the model", layouts=ALL, kind=Adapted)
def lora_merged(run: Run) -> None:
    run.train([adamw(learning(m)) for m in run.both()])
    whole = run.pm.full_state_dict()
    if whole:
        run.model.load_state_dict(whole)
        for m, other in zip(run.model.modules(), run.alone.modules(), strict=True):
            if isinstance(m, Lora) and isinstance(other, Lora):
                assert torch.allclose(m.merged(), other.merged(), rtol=0, atol=1e-10)


@habit(SECTION, "adapters alone in a file: `{n: v for n, v in full.items() if trained}`",
       layouts=ALL, kind=Adapted)  # fmt: skip
def adapters_alone(run: Run) -> None:
    torch.manual_seed(4)
    values = {n: torch.randn_like(p) for n, p in run.alone.named_parameters() if p.requires_grad}
    for m in run.both():
        assert not m.load_state_dict(values, strict=False).unexpected_keys
    run.train([adamw(learning(m)) for m in run.both()])


@habit(SECTION, "BitFit: only biases train", layouts=ALL)
def bitfit(run: Run) -> None:
    for m in (run.model, run.alone):
        for name, p in m.named_parameters():
            p.requires_grad_(name.endswith("bias"))
    check_frozen(run)


@habit(SECTION, "linear probing: a head on features of `torch.no_grad()`, `detach()`",
       kind=Probe)  # fmt: skip
def probing(run: Run) -> None:
    for m in (run.model, run.alone):
        m.requires_grad_(False)
        m.head.requires_grad_(True)
    check_frozen(run)


@habit(SECTION, "memory of frozen weights", "no gradients and no optimizer state are predicted")
def frozen_memory(run: Run) -> None:
    def peak(trained: str) -> float:
        model = make()
        for name, p in model.named_parameters():
            p.requires_grad_(trained in name)
        ids = torch.zeros(1, LENGTH, dtype=torch.long)
        batch = {"ids": ids, "targets": ids}
        plan = autopar.plan(model, machine((1, 1)), batch, manual=autopar.Manual())
        return plan.predicted.peak_bytes

    # A gradient and two moments of each frozen parameter but the head's bias.
    saved = peak("") - peak("head.bias")
    n_frozen = sum(p.numel() for n, p in run.alone.named_parameters() if n != "head.bias")
    assert n_frozen > VOCABULARY * WIDTH
    assert saved >= 3 * 8 * n_frozen
