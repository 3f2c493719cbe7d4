"""The verifier accepts every program both ways that is made, and refuses every mutant of one."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar import Manual
from autopar.errors import VerificationError
from autopar.options import Recompute
from autopar.passes.backward import differentiate
from autopar.passes.lowering.lines import lower
from autopar.program.joint_program import JointProgram
from autopar.verifier.joint import verify_joint
from tests.helpers.harness import (
    abstract_cost,
    free_problem,
    model_case,
    random_strategy,
    random_tokens,
)
from tests.helpers.jobs import MlpWithLoss, gpt2, llama, machine, rows, tokens
from tests.helpers.joint_mutants import MUTATIONS, Mutants
from tests.helpers.models.dropout_models import dropped_gpt2
from tests.helpers.models.moe_models import moe_model
from tests.helpers.models.recompute_models import Blocks, recomputing

Planned = tuple[
    Callable[[], nn.Module], Callable[[int], dict[str, Any]], Manual, Recompute | None, str
]


def x_alone(seed: int) -> dict[str, Any]:
    return rows(seed, "x")


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
        lambda: Blocks(nn.BatchNorm1d, 1), x_alone, Manual(dp=2, zero=3), None, "model"
    ),
}  # fmt: skip


@cache
def planned(name: str) -> tuple[JointProgram, ...]:
    make, batch, manual, mode, precision = PLANS[name]
    torch.manual_seed(0)
    plan = autopar.plan(make(), machine((1, 2)), batch(0), manual=manual, precision=precision)
    plan = plan if mode is None else recomputing(plan, mode)
    assert plan.bound is not None
    return tuple(differentiate(stage) for stage in plan.bound.pipeline.stages)


@cache
def drawn(model: str, seed: int) -> JointProgram:
    """Two axes, and any placements: moves of every kind."""
    analysis, problem = model_case(model).analysis, free_problem(model, (2, 2), 1)
    strategy = random_strategy(analysis, problem, 1, random.Random(seed))
    return differentiate(lower(analysis, strategy, abstract_cost((2, 2))))


def programs() -> list[JointProgram]:
    found = [joint for name in PLANS for joint in planned(name)]
    return found + [drawn(model, seed) for model in ("bert-view", "gpt2") for seed in range(3)]


@pytest.mark.parametrize("name", PLANS)
def test_plans_pass(name: str) -> None:
    for joint in planned(name):
        verify_joint(joint)


@pytest.mark.parametrize("model", ["mlp", "bert-view", "gpt2"])
def test_random_strategies_pass(model: str) -> None:
    for seed in range(6):
        verify_joint(drawn(model, seed))


def is_refused(joint: JointProgram) -> bool:
    try:
        verify_joint(joint)
    except VerificationError:
        return True
    return False


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda f: f.__name__)
def test_every_mutant_is_refused(mutation: Callable[[JointProgram], Mutants]) -> None:
    """Some 30,000 in all."""
    accepted, n = [], 0
    for joint in programs():
        for what, mutant in mutation(joint):
            n += 1
            if not is_refused(mutant):
                accepted.append(what)
    print(mutation.__name__, n, len(accepted))
    for a in accepted[:8]: print("   ", a[:700])
    assert accepted == []
    assert n > 0
