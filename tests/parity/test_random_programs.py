"""A sharded step of a named model, every placement drawn, is one process's: its loss, gradients,
buffers and calls.

`AUTOPAR_PLACEMENTS=M:N` runs the seeds M .. N-1 of every kind.
"""

from __future__ import annotations

import os
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from autopar.placement import I, R, Spec
from tests.helpers.harness import (
    abstract_cost,
    free_problem,
    generated_code,
    model_case,
    random_strategy,
    thread_step,
)
from tests.helpers.nightly import nightly, one_in
from tests.helpers.random_programs import KINDS, SMALL, faults, random_program

__all__ = ["generated_code"]

CHOSEN = os.environ.get("AUTOPAR_PLACEMENTS")
# Numbers of seeds. A larger model's capture takes a second, so few of the zoo run by day.
LIGHT = "distilbert resnet attention-by-position encoder-dropout group-norm tied einsum".split()
BY_DAY = {**dict.fromkeys(SMALL, 5), **{f"zoo {name}": 1 for name in LIGHT}}
AT_NIGHT = dict.fromkeys(SMALL, 60)
ZOO_AT_NIGHT = 6


def programs() -> list[Any]:
    """(kind, seed)"""
    if CHOSEN:
        first, _, end = CHOSEN.rpartition(":")
        return [(kind, seed) for kind in KINDS for seed in range(int(first or 0), int(end))]
    return [
        pytest.param(kind, seed, marks=() if seed < BY_DAY.get(kind, 0) else nightly)
        for kind in KINDS
        for seed in range(AT_NIGHT.get(kind, ZOO_AT_NIGHT))
    ]


@one_in(8)
@pytest.mark.parametrize(("kind", "seed"), programs())
def test_a_step_is_one_processs(kind: str, seed: int) -> None:
    program = random_program(kind, seed)
    assert faults(program) == {}, program.text


def test_a_scale_left_invariant_beside_shards_is_noticed() -> None:
    """The loss is right and the gradients of norms are wrong: equal losses alone prove nothing."""
    case, cost, problem = (
        model_case("bert-view"),
        abstract_cost((2,)),
        free_problem("bert-view", (2,), 1),
    )
    strategy = random_strategy(case.analysis, problem, 1, Random(3))
    assert thread_step(case.analysis, cost, strategy, case.batch(3), 3).wrong == {}
    operators = dict(strategy.operators)
    for operator in case.analysis.operators:
        if str(operator.call.op) == "aten.layer_norm.default":
            own = operators[operator.name]
            rows, *affine = own.inputs
            scales = (invariant_beside(rows, spec) for spec in affine)
            operators[operator.name] = replace(own, inputs=(rows, *scales))
    faulty = replace(strategy, operators=operators)
    wrong = thread_step(case.analysis, cost, faulty, case.batch(3), 3).wrong
    assert wrong and all("norm" in name for name in wrong)


def invariant_beside(rows: Spec, spec: Spec) -> Spec:
    """The spec with I in place of R where the rows are sharded."""
    pairs = zip(rows.placements, spec.placements, strict=True)
    return Spec(tuple(I if row.is_shard and p == R else p for row, p in pairs))
