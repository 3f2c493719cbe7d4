"""The loss: its reduction begins in forward, and is waited for when the step ends."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar import Manual
from autopar.codegen import emit
from autopar.errors import VerificationError
from autopar.passes.backward import differentiate
from autopar.program.lines import (
    CallLine,
    JointProgram,
    LossAtEnd,
    MoveLine,
    StageProgram,
    StartLine,
    WaitLine,
)
from autopar.verifier import verify_joint
from tests.helpers.jobs import MlpWithLoss, llama, machine, tokens
from tests.helpers.plans import program_of


def planned(model: nn.Module, manual: Manual) -> StageProgram:
    plan = autopar.plan(model, machine((1, 2)), tokens(0), manual=manual)
    return program_of(plan)


def at_end(joint: JointProgram) -> tuple[object, ...]:
    """The lines after the `LossAtEnd`."""
    ends = [i for i, line in enumerate(joint.forward) if isinstance(line, LossAtEnd)]
    return joint.forward[ends[0] + 1 :] if ends else ()


def test_the_loss_is_waited_for_when_the_step_ends() -> None:
    torch.manual_seed(0)
    joint = differentiate(planned(llama(2), Manual(dp=2)))
    first, *rest = at_end(joint)
    assert isinstance(first, WaitLine) and isinstance(first.move, MoveLine)
    begun = [line for line in joint.forward if isinstance(line, StartLine)]
    assert [line.pending for line in begun] == [first.pending]
    assert any(isinstance(line, CallLine) and "div" in line.target for line in rest)
    source = emit(joint)
    assert f"[{first.pending}, " in source.split("def loss(taken, env):")[0]
    assert source.count(f"{first.pending}.wait()") == 1


def test_a_loss_is_returned_by_forward() -> None:
    """Without collectives, as an output, and in evaluation."""
    torch.manual_seed(0)
    joint = differentiate(planned(llama(2), Manual(tp=2)))
    assert at_end(joint) == () and "def loss" not in emit(joint)
    stage = planned(llama(2), Manual(dp=2))
    assert stage.loss is not None
    with_output = replace(stage, outputs=(*stage.outputs, stage.loss))
    assert at_end(differentiate(with_output)) == ()
    assert at_end(differentiate(replace(stage, trains=False))) == ()


class Penalised(MlpWithLoss):
    """What the loss does not need is computed after it."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss = super().forward(x, y)
        return loss + 0.1 * sum(p.pow(2).sum() for p in self.parameters())


def test_what_the_loss_does_not_need_stays_in_forward() -> None:
    torch.manual_seed(0)
    batch = {"x": torch.randn(16, 32), "y": torch.randn(16, 32)}
    plan = autopar.plan(Penalised(), machine((1, 2)), batch, manual=Manual(dp=2))
    joint = differentiate(program_of(plan))
    verify_joint(joint)
    later = at_end(joint)
    assert isinstance(later[0], WaitLine)
    assert not any("pow" in line.target for line in later if isinstance(line, CallLine))


@pytest.mark.parametrize(
    ("at", "reason"),
    [(0, "needed before"), (-1, "the loss is not made there"), (None, "ended already")],
)
def test_what_waits_makes_the_loss_alone(at: int | None, reason: str) -> None:
    torch.manual_seed(0)
    joint = differentiate(planned(llama(2), Manual(dp=2)))
    lines = [line for line in joint.forward if at is None or not isinstance(line, LossAtEnd)]
    lines.insert(len(lines) if at in (-1, None) else 0, LossAtEnd())
    with pytest.raises(VerificationError, match=reason):
        verify_joint(replace(joint, forward=tuple(lines)))
