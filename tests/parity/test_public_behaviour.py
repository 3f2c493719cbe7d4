"""A parallel module beyond training on one shape: batches, outputs and state, on two processes."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar import Manual, NotPlannedError
from autopar.runtime.launch import WorkerPool
from tests.helpers.jobs import CASES, error, machine, tokens
from tests.helpers.nightly import nightly
from tests.parity.table import TOLERANCE
from tests.parity.test_pipeline_public import Step, reference_of

MESH = machine((1, 2))
DP, TP = Manual(dp=2), Manual(tp=2)
Pool = Callable[[int], WorkerPool]


def model() -> nn.Module:
    return CASES["gpt2"].model()


def ready(manual: Manual = TP, **options: Any) -> autopar.ParallelModule:
    options = {"microbatches": 1} | options
    return autopar.parallelize(model(), MESH, tokens(0), precision="fp64", manual=manual, **options)


@lru_cache
def reference(seed: int, training: bool = True) -> Step:
    """(loss, outputs, gradients) of one process."""
    return reference_of("gpt2", tokens(seed), training)


def plan_late() -> tuple[str, Tensor, bool]:
    module = autopar.parallelize(model(), MESH, precision="fp64", manual=TP)
    try:
        module.parameters().__next__()
        message = ""
    except NotPlannedError as raised:
        message = str(raised)
    loss = module.step(**tokens(0))
    same = module.prepare(**tokens(0)) is module
    return message, loss, same and len(list(module.parameters())) > 0


def test_planning_waits_for_the_first_step(workers: Pool) -> None:
    for message, loss, is_ready in workers(2).run(plan_late):
        assert "pm.prepare(**batch)" in message
        assert error(loss, reference(0)[0]) <= TOLERANCE
        assert is_ready


def evaluate(manual: Manual, gather: str) -> dict[str, Any]:
    module = ready(manual)
    module.eval()
    output = module(gather=gather, **tokens(1))
    alone = module(input_ids=tokens(1)["input_ids"])
    module.train()
    return {
        "type": type(output).__name__, "keys": list(output.keys()), "loss": output.loss,
        "logits": output.logits, "without labels": alone.logits, "keys alone": list(alone.keys()),
        "requires_grad": output.logits.requires_grad, "after": module.step(**tokens(0)),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("manual", "gather"),
    [
        pytest.param(DP, "last", marks=nightly),
        pytest.param(Manual(dp=2, zero=3), "all", marks=nightly),
        (Manual(tp=2, sp=True), "last"),
    ],
    ids=["data parallel", "ZeRO-3", "sequence parallel"],
)
def test_evaluation_returns_the_models_own_output(
    manual: Manual, gather: str, workers: Pool
) -> None:
    """Logits are whole on every rank, and training continues afterwards."""
    loss, output, _ = reference(1, training=False)
    for found in workers(2).run(evaluate, manual, gather):
        assert found["type"] == type(output).__name__ == "CausalLMOutputWithCrossAttentions"
        assert found["keys"] == ["loss", "logits"]
        assert found["keys alone"] == ["logits"]
        assert error(found["loss"], loss) <= TOLERANCE
        assert found["logits"].shape == output.logits.shape
        assert error(found["logits"], output.logits.detach()) <= TOLERANCE
        assert error(found["without labels"], output.logits.detach()) <= TOLERANCE
        assert not found["requires_grad"]
        assert error(found["after"], reference(0)[0]) <= TOLERANCE


def train_beside_the_model() -> bool:
    own = model()
    before = {n: v.clone() for n, v in own.state_dict().items()}
    held, modules = dict(own.named_parameters()), list(own.modules())
    module = autopar.parallelize(own, MESH, tokens(0), manual=TP)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module.step(**tokens(0))
    optimizer.step()
    module.eval()
    module(**tokens(0))
    return (
        all(torch.equal(v, before[n]) for n, v in own.state_dict().items())
        and all(p is held[n] and p.grad is None for n, p in own.named_parameters())
        and list(own.modules()) == modules
        and own.training
    )


def test_the_users_model_is_left_untouched(workers: Pool) -> None:
    assert workers(2).run(train_beside_the_model) == [True, True]
