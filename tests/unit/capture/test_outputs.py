"""Which result of a model is its loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutput

from autopar.capture import capture
from autopar.errors import CaptureError
from tests.helpers.capture_harness import Module
from tests.helpers.jobs import gpt2, tokens


def made(body: Any) -> Any:
    return capture(Module(body), (torch.randn(2, 4),))


def both(self: Any, a: Tensor) -> tuple[Tensor, Tensor]:
    logits = self.linear(a)
    return logits, logits.square().mean()


BODIES = {
    "logits, loss": both,
    "metric, loss": lambda self, a: (both(self, a)[0].detach().mean(), both(self, a)[1]),
    "a dict": lambda self, a: dict(zip(("logits", "objective"), both(self, a), strict=True)),
    "nested": lambda self, a: {"x": {"y": [*both(self, a)]}, "n": 3},
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_the_only_scalar_with_gradient_is_the_loss(body: Any) -> None:
    program = made(body)
    assert program.loss is not None and program.loss in program.has_grad
    assert program.node(program.loss).meta["val"].shape == ()
    outputs = program.rebuild([torch.zeros(())] * len(program.outputs))
    assert type(outputs) is type(body(Module(body), torch.randn(2, 4)))


def test_a_named_or_first_loss_goes_before_others() -> None:
    def first(self: Any, a: Tensor) -> tuple[Tensor, Tensor]:
        logits, loss = both(self, a)
        return loss, logits.abs().sum()

    def named(self: Any, a: Tensor) -> dict[str, Tensor]:
        loss, other = first(self, a)
        return {"other": other, "loss": loss}

    for body in (first, named):
        program = made(body)
        assert program.keys[program.loss] == "/div.Tensor#0"


def test_several_scalars_are_listed() -> None:
    def body(self: Any, a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits, loss = both(self, a)
        return logits, loss, logits.abs().sum()

    with pytest.raises(CaptureError, match="2 scalars that could be the loss: result 1, result 2"):
        made(body)
    program = capture(Module(body), (torch.randn(2, 4),), training=False)
    assert program.loss is None


def test_an_output_that_says_it_has_no_loss_has_none() -> None:
    def body(self: Any, a: Tensor) -> CausalLMOutput:
        logits, other = both(self, a)
        return CausalLMOutput(logits=logits, hidden_states=(other,))

    with pytest.raises(CaptureError, match="returns no scalar loss"):
        made(body)
    with pytest.raises(CaptureError, match="returns no scalar loss"):
        capture(gpt2(1), {"input_ids": tokens(0)["input_ids"]})
