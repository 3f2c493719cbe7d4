"""Equal blocks are printed once and called in a loop; steps are those of one process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar import Manual
from autopar.manual import Recompute
from tests.helpers.harness import generated_code
from tests.helpers.jobs import llama, machine, tokens
from tests.helpers.models.dropout_models import dropped_gpt2
from tests.helpers.models.recompute_models import recomputing
from tests.helpers.nightly import one_in, sampled
from tests.helpers.plans import bound_of
from tests.helpers.ranks import wrong_in_step

__all__ = ["generated_code"]

LAYOUTS = {
    "alone": (Manual(), (1, 1)),
    "tensor": (Manual(tp=2, sp=True), (1, 2)),
    "data": (Manual(dp=2), (1, 2)),
    "zero-2": (Manual(dp=2, zero=2, microbatch_size=2), (1, 2)),
    "zero-3": (Manual(dp=2, zero=3), (1, 2)),
    "stages": (Manual(pp=2, microbatch_size=2), (1, 2)),
}
MODELS: dict[str, Callable[[int], nn.Module]] = {"gpt2": dropped_gpt2, "llama": llama}
MODES: tuple[Recompute | None, ...] = (None, "full", "selective")
CASES = [(model, layout, mode) for model in MODELS for layout in LAYOUTS for mode in MODES]
BY_DAY: list[tuple[str, str, Recompute | None]] = [
    ("gpt2", "tensor", None),
    ("gpt2", "zero-3", "selective"),
    ("gpt2", "zero-2", None),
    ("llama", "alone", "selective"),
    ("llama", "zero-3", "full"),
    ("llama", "data", None),
]


def planned(
    model: str, layout: str, n_layers: int, mode: Recompute | None, precision: str = "model"
) -> autopar.Plan:
    torch.manual_seed(0)
    manual, shape = LAYOUTS[layout]
    plan = autopar.plan(
        MODELS[model](n_layers), machine(shape), tokens(0), manual=manual, precision=precision
    )
    return plan if mode is None else recomputing(plan, mode)


@one_in(3)
@pytest.mark.parametrize(("model", "layout", "mode"), sampled(CASES, BY_DAY))
def test_a_step_is_one_processs(model: str, layout: str, mode: Recompute | None) -> None:
    plan = planned(model, layout, 12 if layout == "stages" else 6, mode, "fp64")
    assert all("for i in range(" in text for text in plan.code().values())
    bound = bound_of(plan)
    assert wrong_in_step(bound.analysis.program, bound.pipeline, tokens(0), 0) == {}


@pytest.mark.parametrize(
    ("model", "layout"),
    sampled(
        [(model, layout) for model in MODELS for layout in ("alone", "tensor", "data", "zero-3")],
        [("gpt2", "data")],
    ),
)
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
    assert "for i in range(5):" in next(iter(report.plan.code().values()))
    assert max(report.errors.values()) == 0.0
