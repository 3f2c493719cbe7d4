"""Habits of models with a teacher inside, which follows its student without gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.habits.table import Run, Small, habit

SECTION = "Teachers inside of the model"
# The teacher has no gradient, so a plan may cut it otherwise than its student.
GATHERED = "`optimizer_gather=` where plans cut the two differently"


class Taught(Small):
    """Small, and a copy of its blocks of which it predicts the hidden state."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.blocks).requires_grad_(False)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        embedded = self.embed(ids)
        hidden = wanted = embedded
        for student, teacher in zip(self.blocks, self.teacher, strict=True):
            hidden, wanted = student(hidden), teacher(wanted)
        scores = self.head(hidden).flatten(0, 1)
        distance = (hidden - wanted.detach()).pow(2).mean()
        return nn.functional.cross_entropy(scores, targets.flatten()) + distance


def follow(run: Run, update: Callable[[Any, Any], None]) -> None:
    """Two steps of training, after each of which the teachers follow."""
    optimizers = run.optimizers(
        lambda parameters: torch.optim.SGD([p for p in parameters if p.requires_grad], lr=0.1)
    )
    for seed in range(2):
        run.train(optimizers, n_steps=1, first=seed)
        with torch.no_grad():
            for m in run.both():
                update(m.blocks, m.teacher)


@habit(SECTION, "`k.mul_(0.99).add_(q, alpha=0.01)` for pairs of parameters", GATHERED,
       kind=Taught, optimizer_gather=["blocks.*"])  # fmt: skip
def teacher_by_pairs(run: Run) -> None:
    def update(student: Any, teacher: Any) -> None:
        for q, k in zip(student.parameters(), teacher.parameters(), strict=True):
            k.mul_(0.99).add_(q, alpha=0.01)

    follow(run, update)


@habit(SECTION, "`k.data = 0.99 * k.data + 0.01 * q.data` (MoCo)", GATHERED, kind=Taught,
       optimizer_gather=["*"])  # fmt: skip
def teacher_by_data(run: Run) -> None:
    def update(student: Any, teacher: Any) -> None:
        for q, k in zip(student.parameters(), teacher.parameters(), strict=True):
            k.data = k.data * 0.99 + q.data * 0.01

    follow(run, update)


@habit(SECTION, "`k.lerp_(q, 0.01)` by name, `torch._foreach_lerp_` of lists, `k.copy_(q)`",
       GATHERED, kind=Taught, optimizer_gather=["blocks.*"])  # fmt: skip
def teacher_by_lists(run: Run) -> None:
    def update(student: Any, teacher: Any) -> None:
        own = dict(student.named_parameters())
        for name, k in teacher[0].named_parameters():
            k.lerp_(own[f"0.{name}"], 0.01)
        torch._foreach_lerp_(list(teacher.parameters()), list(student.parameters()), weight=0.1)
        teacher[1].up.weight.copy_(student[1].up.weight)

    follow(run, update)


@habit(SECTION, "the same with `q.full_tensor()`, which gathers", kind=Taught)
def teacher_by_whole(run: Run) -> None:
    def update(student: Any, teacher: Any) -> None:
        for q, k in zip(student.parameters(), teacher.parameters(), strict=True):
            whole = q.full_tensor() if hasattr(q, "full_tensor") else q
            k.mul_(0.99).add_(whole, alpha=0.01)

    follow(run, update)
