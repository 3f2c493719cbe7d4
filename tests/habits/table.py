"""A habit of PyTorch users, and how it is tried.

A habit is a function of a `Run`, which has the parallel module `pm`, and `alone`: an equal model on
one process, which trains eagerly. The function does to both what the habit is about.

    works      after it, losses and weights of both are equal to 1e-10 in float64
    refused    it raises the error that is named, with a hint

A habit runs under each of its `layouts`, on two ranks.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar
from autopar import AutoparError, Manual, ParallelModule
from tests.helpers.jobs import machine

VOCABULARY, WIDTH, LENGTH, ROWS = 23, 8, 4, 4
TOLERANCE = 1e-10
LAYOUTS: Mapping[str, Manual] = {
    "tp": Manual(tp=2),
    "zero3": Manual(dp=2, zero=3),
    "pp": Manual(pp=2),
}
BOTH = ("tp", "zero3")
ALL = tuple(LAYOUTS)
# Others than the first run at night, so it is the one that a file's habits may break most easily.
ZERO_FIRST, STAGES_FIRST = ("zero3", "tp", "pp"), ("pp", "tp", "zero3")
Batch = dict[str, Any]
Change = Callable[[Any], object]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.down(torch.relu(self.up(self.norm(h))))


class Small(nn.Module):
    """An embedding, two blocks and a head; returns (logits, loss), as nanoGPT does."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def body(self, ids: Tensor) -> Tensor:
        return self.head(self.hidden(self.embed(ids)))

    def hidden(self, h: Tensor) -> Tensor:
        for block in self.blocks:
            h = block(h)
        return h

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.body(ids).flatten(0, 1), targets.flatten())


def make(kind: type[nn.Module] = Small) -> nn.Module:
    """A model in float64 with the same weights at each call."""
    torch.manual_seed(0)
    return kind().double()


def batch_of(seed: int, rows: int = ROWS, length: int = LENGTH) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCABULARY, (rows, length + 1), generator=generator)
    return {"ids": ids[:, :-1].contiguous(), "targets": ids[:, 1:].contiguous()}


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


@contextmanager
def quiet(message: str) -> Iterator[None]:
    """Without warnings that begin so."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=message)
        yield


captured_again = partial(quiet, ".*captured again")
captured_anew = partial(quiet, "captured a batch")


def all_refused(kind: type[AutoparError], *calls: Callable[[], object], words: str = "") -> None:
    """Raise the error of the first call, if every call raises one."""
    errors = []
    for call in calls:
        with pytest.raises(kind, match=words) as error:
            call()
        errors.append(error.value)
    raise errors[0]


@dataclass
class Run:
    """One try: the module on this rank, and the model alone."""

    layout: str
    options: dict[str, Any] = field(default_factory=dict)
    kind: type[nn.Module] = Small
    losses: list[tuple[float, float]] = field(default_factory=list)

    @cached_property
    def model(self) -> nn.Module:
        """The model that is parallelized."""
        return make(self.kind)

    @cached_property
    def alone(self) -> nn.Module:
        """An equal model, which one process trains."""
        return make(self.kind)

    @cached_property
    def pm(self) -> ParallelModule:
        return self.parallelize()

    def parallelize(self, **options: Any) -> ParallelModule:
        given = {"manual": LAYOUTS[self.layout], **self.options, **options}
        return autopar.parallelize(self.model, machine((1, 2)), self.batch(0), **given)

    def batch(self, seed: int, **sizes: int) -> Batch:
        return batch_of(seed, **sizes)

    def backward(self, batch: Batch, **how: Any) -> None:
        """Gradients on both sides; their losses are compared at the end."""
        loss, alone = self.pm.step(**batch, **how), self.alone(**batch)
        (alone * how.get("weight", 1.0)).backward()
        self.losses.append((loss.item(), alone.item()))

    def both(self) -> tuple[Any, Any]:
        return self.pm, self.alone

    def optimizers(self, make: Callable[[Any], Any] = adamw) -> tuple[Any, Any]:
        return make(self.pm.parameters()), make(self.alone.parameters())

    def train(
        self,
        optimizers: Sequence[Any],
        n_steps: int = 2,
        first: int = 0,
        change: Change = lambda m: None,
        plans: Iterable[Any] = (),
    ) -> None:
        """`change` comes between gradients and update, on both sides; `plans` step at the end."""
        for seed in range(first, first + n_steps):
            self.backward(self.batch(seed))
            for m in self.both():
                change(m)
            self.update(optimizers)
            for plan in plans:
                plan.step()

    def update(self, optimizers: Sequence[Any]) -> None:
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def check(self) -> None:
        """Losses and weights are those of one process; on rank 0."""
        for found, wanted in self.losses:
            assert abs(found - wanted) < TOLERANCE, (found, wanted)
        whole = self.pm.full_state_dict()
        if dist.get_rank() == 0:
            expected = self.alone.state_dict()
            assert whole.keys() == expected.keys()
            for name, value in expected.items():
                error = (whole[name] - value).abs().max().item()
                assert error < TOLERANCE, f"{name} is off by {error}"


@dataclass(frozen=True)
class Habit:
    """One line of the table.

    here      what happens, for the page
    refused   the error, and a part of its message; None if the habit works
    """

    name: str
    section: str
    habit: str
    here: str
    run: Callable[[Run], None]
    layouts: tuple[str, ...]
    options: Mapping[str, Any]
    kind: type[nn.Module]
    refused: tuple[type[AutoparError], str] | None


HABITS: dict[str, Habit] = {}


def habit(
    section: str,
    text: str,
    here: str = "the same",
    *,
    layouts: tuple[str, ...] = BOTH,
    refused: tuple[type[AutoparError], str] | None = None,
    kind: type[nn.Module] = Small,
    **options: Any,
) -> Callable[[Callable[[Run], None]], Callable[[Run], None]]:
    """Enter a function into the table."""

    def enter(run: Callable[[Run], None]) -> Callable[[Run], None]:
        name = run.__name__
        assert name not in HABITS, name
        HABITS[name] = Habit(name, section, text, here, run, layouts, options, kind, refused)
        return run

    return enter


def try_habit(name: str, layout: str) -> str:
    """On one rank: the text of the error that refused it, or "" if it works."""
    one = HABITS[name]
    run = Run(layout, copy.copy(dict(one.options)), one.kind)
    if one.refused is None:
        one.run(run)
        run.check()
        return ""
    kind, words = one.refused
    try:
        one.run(run)
    except kind as error:
        text = str(error)
        assert words in text, text
        assert "hint:" in text, text
        return text
    raise AssertionError(f"{name} is not refused under {layout}")
