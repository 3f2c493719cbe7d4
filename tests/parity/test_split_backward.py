"""Backward in two actions: gradients have the same bits; the first makes what others need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar import Manual
from autopar.manual import Recompute
from autopar.passes.backward import differentiate, make_fusible
from autopar.program.graph import Program
from autopar.program.lines import (
    FusedReductions,
    JointProgram,
    KernelLine,
    Pipeline,
    ReadyLine,
    WaitLine,
)
from autopar.schedule import ORDERS
from autopar.verifier import verify_joint
from tests.helpers import ranks
from tests.helpers.harness import generated_code
from tests.helpers.jobs import machine, tokens
from tests.helpers.nightly import one_in, sampled
from tests.helpers.plans import bound_of
from tests.parity.test_equal_blocks import LAYOUTS, MODELS, MODES, planned

__all__ = ["generated_code"]

CASES = [(model, layout, mode) for model in MODELS for layout in LAYOUTS for mode in MODES]
BY_DAY: list[tuple[str, str, Recompute | None]] = [
    *(("gpt2", layout, None) for layout in LAYOUTS),
    *(("llama", layout, "full") for layout in ("alone", "zero-3", "stages")),
]


def split(pipeline: Pipeline, is_compiled: bool = False) -> Pipeline:
    """The pipeline, whose stages run backward in two actions; each is verified both ways."""
    stages = [stage.split_backward() for stage in pipeline.stages]
    if is_compiled:
        stages = [replace(stage, is_compiled=True) for stage in stages]
    for stage in stages:
        joint = differentiate(stage)
        verify_joint(make_fusible(joint) if is_compiled else joint)
    return replace(pipeline, stages=tuple(stages))


def results(
    program: Program, pipeline: Pipeline, batch: Mapping[str, Tensor]
) -> list[dict[str, Tensor]]:
    """The loss and the gradients of every rank."""

    def work(rank: ranks.Rank) -> dict[str, Tensor]:
        loss = rank.executor.step(rank.stored, ranks.named_inputs(program, dict(batch)), seed=3)
        return {"loss": loss, **{n: ranks.gradient_of(p) for n, p in rank.stored.items()}}

    parameters = {n: p.detach().float() for n, p in ranks.random_parameters(program, 0).items()}
    return ranks.run_ranks(program, pipeline, parameters, work)


def assert_equal_bits(
    program: Program, one: Pipeline, other: Pipeline, batch: Mapping[str, Tensor]
) -> None:
    for a, b in zip(results(program, one, batch), results(program, other, batch), strict=True):
        assert a.keys() == b.keys()
        assert [n for n in a if not torch.equal(a[n], b[n])] == []


@one_in(6)
@pytest.mark.parametrize(("model", "layout", "mode"), sampled(CASES, BY_DAY))
def test_all_bits_stay(model: str, layout: str, mode: Recompute | None) -> None:
    bound = bound_of(planned(model, layout, 2, mode))
    program, pipeline = bound.analysis.program, bound.pipeline
    assert_equal_bits(program, pipeline, split(pipeline), tokens(0))


@pytest.mark.parametrize("layout", ["alone", "zero-3"])
def test_regions_are_in_both_functions(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They run as they are written."""
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    bound = bound_of(planned("llama", layout, 2, None))
    program, pipeline = bound.analysis.program, bound.pipeline
    assert_equal_bits(program, pipeline, split(pipeline, True), tokens(0))


class Convolutions(nn.Module):
    """A gradient of a convolution's weight is made in the first action."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)
        self.norm, self.head = nn.GroupNorm(2, 8), nn.Linear(8 * 16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x).relu())
        return self.head(self.norm(x).flatten(1)).square().mean()


@pytest.mark.parametrize(
    "manual", [Manual(dp=2, microbatch_size=2), Manual(dp=2, zero=2, microbatch_size=2),
               Manual(dp=2, zero=3), Manual(pp=2, microbatch_size=2)], ids=str,
)  # fmt: skip
def test_convolutions(manual: Manual) -> None:
    torch.manual_seed(0)
    batch = {"x": torch.randn(8, 3, 8, 8)}
    plan = autopar.plan(Convolutions(), machine((1, 2)), batch, manual=manual)
    bound = bound_of(plan)
    program, pipeline = bound.analysis.program, bound.pipeline
    assert_equal_bits(program, pipeline, split(pipeline), batch)


@pytest.mark.parametrize("model", MODELS)
def test_a_zero_bubble_step_has_the_bits_of_1f1b(model: str) -> None:
    bound = bound_of(planned(model, "stages", 2, None))
    stages, meshes = bound.pipeline.stages, bound.pipeline.meshes
    pipeline = Pipeline.of(stages, meshes, ORDERS["zero-bubble"])
    assert all(stage.splits_backward for stage in pipeline.stages)
    assert_equal_bits(bound.analysis.program, bound.pipeline, pipeline, tokens(0))


def parted(plan: autopar.Plan) -> list[JointProgram]:
    return [differentiate(stage) for stage in split(bound_of(plan).pipeline).stages]


@one_in(3)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_first_part_is_what_others_wait_for(layout: str) -> None:
    """It hands over the gradients of received tensors; the second one those of all parameters, with
    the matmuls of weights, and their reductions."""
    for joint in parted(planned("llama", layout, 2, None)):
        n_parameters = len(joint.taken) - len(joint.stage.received)
        first, second = joint.backward_parts
        assert {x.position for x in first if isinstance(x, ReadyLine)} == (
            {n_parameters + k for k, b in enumerate(joint.stage.received) if b.local.has_grad}
        )
        later = {x.position for x in second if isinstance(x, ReadyLine)}
        assert later == {*range(n_parameters)}
        matmuls = [x for x in second if isinstance(x, KernelLine) and ".mm." in x.target]
        # Four in attention, three in the MLP; the head.
        has_head = joint.stage.loss is not None
        n_blocks = 2 if len(joint.stage.sent) + len(joint.stage.received) == 0 else 1
        assert len(matmuls) == 7 * n_blocks + has_head
        if layout == "zero-3":
            calls = [x.move if isinstance(x, WaitLine) else x for x in first]
            assert not any(isinstance(x, FusedReductions) for x in calls)
