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
STATES = "encoder_last_hidden_state"


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


def outputs_of(model: str, layout: str) -> dict[str, Any]:
    """Run a step that hands over its outputs, then evaluation, then another step."""
    module = ready(model, layout)
    seen: list[Any] = []
    loss = module.step(outputs=seen.append, **CASES[model].batch(0))
    gradients, bound = module.full_gradients(), module.plan.bound
    assert bound is not None
    module.eval()
    batch = CASES[model].batch(1)
    last = module(**batch)
    everywhere = module(gather="all", **batch)
    module.train()
    return {
        "seen": [dict(outputs) for outputs in seen], "loss": loss, "gradients": gradients,
        "n_blocks": bound.pipeline.n_blocks, "ranks": module.plan.stages[-1].ranks,
        "last": {k: last[k] for k in ("loss", "logits", STATES) if k in last},
        "all": dict(everywhere), "type": type(last).__name__,
        "after": module.step(**CASES[model].batch(0)),
    }  # fmt: skip


@pytest.fixture(
    scope="module",
    params=[pytest.param(layout, marks=nightly) for layout in ("pp2 dp2 zero-3", "4 x (1,1)")],
)
def t5_outputs(request: pytest.FixtureRequest, workers: Pool) -> list[dict[str, Any]]:
    """`outputs_of` T5 on every rank of a layout."""
    return workers(N_RANKS).run(outputs_of, "t5", request.param)


def test_evaluation(t5_outputs: list[dict[str, Any]]) -> None:
    """Every rank has the loss. Other tensors are on the last stage, or on all if all gather."""
    loss, outputs, _ = reference("t5", 1, training=False)
    wanted = {"loss": loss, "logits": outputs.logits, STATES: outputs[STATES]}
    wanted = {name: value.detach() for name, value in wanted.items()}
    trained, _, _ = reference("t5", 0)
    for rank, found in enumerate(t5_outputs):
        assert found["type"] == type(outputs).__name__
        assert off(found["all"], wanted) == {}
        if rank in found["ranks"]:
            assert off(found["last"], wanted) == {}
        else:
            assert error(found["last"].pop("loss"), loss) <= TOLERANCE
            assert not any(isinstance(value, Tensor) for value in found["last"].values())
        assert error(found["after"], trained) <= TOLERANCE


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


def test_outputs_of_each_microbatch(t5_outputs: list[dict[str, Any]]) -> None:
    """Only the last stage hands outputs over, in the order of the batch's rows."""
    loss, outputs, gradients = reference("t5", 0)
    assert off(t5_outputs[0]["gradients"], gradients) == {}
    for rank, of_rank in enumerate(t5_outputs):
        assert error(of_rank["loss"], loss) <= TOLERANCE
        if rank not in of_rank["ranks"]:
            assert of_rank["seen"] == []
            continue
        seen = of_rank["seen"]
        assert len(seen) == 4
        assert error(sum((o["loss"] for o in seen), torch.zeros(())) / 4, loss) <= TOLERANCE
        for name in ("logits", STATES):
            whole = outputs[name].detach()
            dealt = whole.unflatten(0, (of_rank["n_blocks"], 4, -1))
            for k, of_microbatch in enumerate(seen):
                assert error(of_microbatch[name], dealt[:, k].flatten(0, 1)) <= TOLERANCE


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


def fewer_rows(batch: Batch) -> Batch:
    return {name: value[:24, :6].contiguous() for name, value in batch.items()}


def accumulate(model: str, layout: str) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Steps on two shapes, without `zero_grad` between them."""
    module = ready(model, layout)
    batches = CASES[model].batch(0), fewer_rows(CASES[model].batch(1))
    return [module.step(**batch) for batch in batches], module.full_gradients()


@nightly
def test_gradients_add_up_over_steps_of_other_shapes(workers: Pool) -> None:
    """So do those of the tied embedding, which both stages use."""
    loss, _, gradients = reference("gpt2", 0)
    other, _, more = reference_of("gpt2", fewer_rows(CASES["gpt2"].batch(1)))
    found = workers(N_RANKS).run(accumulate, "gpt2", "(1,1) + (1,3)")
    for losses, _ in found:
        assert error(losses[0], loss) <= TOLERANCE
        assert error(losses[1], other) <= TOLERANCE
    assert off(found[0][1], {name: g + more[name] for name, g in gradients.items()}) == {}


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
