"""Equal blocks are printed once and called in a loop; every bit is that of the long program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar import Manual
from autopar.codegen import Folded, source, unfolded
from autopar.options import Recompute
from tests.helpers.jobs import llama, machine, tokens
from tests.helpers.models.dropout_models import dropped_gpt2
from tests.helpers.models.recompute_models import recomputing
from tests.parity.test_weights_last import results

LAYOUTS = {
    "alone": (Manual(), (1, 1)),
    "tensor": (Manual(tp=2, sp=True), (1, 2)),
    "data": (Manual(dp=2), (1, 2)),
    "zero-2": (Manual(dp=2, zero=2, microbatch_size=2), (1, 2)),
    "zero-3": (Manual(dp=2, zero=3), (1, 2)),
    "stages": (Manual(pp=2, microbatch_size=2), (1, 2)),
}
MODELS: dict[str, Callable[[int], nn.Module]] = {"gpt2": dropped_gpt2, "llama": llama}


def planned(model: str, layout: str, n_layers: int, mode: Recompute | None) -> autopar.Plan:
    torch.manual_seed(0)
    manual, shape = LAYOUTS[layout]
    plan = autopar.plan(MODELS[model](n_layers), machine(shape), tokens(0), manual=manual)
    return plan if mode is None else recomputing(plan, mode)


def long(ahead: list[Any], behind: list[Any], _: object, saved: list[str], __: object) -> Folded:
    return unfolded(ahead, behind, saved)


@pytest.mark.parametrize("mode", [None, "full", "selective"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_all_bits_are_those_of_the_long_program(
    model: str, layout: str, mode: Recompute | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_layers = 12 if layout == "stages" else 6
    plan = planned(model, layout, n_layers, mode)
    short = list(plan.code().values())
    assert all("for i in range(" in text for text in short)
    found = results(plan)
    monkeypatch.setattr(source, "fold", long)
    monkeypatch.setattr(source, "with_views_inside", list)
    monkeypatch.setattr(source, "joined", list)
    for a, b in zip(found, results(plan), strict=True):
        assert a.keys() == b.keys()
        assert [n for n in a if not torch.equal(a[n], b[n])] == []


@pytest.mark.parametrize("layout", ["alone", "tensor", "data", "zero-3"])
@pytest.mark.parametrize("model", MODELS)
def test_a_file_does_not_grow_with_depth(model: str, layout: str) -> None:
    lengths: list[int] = []
    for n_layers in (7, 9):
        (text,) = planned(model, layout, n_layers, None).code().values()
        assert text.count("_forward(i, ") == text.count("_backward(i, ") == 2, "made and called"
        lengths.append(text.count("\n"))
    # What is freed stands beside a statement if there is room, and names differ in length.
    assert abs(lengths[0] - lengths[1]) <= 10


class Named(nn.Module):
    """Inputs and parameters are called what the loops call theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))
        self.saved_1, self.kept = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(8))

    def forward(self, i: Tensor, carried: Tensor) -> Tensor:
        x = i * self.saved_1
        for block in self.blocks:
            x = x + torch.tanh(block(x) * carried)
        return (x * self.kept).sum()


def test_names_of_the_model_may_be_those_of_a_loop() -> None:
    torch.manual_seed(0)
    batch = {"i": torch.randn(4, 8), "carried": torch.randn(4, 8)}
    report = autopar.verify(Named(), (1, 1), batch, precision="model")
    assert report.plan is not None
    assert "for i in range(4):" in next(iter(report.plan.code().values()))
    assert max(report.errors.values()) == 0.0
