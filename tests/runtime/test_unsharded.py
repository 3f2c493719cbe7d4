"""`pm.unsharded()`: the user's own model, with the values that the parallel module has learned."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.errors import NotSupportedError
from tests.helpers.jobs import machine, tokens
from tests.runtime.test_buffers import Counting, batch


class Tied(nn.Module):
    """A head that is the embedding, a frozen scale, and a hook that counts calls."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(8), requires_grad=False)
        self.notes: dict[str, Any] = {"name": "tied"}

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.embed(input_ids) * self.scale)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def trained(model: nn.Module, rows: dict[str, Any], **options: Any) -> autopar.ParallelModule:
    pm = autopar.parallelize(model, machine((1, 1)), rows, **options)
    optimizer = torch.optim.SGD([p for p in pm.parameters() if p.requires_grad], lr=0.5)
    pm.step(**rows)
    optimizer.step()
    return pm


def test_ties_and_frozen_parameters_stay_what_they_are() -> None:
    model, rows = Tied(), tokens(0, 4, 8, 16)
    before = model.embed.weight.detach().clone()
    pm = trained(model, rows)
    whole = pm.unsharded()
    assert isinstance(whole, Tied) and whole is not model
    assert whole.head.weight is whole.embed.weight and whole.notes == model.notes
    assert whole.notes is not model.notes
    assert not whole.training and not whole.scale.requires_grad and whole.embed.weight.requires_grad
    assert whole.embed.weight.grad is None
    assert torch.equal(model.embed.weight, before)
    assert not torch.equal(whole.embed.weight, before)
    assert torch.equal(whole(**rows), pm.eval().loss(**rows))
    with torch.no_grad():
        whole.embed.weight.zero_()
    assert pm.full_state_dict()["embed.weight"].any()


def test_buffers_that_steps_change_come_too() -> None:
    """Also one that state dicts leave out."""
    pm = trained(Counting().double(), batch(0))
    whole = pm.unsharded()
    assert isinstance(whole, Counting)
    assert whole.count.item() == 1 and whole.history[0].any()
    assert "count" not in whole.state_dict()
    pm.zero_grad()
    again: dict[str, Any] = {**batch(1)}
    pm.step(**again)
    assert whole.count.item() == 1


def test_values_take_the_dtypes_of_the_model() -> None:
    rows = tokens(0, 4, 8, 16)
    pm = trained(Tied().to(torch.bfloat16), rows, master_weights=True)
    assert {p.dtype for p in pm.parameters()} == {torch.float32}
    whole = pm.unsharded()
    assert whole is not None and {p.dtype for p in whole.parameters()} == {torch.bfloat16}


def test_a_model_that_cannot_be_copied_is_named() -> None:
    model, rows = Tied(), tokens(0, 4, 8, 16)
    pm = trained(model, rows)
    model.notes["lock"] = threading.Lock()
    with pytest.raises(NotSupportedError, match=r"Tied cannot be copied[\s\S]*full_state_dict"):
        pm.unsharded()
