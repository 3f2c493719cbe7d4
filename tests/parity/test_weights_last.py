"""Weight gradients computed last, in a function of their own, have the same bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import autopar
from autopar.options import Recompute
from autopar.passes.backward import differentiate
from autopar.program.lines import (
    FusedReductions,
    JointProgram,
    KernelLine,
    Pipeline,
    ReadyLine,
    WaitLine,
    WeightGradients,
)
from tests.helpers import ranks
from tests.helpers.jobs import tokens
from tests.helpers.nightly import one_in, sampled
from tests.helpers.plans import bound_of
from tests.parity.test_equal_blocks import LAYOUTS, MODELS, planned

MODES: tuple[Recompute | None, ...] = (None, "full")
CASES = [(model, layout, mode) for model in MODELS for layout in LAYOUTS for mode in MODES]
BY_DAY = [
    *(("gpt2", layout, None) for layout in LAYOUTS),
    *(("llama", layout, "full") for layout in ("alone", "zero-3", "stages")),
]


def split(pipeline: Pipeline) -> Pipeline:
    """The pipeline, whose stages run backward in two actions."""
    stages = tuple(replace(stage, splits_backward=True) for stage in pipeline.stages)
    return replace(pipeline, stages=stages)


def results(plan: autopar.Plan, splits_backward: bool) -> list[dict[str, Tensor]]:
    """The loss and the gradients of every rank."""
    bound, batch = bound_of(plan), tokens(0)
    program = bound.analysis.program

    def work(rank: ranks.Rank) -> dict[str, Tensor]:
        loss = rank.executor.step(rank.stored, ranks.named_inputs(program, batch), seed=3)
        return {"loss": loss, **{n: ranks.gradient_of(p) for n, p in rank.stored.items()}}

    parameters = {n: p.detach().float() for n, p in ranks.random_parameters(program, 0).items()}
    pipeline = split(bound.pipeline) if splits_backward else bound.pipeline
    return ranks.run_ranks(program, pipeline, parameters, work)


@one_in(6)
@pytest.mark.parametrize(("model", "layout", "mode"), sampled(CASES, BY_DAY))
def test_all_bits_stay(model: str, layout: str, mode: Recompute | None) -> None:
    plan = planned(model, layout, 2, mode)
    for a, b in zip(results(plan, False), results(plan, True), strict=True):
        assert a.keys() == b.keys()
        assert [n for n in a if not torch.equal(a[n], b[n])] == []


def parted(plan: autopar.Plan) -> list[JointProgram]:
    return [differentiate(stage) for stage in split(bound_of(plan).pipeline).stages]


@one_in(3)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_first_part_is_what_others_wait_for(layout: str) -> None:
    """It hands over the gradients of received tensors; the second one those of all weights that
    have a matmul, and their reductions."""
    for joint in parted(planned("llama", layout, 2, None)):
        n_parameters = len(joint.taken) - len(joint.stage.received)
        (at,) = (i for i, x in enumerate(joint.backward) if isinstance(x, WeightGradients))
        first, second = joint.backward[:at], joint.backward[at + 1 :]
        ready = [x.position for x in first if isinstance(x, ReadyLine)]
        assert {p for p in ready if p >= n_parameters} == (
            {n_parameters + k for k, b in enumerate(joint.stage.received) if b.local.has_grad}
        )
        later = [x.position for x in second if isinstance(x, ReadyLine)]
        assert all(position < n_parameters for position in later)
        matmuls = [x for x in second if isinstance(x, KernelLine) and ".mm." in x.target]
        # Four in attention, three in the MLP; the head.
        has_head = joint.stage.loss is not None
        n_blocks = 2 if len(joint.stage.sent) + len(joint.stage.received) == 0 else 1
        assert len(matmuls) == 7 * n_blocks + has_head
        if layout == "zero-3":
            calls = [x.move if isinstance(x, WaitLine) else x for x in joint.backward[:at]]
            assert not any(isinstance(x, FusedReductions) for x in calls)
