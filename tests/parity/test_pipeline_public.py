"""A module of several stages on four processes: outputs, evaluation, batches of other shapes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.capture import reference_step
from autopar.runtime.launch import WorkerPool
from tests.helpers.captures import captured
from tests.helpers.jobs import Batch, error, gradient, machine
from tests.helpers.nightly import nightly, sampled
from tests.helpers.pipeline_jobs import CASES, LAYOUTS, ROWS
from tests.parity.table import TOLERANCE

Pool = Callable[[int], WorkerPool]
Step = tuple[Tensor, Any, dict[str, Tensor]]  # loss, outputs, gradients
N_RANKS = 4


def ready(model: str, layout: str, microbatches: int = 4) -> autopar.ParallelModule:
    case, place = CASES[model], LAYOUTS[layout]
    return autopar.parallelize(
        case.model(), machine(place.mesh), case.batch(0), precision="fp64",
        microbatches=microbatches, loss_fn=case.loss_fn, **place.options(model),
    )  # fmt: skip


@lru_cache
def reference(
    model: str, seed: int, training: bool = True
) -> tuple[Tensor, Any, dict[str, Tensor]]:
    """(loss, outputs, gradients) of a step on one process."""
    return reference_of(model, CASES[model].batch(seed), training)


def reference_of(model: str, batch: Batch, training: bool = True) -> Step:
    own = CASES[model].model()
    program = captured(own, batch, training=training, precision="fp64")
    values = {n: p.detach().double().requires_grad_() for n, p in own.named_parameters()}
    loss, outputs = reference_step(program, values, batch)
    assert loss is not None
    loss.backward()
    return loss.detach(), outputs, {n: gradient(p) for n, p in values.items()}


def off(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, float]:
    assert found.keys() == wanted.keys()
    errors = {name: error(tensor, wanted[name]) for name, tensor in found.items()}
    return {name: e for name, e in errors.items() if not e <= TOLERANCE}


def predict(layout: str) -> tuple[Any, Any]:
    module = ready("mlp", layout)
    module.eval()
    batch = CASES["mlp"].batch(1)
    return module(**batch), module(gather="all", **batch)


@pytest.mark.parametrize(
    ("layout", "n_last"), sampled([("4 x (1,1)", 1), ("(1,1) + (1,3)", 3)], [("(1,1) + (1,3)", 3)])
)
def test_evaluation_without_a_loss(layout: str, n_last: int, workers: Pool) -> None:
    """The loss is the user's `loss_fn`, which evaluation does not call."""
    case = CASES["mlp"]
    wanted = case.model().double()(case.batch(1)["x"].double()).detach()
    for rank, (last, everywhere) in enumerate(workers(N_RANKS).run(predict, layout)):
        assert error(everywhere, wanted) <= TOLERANCE
        if rank >= N_RANKS - n_last:
            assert torch.equal(last, everywhere)
        else:
            assert last is None


def step_locally(model: str, layout: str) -> dict[str, Any]:
    module = ready(model, layout)
    batch = CASES[model].batch(0)
    parts = {name: module.local_slice(name) for name in batch}
    mine = {name: batch[name][part] for name, part in parts.items() if part is not None}
    loss = module.step(batch="local", **mine)
    return {"parts": parts, "loss": loss, "gradients": module.full_gradients()}


@pytest.mark.parametrize("layout", ["pp2 dp2", pytest.param("(1,1) + (1,3)", marks=nightly)])
def test_a_local_batch(layout: str, workers: Pool) -> None:
    """Each rank passes its rows of the inputs that its stage reads, and nothing else."""
    loss, _, gradients = reference("gpt2", 0)
    found = workers(N_RANKS).run(step_locally, "gpt2", layout)
    n_first = 2 if layout == "pp2 dp2" else 1
    for rank, of_rank in enumerate(found):
        first = rank < n_first
        n_ranks = n_first if first else N_RANKS - n_first
        at = rank if first else rank - n_first
        mine = slice(at * ROWS // n_ranks, (at + 1) * ROWS // n_ranks)
        read, unread = ("input_ids", "labels") if first else ("labels", "input_ids")
        assert of_rank["parts"] == {read: mine, unread: None}
        assert error(of_rank["loss"], loss) <= TOLERANCE
    assert off(found[0]["gradients"], gradients) == {}


class Probe(nn.Module):
    """A trained layer on frozen features."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.features = nn.Linear(8, 8).requires_grad_(False)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.features(x).relu().relu())
        return scores.square().mean()


def probed(module: nn.Module, batch: dict[str, Tensor], step: Callable[..., Tensor]) -> list[float]:
    """Losses, with the optimizer that the warning asks for."""
    trained = [p for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW([{"params": trained}])
    losses = []
    for _ in range(3):
        losses.append(step(**batch).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def train_probe(batch: dict[str, Tensor]) -> tuple[list[str], list[float]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        manual = autopar.Manual(pp=2)
        pm = autopar.parallelize(Probe(), machine((1, 2)), batch, precision="fp64", manual=manual)
    return [str(w.message) for w in caught], probed(pm, batch, pm.step)


def test_a_stage_that_trains_nothing_is_told(workers: Pool) -> None:
    batch = {"x": torch.randn(8, 8)}
    first, second = workers(2).run(train_probe, batch)
    assert any('AdamW([{"params": pm.parameters()}])' in text for text in first[0])
    assert not any("trains no parameter" in text for text in second[0])
    whole, rows = Probe().double(), {"x": batch["x"].double()}

    def step(x: Tensor) -> Tensor:
        loss: Tensor = whole(x)
        loss.backward()
        return loss.detach()

    wanted = pytest.approx(probed(whole, rows, step), rel=TOLERANCE)
    assert first[1] == wanted and second[1] == wanted
