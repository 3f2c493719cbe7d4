"""Programs both ways: what is gathered and reduced beside compute, what is copied and summed."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor, nn

import autopar
from autopar import Manual
from autopar.passes.backward import differentiate
from autopar.passes.lowering import lower
from autopar.program.communication import (
    Backward,
    Start,
    Wait,
    backward_order,
    kept_gathers,
    step_calls,
)
from autopar.program.lines import (
    Boundary,
    CallLine,
    FreeLine,
    FusedGathers,
    FusedReductions,
    GatherLine,
    GradientMove,
    JointLine,
    JointProgram,
    KernelLine,
    ReadyLine,
    StartLine,
    WaitLine,
)
from tests.helpers.harness import abstract_cost, free_problem, model_case, random_strategy
from tests.helpers.jobs import llama, machine, tokens
from tests.helpers.models.dropout_models import dropped_gpt2
from tests.helpers.plans import pipeline_of, program_of

M = TypeVar("M", bound=JointLine)


@cache
def planned() -> tuple[JointProgram, ...]:
    joints = list[JointProgram]()
    for make, manual in (
        (dropped_gpt2, Manual(dp=2, zero=3)), (llama, Manual(dp=2, zero=3)),
        (llama, Manual(tp=2, sp=True)), (dropped_gpt2, Manual(pp=2)),
    ):  # fmt: skip
        torch.manual_seed(0)
        plan = autopar.plan(make(2), machine((1, 2)), tokens(0), manual=manual)
        joints += map(differentiate, pipeline_of(plan).stages)
    return tuple(joints)


@cache
def drawn() -> tuple[JointProgram, ...]:
    """Two axes, and any placements."""
    joints, cost = list[JointProgram](), abstract_cost((2, 2))
    for model in ("bert-view", "gpt2"):
        analysis, problem = model_case(model).analysis, free_problem(model, (2, 2), 1)
        for seed in range(3):
            strategy = random_strategy(analysis, problem, 1, random.Random(seed))
            joints.append(differentiate(lower(analysis, strategy, cost)))
    return tuple(joints)


def members(lines: Sequence[JointLine], kind: type[M]) -> list[M]:
    """The gathers, or reductions of gradients, of a function, whether fused or begun early."""
    found: list[M] = []
    for line in lines:
        call = line.move if isinstance(line, StartLine) else line
        each = call.members if isinstance(call, FusedGathers | FusedReductions) else (call,)
        found += [one for one in each if isinstance(one, kind)]
    return found


def test_the_last_block_stays_gathered_where_one_microbatch_is_in_flight() -> None:
    """Backward begins with it."""
    one, *_ = zero_3()
    kept = kept_gathers(one.stage)
    calls = [x for x in one.forward if members([x], GatherLine)]
    assert kept and kept <= {x.out.name for x in members(calls[-1:], GatherLine)}
    sent = Boundary(one.stage.variables[one.stage.loss or ""], "loss", "loss")
    assert kept_gathers(replace(one.stage, sent=(sent,))) == frozenset()


class Shared(nn.Module):
    """The gradient of `c` is that of a matmul, too; `y` and `b` have two."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.ones(4, 4)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.a + self.c + self.b
        return (y * y + (y + self.b).tanh()).sum()


def of_shared() -> JointProgram:
    plan = autopar.plan(Shared(), (1, 1), {"x": torch.ones(4, 4)}, manual=Manual())
    return differentiate(program_of(plan))


def test_a_gradient_that_is_read_later_is_copied_when_it_is_handed_over() -> None:
    """Whoever gets it may write to it while its sync is under way."""
    joint = of_shared()
    for i, line in enumerate(joint.backward):
        if isinstance(line, ReadyLine):
            later = {name for other in joint.backward[i + 1 :] for name in other.reads}
            assert line.is_shared == (line.source in later)
    assert {x.is_shared for x in joint.backward if isinstance(x, ReadyLine)} == {True, False}


def test_sums_of_gradients_take_the_memory_of_what_nobody_reads_again() -> None:
    joint = of_shared()
    sums = [x for x in joint.backward if isinstance(x, KernelLine) and not x.key]
    assert {x.target for x in sums} >= {"aten.add_.Tensor"}
    for line in sums:
        if line.target == "aten.add_.Tensor":
            at = joint.backward.index(line)
            first = line.reads[0]
            later = {name for other in joint.backward[at + 1 :] for name in other.reads}
            assert first not in later


def test_reductions_run_beside_matmuls_of_weight_gradients() -> None:
    """Each is begun and waited for once, and nothing that communicates is between the two."""
    n_begun = 0
    for joint in (*drawn(), *planned()):
        lines = joint.backward
        for i, line in enumerate(lines):
            if isinstance(line, StartLine) and is_of_activations(line):
                n_begun += 1
                at = wait_of(lines, line)
                assert at > i
                between = lines[i + 1 : at]
                assert all(isinstance(x, KernelLine | ReadyLine | FreeLine) for x in between)
                assert any(isinstance(x, KernelLine) and "mm" in x.target for x in between)
                assert line.reads[0] not in {n for x in between for n in x.writes}
    assert n_begun > 0


def test_reductions_begin_where_the_order_says() -> None:
    """Between the two gradients of a matmul, of which one is what is reduced."""
    n_begun = 0
    for joint in (*drawn(), *planned()):
        order, body = backward_order(joint.stage), joint.stage.body
        begun = []
        for k, work in enumerate(order):
            if isinstance(work, Start) and isinstance(work.call, Backward):
                begun.append(body[work.call.position])
                end = order.index(Wait(work.call))
                second = order[end - 1]
                assert end == k + 2 and isinstance(second, Backward) and second.part == "weight"
                first = Backward(second.position, "input", second.apart)
                assert first in order[:k] and Backward(second.position) not in order
        starts = [line.move for line in joint.backward if isinstance(line, StartLine)]
        moves = [move for move in starts if isinstance(move, GradientMove)]
        assert [move.move for move in moves if move.phase == "backward"] == begun
        n_begun += len(begun)
    assert n_begun > 0


def wait_of(lines: Sequence[JointLine], start: StartLine) -> int:
    (at,) = (
        i for i, x in enumerate(lines) if isinstance(x, WaitLine) and x.pending == start.pending
    )
    return at


def is_of_activations(line: StartLine) -> bool:
    return isinstance(line.move, GradientMove) and line.move.phase == "backward"


def zero_3() -> list[JointProgram]:
    joints = [j for j in planned() if any(isinstance(x, GatherLine) for x in j.stage.body)]
    assert joints
    return joints


def test_parameters_are_gathered_one_block_ahead() -> None:
    """A call for a block, begun when the one before is there; only the first is waited for."""
    for joint in zero_3():
        for lines in (joint.forward, joint.backward):
            calls = [x for x in lines if members([x], GatherLine)]
            assert len(calls) >= 3
            assert all(isinstance(x, StartLine) for x in calls[1:])
            assert isinstance(calls[0], StartLine) or lines[0] is calls[0]
            arrivals = [i for i, x in enumerate(lines) if is_arrival(x)]
            begins = [i for i, x in enumerate(lines) if x in calls[1:]]
            for here, begun, following in zip(arrivals, begins, arrivals[1:], strict=False):
                assert here < begun < following
                between = lines[here + 1 : begun]
                assert all(isinstance(x, FreeLine | StartLine) for x in between)
                assert any(isinstance(x, CallLine | KernelLine) for x in lines[begun:following])


def is_arrival(line: JointLine) -> bool:
    call = line.move if isinstance(line, WaitLine) else line
    return isinstance(call, FusedGathers | GatherLine)


def test_what_backward_gathers_again_is_read() -> None:
    """Gathers follow what operators keep, before their kernels are known."""
    for joint in (*drawn(), *planned()):
        gathered = {x.out.name for x in members(joint.backward, GatherLine)}
        assert gathered <= {name for line in joint.backward for name in line.reads}


def test_gradients_are_reduced_one_block_behind() -> None:
    """A call for a block, waited for when the next one's begins, or at the end."""
    for joint in zero_3():
        lines = joint.backward
        calls = [x for x in lines if isinstance(x, StartLine) and members([x], GradientMove)]
        assert len(calls) >= 4
        starts = [*map(lines.index, calls), len(lines)]
        for start, (i, following) in zip(calls, pairwise(starts), strict=True):
            at = wait_of(lines, start)
            assert i < at < following
            late = lines[at + 1 : following]
            sums = [x for x in late if isinstance(x, KernelLine)]
            assert not any(x.key for x in sums), "waited for in time"


def test_a_run_is_reduced_where_its_last_parameter_is_frozen() -> None:
    torch.manual_seed(0)
    model = llama(2)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("down_proj" not in name and "layernorm" not in name)
    plan = autopar.plan(model, machine((1, 2)), tokens(0), manual=Manual(dp=2, zero=3))
    joint = differentiate(program_of(plan))
    reduced = Counter(x.move.value for x in members(joint.backward, GradientMove))
    trained = [p.name for p in joint.stage.parameters if p.requires_grad]
    assert reduced.total() == len(trained)


def begun_early(lines: Sequence[JointLine]) -> Counter[str]:
    """The names of parameters of each call that gathers, and begins early."""
    calls = [members([line], GatherLine) for line in lines if isinstance(line, StartLine)]
    return Counter(", ".join(one.parameter for one in call) for call in calls if call)


def test_predictions_hide_no_gather_that_does_not_begin_early() -> None:
    """Those of several moves do not, nor the first; a tied embedding for the head does."""
    n_waited = 0
    for joint in (*drawn(), *planned()):
        calls = step_calls(joint.stage)
        for lines, own in ((joint.forward, calls.forward), (joint.backward, calls.backward)):
            gathers = [call for call in own if call.phase == "param_gather"]
            hidden = Counter(call.tensor for call in gathers if call.is_beside)
            assert hidden <= begun_early(lines)
            n_waited += sum(not call.is_beside for call in gathers)
    assert n_waited > 0


def test_all_gathers_but_the_first_are_hidden() -> None:
    plan = autopar.plan(
        dropped_gpt2(4), machine((1, 4)), tokens(0), manual=Manual(dp=2, tp=2, zero=3)
    )
    stage = program_of(plan)
    gathers = [call for call in step_calls(stage).forward if call.phase == "param_gather"]
    waited = [call.tensor for call in gathers if not call.is_beside]
    assert waited == ["transformer.wte.weight"]
    begun = begun_early(differentiate(stage).forward)
    assert begun == Counter(call.tensor for call in gathers if call.is_beside)
    assert begun["transformer.wte.weight"] == 1, "for the head"
