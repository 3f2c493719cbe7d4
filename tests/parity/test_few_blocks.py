"""A deep stage is printed from few of its blocks: the text is that of all, and so are its steps."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.codegen import emit
from autopar.manual import Recompute
from autopar.passes.backward import differentiate, proved
from autopar.passes.lowering import lower_few
from autopar.program.lines import JointProgram
from tests.helpers.nightly import nightly, one_in
from tests.helpers.plans import bound_of
from tests.parity.test_equal_blocks import LAYOUTS, MODELS, MODES, planned

N_BLOCKS = 9


def joint_programs(plan: autopar.Plan) -> Iterator[tuple[JointProgram, JointProgram]]:
    """Of each stage, training and evaluating: from few of its blocks, and from all."""
    bound = bound_of(plan)
    for trains in (True, False):
        schedule = replace(bound.pipeline.schedule, trains=trains)
        pipeline = replace(bound.pipeline, schedule=schedule)
        few = proved(pipeline, few_blocks=[lower_few(stage) for stage in bound.stages])
        for stage, joint in zip(pipeline.stages, few, strict=True):
            yield joint, differentiate(replace(stage, trains=trains))


def unnumbered(text: str) -> str:
    """A text whose names of gradients are numbered anew, and without the space around comments."""
    known: dict[str, str] = {}

    def renamed(match: re.Match[str]) -> str:
        return known.setdefault(match.group(), f"{match.group(1)}_#{len(known)}")

    return re.sub(r"\b(grad_\w*?)_(\d+)\b", renamed, re.sub(" +", " ", text))


def check_text(plan: autopar.Plan) -> None:
    """Each stage is printed from few of its blocks, as from all."""
    for few, whole in joint_programs(plan):
        assert few.stands_for
        assert len(few.forward) < len(whole.forward)
        assert unnumbered(emit(few)) == unnumbered(emit(whole))


@nightly
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_the_text_is_that_of_all_blocks(model: str, layout: str, mode: Recompute | None) -> None:
    check_text(planned(model, layout, (2 if layout == "stages" else 1) * N_BLOCKS, mode, "fp64"))


class Small(nn.Module):
    """A block of three operators; returns its result and what is inside."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        inner = torch.relu(self.up(self.norm(x)))
        return x + self.down(inner), inner


class Deep(nn.Module):
    """Twelve blocks, of which blocks 3 to 9 would have no lines; `reads` makes a loss of their
    results and of what is inside of them."""

    def __init__(self, reads: Callable[[list[Tensor], list[Tensor]], Tensor]) -> None:
        super().__init__()
        self.blocks, self.reads = nn.ModuleList(Small() for _ in range(12)), reads

    def forward(self, x: Tensor) -> Tensor:
        results, inner = list[Tensor](), list[Tensor]()
        for block in self.blocks:
            x, inside = block(x)
            results.append(x)
            inner.append(inside)
        return self.reads(results, inner)


def is_verified_in_few(model: nn.Module) -> bool:
    """Check a step on one rank. Was it printed from few blocks?"""
    report = autopar.verify(model, (1, 1), {"x": torch.randn(8, 8)}, precision="fp64")
    assert report.ok, report.text()
    assert report.plan is not None
    few, _ = next(joint_programs(report.plan))
    return bool(few.stands_for)


def square(x: Tensor) -> Tensor:
    return x.square().mean()


@one_in(2)
@pytest.mark.parametrize(("layout", "mode"), [("zero-3", "full"), ("data", "none")])
def test_a_small_step(layout: str, mode: Recompute) -> None:
    torch.manual_seed(0)
    manual, shape = LAYOUTS[layout]
    model, batch = Deep(lambda xs, _: square(xs[-1])), {"x": torch.randn(8, 8)}
    manual = replace(manual, recompute=mode)
    report = autopar.verify(model, shape, batch, manual=manual, precision="fp64")
    assert report.ok, report.text()
    assert report.plan is not None
    check_text(report.plan)


@one_in(3)
@pytest.mark.parametrize(
    ("reads", "wanted"),
    [
        pytest.param(lambda xs, _: square(xs[-1]), True, id="the last"),
        pytest.param(lambda xs, _: square(torch.cat([xs[-1], xs[1]])), False, id="an early one"),
        pytest.param(lambda xs, _: square(xs[-1] * xs[8]), False, id="one near the end"),
        pytest.param(lambda xs, _: square(xs[-1] * xs[5]), False, id="one in the middle"),
        pytest.param(lambda xs, inner: square(xs[-1]) + square(inner[6]), False, id="inside"),
    ],
)
def test_values_that_leave_blocks(
    reads: Callable[[list[Tensor], list[Tensor]], Tensor], wanted: bool
) -> None:
    """A block whose value is read elsewhere must have lines of its own."""
    torch.manual_seed(0)
    assert is_verified_in_few(Deep(reads)) is wanted


class Shuffled(nn.Module):
    """The scale of block i is the parameter at `places[i]`."""

    def __init__(self, places: list[int]) -> None:
        super().__init__()
        self.places, self.blocks = places, nn.ModuleList(Small() for _ in places)
        self.scales = nn.ParameterList(torch.full((8,), 1 + k / 8) for k in range(len(places)))

    def forward(self, x: Tensor) -> Tensor:
        for place, block in zip(self.places, self.blocks, strict=True):
            x = block(x)[0] * self.scales[place]
        return square(x)


@one_in(2)
@pytest.mark.parametrize(
    ("places", "wanted"), [(list(range(10)), True), ([0, 1, 2, 3, 6, 5, 4, 7, 8, 9], False)]
)
def test_parameters_in_another_order(places: list[int], wanted: bool) -> None:
    """Calls in a loop take slices of parameters that move on evenly."""
    torch.manual_seed(0)
    assert is_verified_in_few(Shuffled(places)) is wanted
