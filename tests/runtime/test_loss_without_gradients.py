"""`pm.loss(**batch)` and evaluation with a `loss_fn`: the same batch as a step, on every rank."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from autopar import BatchError, Manual, NotPlannedError
from tests.helpers.jobs import machine, rank
from tests.helpers.nightly import one_in
from tests.helpers.pools import Pool

MESH = machine((1, 2))
PLANS = {"dp": Manual(dp=2), "tp": Manual(tp=2), "zero-3": Manual(dp=2, zero=3), "pp": Manual(pp=2)}


class Scores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = F.relu(self.up(x))
        return self.down(hidden), hidden.square().mean()


class Normed(Scores):
    """A batch norm: the loss depends on the mode, and training mode changes buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = F.relu(self.norm(self.up(x)))
        return self.down(hidden), hidden.square().mean()


class WithLoss(Scores):
    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        scores, _ = super().forward(x)
        return {"scores": scores} if labels is None else {
            "loss": F.cross_entropy(scores, labels), "scores": scores,
        }  # fmt: skip


def entropy(outputs: tuple[Tensor, Tensor], batch: Mapping[str, Any]) -> Tensor:
    losses = F.cross_entropy(outputs[0], batch["labels"], reduction="none")
    return (losses * batch["weights"]).mean()


def draw(seed: int, n_rows: int = 8) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(n_rows, 8, dtype=torch.float64, generator=generator),
        "labels": torch.randint(0, 4, (n_rows,), generator=generator),
        "weights": torch.rand(n_rows, dtype=torch.float64, generator=generator),
    }


def made(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind().double()


def ready(kind: type[nn.Module], plan: str, **options: Any) -> autopar.ParallelModule:
    options = {"loss_fn": entropy} | options
    return autopar.parallelize(made(kind), MESH, draw(0), manual=PLANS[plan], **options)


def evaluate(plan: str) -> dict[str, Any]:
    module = ready(Scores, plan, microbatches=2)
    in_training = module.loss(**draw(1)), module.loss(**draw(2, 6))
    module.eval()
    losses = module.loss(**draw(1)), module.loss(**draw(2, 6))
    outputs, everywhere = module(**draw(1)), module(gather="all", **draw(1))
    gradients = [p.grad for p in module.parameters()]
    module.train()
    return {
        "losses": (*in_training, *losses), "outputs": outputs, "all": everywhere,
        "gradients": gradients, "requires grad": losses[0].requires_grad,
        "after": module.step(**draw(3)),
    }  # fmt: skip


@one_in(3)
@pytest.mark.parametrize("plan", PLANS)
def test_evaluation_takes_the_batch_of_a_step(plan: str, workers: Pool) -> None:
    model = made(Scores)
    wanted = [entropy(model(draw(*s)["x"]), draw(*s)).detach() for s in ((1,), (2, 6))] * 2
    outputs = [o.detach() for o in model(draw(1)["x"])]
    for r, found in enumerate(workers(2).run(evaluate, plan)):
        torch.testing.assert_close(found["losses"], tuple(wanted), rtol=0, atol=1e-12)
        torch.testing.assert_close(found["all"], tuple(outputs), rtol=0, atol=1e-12)
        if plan == "pp" and r == 0:
            # The only scalar with gradient is taken for the model's own loss, so all have it.
            assert found["outputs"][0] is None
            torch.testing.assert_close(found["outputs"][1], outputs[1], rtol=0, atol=1e-12)
        else:
            torch.testing.assert_close(found["outputs"], tuple(outputs), rtol=0, atol=1e-12)
        assert found["gradients"] == [None] * len(found["gradients"])
        assert not found["requires grad"]
        after = entropy(model(draw(3)["x"]), draw(3)).detach()
        torch.testing.assert_close(found["after"], after, rtol=0, atol=1e-12)


def in_both_modes(plan: str) -> tuple[list[Tensor], dict[str, Tensor]]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "microbatches=.*gradient accumulation")
        module = ready(Normed, plan, microbatches=2)
    losses = [module.step(**draw(0)), module.loss(**draw(1))]
    module.eval()
    losses.append(module.loss(**draw(1)))
    return losses, module.full_state_dict()


@pytest.mark.parametrize("plan", ["dp", "pp"])
def test_the_mode_decides(plan: str, workers: Pool) -> None:
    """In training mode a norm takes the statistics of the whole batch, and updates its buffers."""
    model = made(Normed)
    chunks = [{k: v.chunk(2)[i] for k, v in draw(0).items()} for i in range(2)]
    step = torch.stack([entropy(model(chunk["x"]), chunk) for chunk in chunks]).mean()
    wanted = [step, entropy(model(draw(1)["x"]), draw(1))]
    wanted.append(entropy(copy.deepcopy(model).eval()(draw(1)["x"]), draw(1)))
    found = workers(2).run(in_both_modes, plan)
    for losses, _ in found:
        torch.testing.assert_close(losses, [w.detach() for w in wanted], rtol=0, atol=1e-12)
    torch.testing.assert_close(found[0][1], dict(model.state_dict()), rtol=0, atol=1e-12)


def of_the_model(plan: str) -> tuple[Tensor, Any, str]:
    inputs = {k: v for k, v in draw(0).items() if k != "weights"}
    module = autopar.parallelize(made(WithLoss), MESH, inputs, manual=PLANS[plan])
    module.eval()
    with pytest.raises(BatchError, match=r"returns no loss for a batch of \['x'\]"):
        module.loss(x=inputs["x"])
    return module.loss(**inputs), module(**inputs)["loss"], str(module(x=inputs["x"]).keys())


@pytest.mark.parametrize("plan", ["dp", "pp"])
def test_the_models_own_loss(plan: str, workers: Pool) -> None:
    inputs = {k: v for k, v in draw(0).items() if k != "weights"}
    wanted = made(WithLoss)(**inputs)["loss"].detach()
    for mine, of_output, keys in workers(2).run(of_the_model, plan):
        torch.testing.assert_close((mine, of_output), (wanted, wanted), rtol=0, atol=1e-12)
        assert keys == "dict_keys(['scores'])"


def refusals() -> None:
    with pytest.raises(NotPlannedError, match=r"pm\.prepare"):
        autopar.parallelize(made(Scores), MESH, loss_fn=entropy).loss(**draw(0))
    module = ready(Scores, "tp")
    with pytest.raises(BatchError, match=r"pm\.loss\(\.\.\.\): the batch differs between ranks"):
        module.loss(**draw(rank()))
    module.eval()
    with pytest.raises(BatchError, match=r"has \['wieghts'\] besides"):
        module(x=draw(0)["x"], wieghts=draw(0)["weights"])


def test_what_is_refused(workers: Pool) -> None:
    workers(2).run(refusals)


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.head(x), 0.5, training=True).square().mean()


def test_each_call_draws_anew() -> None:
    """Dropout that stays on in evaluation, to sample predictions."""
    module = autopar.parallelize(made(Dropping), machine((1, 1)), {"x": draw(0)["x"]})
    losses = [module.loss(x=draw(0)["x"]), module.step(x=draw(0)["x"])]
    module.eval()
    losses += [module(x=draw(0)["x"]), module(x=draw(0)["x"])]
    assert len({loss.item() for loss in losses}) == 4
