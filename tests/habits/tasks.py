"""Habits with models and batches of their own: how both sides take a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from typing import Any, TypeVar

import torch
from torch import Tensor

import autopar
from tests.habits.table import ALL, LAYOUTS, Batch, Change, Run, adamw, habit
from tests.helpers.jobs import machine

LossFn = Callable[[Any, Mapping[str, Any]], Tensor]
T = TypeVar("T", bound=Callable[..., Any])


def parallelize(run: Run, batch: Batch, **options: Any) -> None:
    """Make `run.pm` for this batch, not for one of the table."""
    given = {"manual": LAYOUTS[run.layout], **run.options, **options}
    run.pm = autopar.parallelize(run.model, machine((1, 2)), batch, **given)


def backward(run: Run, batch: Batch, loss_fn: LossFn | None = None, **how: Any) -> None:
    """`run.backward`, of a model whose loss is `loss_fn`'s or in its output."""
    found = run.pm.step(**batch, **how)
    wanted = loss_alone(run, batch, loss_fn)
    (wanted * how.get("weight", 1.0)).backward()
    run.losses.append((found.item(), wanted.item()))


def loss_alone(run: Run, batch: Batch, loss_fn: LossFn | None = None) -> Tensor:
    """The loss of one process."""
    if loss_fn is None:
        out = run.alone(**batch)
        return out["loss"] if isinstance(out, dict) else out
    known = signature(run.alone.forward).parameters
    return loss_fn(run.alone(**{n: v for n, v in batch.items() if n in known}), batch)


def train(
    run: Run,
    batches: Callable[[int], Batch],
    loss_fn: LossFn | None = None,
    optimizers: Sequence[Any] | None = None,
    n_steps: int = 2,
    first: int = 0,
    change: Change = lambda m: None,
    **options: Any,
) -> None:
    """Steps of both on batches of one kind, as `Run.train`; makes `run.pm` for the first."""
    if "pm" not in vars(run):
        parallelize(run, batches(0), **options, **({"loss_fn": loss_fn} if loss_fn else {}))
    optimizers = optimizers or run.optimizers()
    for seed in range(first, first + n_steps):
        backward(run, batches(seed), loss_fn)
        for m in run.both():
            change(m)
        run.update(optimizers)


def learning(module: Any) -> list[Any]:
    return [p for p in module.parameters() if p.requires_grad]


def of_learning(run: Run) -> list[torch.optim.Optimizer]:
    """Stages may have nothing that learns, and torch takes no empty list."""
    has_stages = run.layout == "pp"
    return [adamw(m.parameters() if has_stages else learning(m)) for m in run.both()]


def trains(
    *line: str,
    batches: Callable[[int], Batch] | None = None,
    layouts: tuple[str, ...] = ALL,
    **options: Any,
) -> Callable[[T], T]:
    """Enter a habit that is all in a model or in a loss, which is decorated: steps of both sides.

    Without `batches` they are the table's; `options` are those of `habit`.
    """

    def enter(part: T) -> T:
        is_model = isinstance(part, type)

        def steps(run: Run) -> None:
            if batches is None:
                run.train(of_learning(run))
            else:
                train(run, batches, None if is_model else part)

        steps.__name__ = part.__name__
        given = options | ({"kind": part} if is_model else {})
        habit(*line, layouts=layouts, **given)(steps)
        return part

    return enter
