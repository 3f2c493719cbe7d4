"""`torch.utils.checkpoint`: regions are marked, numbers are eager's, other cases are refused."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autopar.capture import capture
from autopar.errors import NotSupportedError
from autopar.program.graph import Program
from tests.helpers.capture_harness import Module
from tests.helpers.jobs import gpt2, tokens
from tests.helpers.models import checkpointed as models


def regions(program: Program) -> list[tuple[str, str]]:
    """The first and the last operator of each region."""
    keys = program.keys
    return [(keys[r.operators[0]], keys[r.operators[-1]]) for r in program.checkpointed]


def test_a_region_is_what_the_call_runs() -> None:
    block = ("norm/layer_norm#0", "/add.Tensor#0")
    whole = [(f"blocks.{i}.{block[0]}", f"blocks.{i}{block[1]}") for i in range(models.N_BLOCKS)]

    def found(how: str) -> list[tuple[str, str]]:
        return regions(capture(models.stack(how), models.batch()))

    assert found("none") == []
    assert found("blocks") == found("reentrant") == found("nested") == found("selective") == whole
    assert found("second") == whole[1::2]
    assert found("pairs") == [(whole[0][0], whole[1][1])]  # torch leaves the last pair out
    part = found("part")
    assert [first for first, _ in part] == [f"blocks.{i}.up/linear#0" for i in range(4)]
    assert all(last.endswith("tanh#" + str(i)) for i, (_, last) in enumerate(part))


def test_gradient_checkpointing_of_transformers() -> None:
    model = gpt2(1).train()
    assert capture(model, tokens(0)).checkpointed == ()
    model.activation_checkpointing_enable()  # type: ignore[operator]
    found = regions(capture(model, tokens(0)))
    assert [first for first, _ in found] == ["transformer.h.0.ln_1/layer_norm#0"]
    assert capture(model, tokens(0), training=False).checkpointed == ()


def test_a_policy_is_noted_and_other_contexts_are_refused() -> None:
    program = capture(models.stack("selective"), models.batch())
    assert all(region.is_selective for region in program.checkpointed)
    (note,) = program.audit.replaced
    assert "selective" in note.why and "4 checkpointed regions" in note.what

    def body(self: Any, a: Tensor) -> Tensor:
        twice = lambda: (contextlib.ExitStack(), contextlib.ExitStack())  # noqa: E731
        return checkpoint(self.linear, a, use_reentrant=False, context_fn=twice).sum()

    with pytest.raises(NotSupportedError, match="ExitStack") as error:
        capture(Module(body), (torch.randn(2, 4),))
    assert "hint: use create_selective_checkpoint_contexts" in str(error.value)


def test_a_buffer_that_would_change_twice_is_refused() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.norm, self.linear(x), use_reentrant=False).square().sum()

    with pytest.raises(
        NotSupportedError, match=r"`norm\.num_batches_tracked` changes inside"
    ) as error:
        capture(Normed(), (torch.randn(8, 4),))
    assert "recompute='full'" in str(error.value)
    assert capture(Normed(), (torch.randn(8, 4),), training=False).updates == ()


def test_torchs_code_is_what_it_was() -> None:
    code = torch_checkpoint._checkpoint_without_reentrant_generator.__code__
    capture(models.stack("blocks"), models.batch())
    assert torch_checkpoint._checkpoint_without_reentrant_generator.__code__ is code
    leaf = torch.randn(2, 4, requires_grad=True)
    checkpoint(torch.tanh, leaf, use_reentrant=False).sum().backward()
    assert leaf.grad is not None
