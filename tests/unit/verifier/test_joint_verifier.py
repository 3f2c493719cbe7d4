"""The verifier accepts every program both ways that is made, and refuses every mutant of one."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar import Manual
from autopar.errors import VerificationError
from autopar.manual import Recompute
from autopar.passes.backward import differentiate
from autopar.passes.compilation import Compilation
from autopar.passes.facts import Differentiated, Placed, Target
from autopar.passes.lowering import lower
from autopar.passes.pipeline import Differentiate
from autopar.program.lines import (
    GradientMove,
    JointLine,
    JointProgram,
    KernelLine,
    ReadyLine,
    Ref,
    StartLine,
    Variable,
    communications,
)
from autopar.verifier import verify_joint
from tests.helpers.harness import (
    abstract_cost,
    free_problem,
    model_case,
    random_strategy,
    random_tokens,
)
from tests.helpers.jobs import MlpWithLoss, gpt2, llama, machine, rows, tokens
from tests.helpers.joint_mutants import MUTATIONS, Mutants, with_line
from tests.helpers.models.dropout_models import dropped_gpt2
from tests.helpers.models.moe_models import moe_model
from tests.helpers.models.recompute_models import Blocks, recomputing
from tests.helpers.nightly import nightly, one_in
from tests.helpers.plans import bound_of, pipeline_of, program_of

Planned = tuple[
    Callable[[], nn.Module], Callable[[int], dict[str, Any]], Manual, Recompute | None, str
]


def x_and_y(seed: int) -> dict[str, Any]:
    return rows(seed, "x", "y")


PLANS: dict[str, Planned] = {
    "tp": (lambda: gpt2(1), tokens, Manual(tp=2, sp=True), None, "model"),
    "dp": (MlpWithLoss, x_and_y, Manual(dp=2), None, "model"),
    "zero-2": (lambda: llama(1), tokens, Manual(dp=2, zero=2), None, "model"),
    "zero-3": (lambda: llama(1), tokens, Manual(dp=2, zero=3), None, "bf16-mixed"),
    "full recompute": (lambda: llama(2), tokens, Manual(dp=2, zero=3), "full", "model"),
    "selective": (lambda: dropped_gpt2(2), tokens, Manual(tp=2), "selective", "model"),
    "two stages": (lambda: dropped_gpt2(2), tokens, Manual(pp=2), None, "bf16-mixed"),
    "experts": (lambda: moe_model("mixtral"), random_tokens, Manual(tp=2), None, "model"),
    "batch norm": (
        lambda: Blocks(nn.BatchNorm1d, 1), lambda seed: rows(seed, "x"),
        Manual(dp=2, zero=3), None, "model"
    ),
}  # fmt: skip


@cache
def planned(name: str) -> tuple[JointProgram, ...]:
    make, batch, manual, mode, precision = PLANS[name]
    torch.manual_seed(0)
    plan = autopar.plan(make(), machine((1, 2)), batch(0), manual=manual, precision=precision)
    plan = plan if mode is None else recomputing(plan, mode)
    return tuple(map(differentiate, pipeline_of(plan).stages))


@cache
def drawn(model: str, seed: int) -> JointProgram:
    """Two axes, and any placements: moves of every kind."""
    analysis, problem = model_case(model).analysis, free_problem(model, (2, 2), 1)
    strategy = random_strategy(analysis, problem, 1, random.Random(seed))
    cost = abstract_cost((2, 2))
    return differentiate(lower(analysis, strategy, cost, with_outputs=seed % 2 == 1))


def programs() -> list[JointProgram]:
    found = [joint for name in PLANS for joint in planned(name)]
    return found + [drawn(model, seed) for model in ("bert-view", "gpt2") for seed in range(3)]


@one_in(3)
@pytest.mark.parametrize("name", PLANS)
def test_plans_pass(name: str) -> None:
    for joint in planned(name):
        verify_joint(joint)


@pytest.mark.parametrize("model", ["mlp", "bert-view", "gpt2"])
def test_random_strategies_pass(model: str) -> None:
    for seed in range(3):
        verify_joint(drawn(model, seed))


def is_refused(joint: JointProgram) -> bool:
    try:
        verify_joint(joint)
    except VerificationError:
        return True
    return False


@pytest.mark.parametrize("every", [pytest.param(1, marks=nightly), 12])
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda f: f.__name__)
def test_every_mutant_is_refused(mutation: Callable[[JointProgram], Mutants], every: int) -> None:
    """Some 34,000 in all; by day, every twelfth of each program."""
    accepted, n = [], 0
    for joint in programs():
        for what, mutant in itertools.islice(mutation(joint), 0, None, every):
            n += 1
            if not is_refused(mutant):
                accepted.append(what)
    assert accepted == []
    assert n > 0


def position(joint: JointProgram, test: Callable[[JointLine], bool]) -> int:
    return next(i for i, line in enumerate(joint.backward) if test(line))


def refused(joint: JointProgram, reason: str) -> None:
    with pytest.raises(VerificationError, match=reason):
        verify_joint(joint)


def test_messages_name_the_line_and_the_variable() -> None:
    (joint,) = planned("tp")
    at = position(joint, lambda line: isinstance(line, StartLine))
    with pytest.raises(VerificationError) as raised:
        verify_joint(with_line(joint, "backward", at))
    what, where, hint = str(raised.value).splitlines()
    start = joint.backward[at]
    assert isinstance(start, StartLine)
    assert what == f"{start.pending} is read before it is defined"
    assert where.startswith("  at backward, line ") and "wait(" in where
    assert hint.startswith("  hint: ")


def test_the_input_of_a_collective_under_way_is_not_written() -> None:
    (joint,) = planned("tp")
    at = position(joint, lambda line: isinstance(line, StartLine))
    start = joint.backward[at]
    assert isinstance(start, StartLine)
    (move,) = communications(start)
    assert isinstance(move, GradientMove)
    source, shape = move.source, move.move.out.shape
    out = Variable("written", shape, move.out.dtype)
    args = Ref(source), 2.0
    write = KernelLine((out,), "aten.mul_.Tensor", args, {}, "")
    refused(with_line(joint, "backward", at, start, write), "while a collective of .* is under way")


def test_a_variable_that_views_a_written_storage_is_not_read() -> None:
    (joint,) = planned("dp")
    at = position(joint, lambda line: isinstance(line, KernelLine) and line.is_view)
    view = joint.backward[at]
    assert isinstance(view, KernelLine)
    (source,), (out,) = view.reads, view.outs
    first = replace(out, name="first")
    key = view.key
    lines = (
        replace(view, outs=(first,), target="aten.alias.default", args=(Ref(source),)),
        KernelLine((replace(out, name="new"),), "aten.add_.Tensor", (Ref("first"), 1.0), {}, key),
    )
    refused(with_line(joint, "backward", at, *lines, view), f"{source} is read after first, of")


def test_what_others_hold_is_not_written() -> None:
    """Saved values, what was handed over, and what shares memory with itself."""
    (joint,) = planned("zero-2")
    at = position(joint, lambda line: isinstance(line, KernelLine) and not line.is_view)
    kernel = joint.backward[at]
    out = Variable("new", (), torch.float32)

    def written(name: str, at: int) -> JointProgram:
        line = KernelLine((out,), "aten.mul_.Tensor", (Ref(name), 2.0), {}, "")
        return with_line(joint, "backward", at, joint.backward[at], line)

    saved = next(name for name in kernel.reads if name in joint.saved)
    refused(written(saved, at), f"{saved} is written, but others read it")
    ready = position(joint, lambda line: isinstance(line, ReadyLine) and not line.is_shared)
    (source,) = joint.backward[ready].reads
    refused(written(source, ready), "was handed over")
    (wide,) = planned("dp")
    at = position(wide, lambda line: isinstance(line, KernelLine) and "expand" in line.target)
    (name,) = wide.backward[at].writes
    line = KernelLine((out,), "aten.mul_.Tensor", (Ref(name), 2.0), {}, "")
    refused(with_line(wide, "backward", at, wide.backward[at], line), "share memory")


def test_a_program_that_does_not_train_has_no_backward() -> None:
    (joint,) = planned("dp")
    stage = replace(joint.stage, trains=False)
    verify_joint(differentiate(stage))
    refused(replace(joint, stage=stage), "it does not train, but has a backward")


def test_compilation_verifies_what_it_differentiates() -> None:
    """Here, of a stage that returns what no line makes."""
    plan = autopar.plan(MlpWithLoss(), machine((1, 2)), x_and_y(0), manual=Manual(dp=2))
    wrong = replace(pipeline_of(plan), stages=(replace(program_of(plan), outputs=("nothing",)),))
    made = bound_of(plan).compilation
    compilation = Compilation((Differentiate(),), wrong, made[Placed], made[Target])
    with pytest.raises(VerificationError, match="nothing"):
        _ = compilation[Differentiated]
