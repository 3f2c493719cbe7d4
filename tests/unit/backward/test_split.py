"""Backward in two parts as data: what is in which part, its price, and faults that are refused."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar import Manual
from autopar.cost.price import stage_times
from autopar.cost.simulate import PartWork, SplitBackward
from autopar.errors import VerificationError
from autopar.passes.backward import differentiate
from autopar.program.communication import Backward, backward_parts, positions_of, step_calls
from autopar.program.lines import (
    CallLine,
    JointProgram,
    KernelLine,
    ReadyLine,
    StageProgram,
    WeightGradients,
)
from autopar.verifier import verify_joint
from tests.helpers.plans import bound_of, program_of
from tests.parity.test_equal_blocks import LAYOUTS, MODES, planned


@cache
def split_llama(layout: str = "alone") -> StageProgram:
    return bound_of(planned("llama", layout, 2, None)).pipeline.stages[0].split_backward()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_calls_are_those_of_one_action(layout: str) -> None:
    for mode in MODES:
        for stage in bound_of(planned("llama", layout, 2, mode)).pipeline.stages:
            one, two = (Counter(step_calls(s).microbatch) for s in (stage, stage.split_backward()))
            assert one == two


@pytest.mark.parametrize("layout", ["alone", "tensor", "zero-2"])
def test_the_prices_of_both_parts_add_up(layout: str) -> None:
    bound = bound_of(planned("llama", layout, 2, None))
    (stage,), (placed,) = bound.pipeline.stages, bound.stages
    whole = stage_times(stage, placed.cost, "adamw").backward
    parts = stage_times(stage.split_backward(), placed.cost, "adamw").backward
    assert isinstance(whole, PartWork) and isinstance(parts, SplitBackward)
    total = parts.input + parts.weight
    assert total.compute_s == pytest.approx(whole.compute_s, rel=1e-12)
    calls_s = whole.collectives_s + whole.overlapped_s
    assert total.collectives_s + total.overlapped_s == pytest.approx(calls_s, rel=1e-12)
    assert 0.2 < parts.weight.compute_s / total.compute_s < 0.5


class Tied(nn.Module):
    """The scale multiplies activations, and is half of a matmul's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.a, self.b = (nn.Parameter(torch.ones(4, 4)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = (x @ self.a).tanh() @ self.b
        return ((y * self.scale) @ self.scale).sum()


def test_all_terms_of_a_gradient_are_in_one_part() -> None:
    """Else they would be added in another order."""
    plan = autopar.plan(Tied(), (1, 1), {"x": torch.ones(4, 4)}, manual=Manual())
    stage = program_of(plan).split_backward()
    _, second = backward_parts(stage)
    late = [stage.body[positions_of(work)[0]] for work in second]
    assert all(isinstance(line, CallLine) and "scale" not in line.reads for line in late)
    assert {name for line in late for name in line.reads} >= {"a", "b"}
    # Of the first matmul nothing but its weight has a gradient.
    assert [work for work in second if isinstance(work, Backward)][-1].part == "whole"
    verify_joint(differentiate(stage))


def refused(joint: JointProgram, reason: str) -> None:
    with pytest.raises(VerificationError, match=reason):
        verify_joint(joint)


def test_faults_between_the_parts_are_refused() -> None:
    joint = differentiate(split_llama())
    first, second = map(list, joint.backward_parts)
    verify_joint(joint)

    def with_parts(one: list, two: list) -> JointProgram:  # type: ignore[type-arg]
        return replace(joint, backward=(*one, WeightGradients(), *two))

    refused(replace(joint, backward=(*first, *second)), "it has 1 parts")
    refused(with_parts([*first, WeightGradients()], second), "it has 3 parts")
    k, ready = next((k, x) for k, x in enumerate(second) if isinstance(x, ReadyLine))
    early = next(i for i, x in enumerate(first) if ready.source in x.writes) + 1
    moved = [*first[:early], ready, *first[early:]], [*second[:k], *second[k + 1 :]]
    refused(with_parts(*moved), "handed over in the wrong part")
    at = next(i for i, x in enumerate(first) if isinstance(x, KernelLine) and x.key)
    unfreed = [x for x in first if not (hasattr(x, "names") and first.index(x) > at)]
    refused(with_parts(unfreed, second), "neither freed nor handed on")
