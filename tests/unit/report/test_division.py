"""The sharded fraction of matmuls and parameters, on plans whose fractions are known."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import pytest

import autopar
from autopar import Device, Link, Manual, Mesh
from autopar.program.lines import Pipeline
from autopar.report import Division, division
from autopar.report.division import is_sharded, products
from tests.helpers.jobs import CASES, VOCABULARY, WIDTH, machine
from tests.helpers.plans import pipeline_of


@lru_cache
def planned(model: str, mesh: Mesh, manual: Manual | None = None) -> Pipeline:
    case = CASES[model]
    options: dict[str, Any] = {"manual": manual} if manual else {"stages": 1}
    plan = autopar.plan(
        case.model(), mesh, case.batch(0), loss_fn=case.loss_fn, microbatches=1, **options
    )
    return pipeline_of(plan)


@pytest.mark.parametrize(
    ("manual", "wanted"),
    [
        (Manual(dp=2), Division(stored=0.0, products=1.0, by_weights=0.0)),
        (Manual(dp=2, zero=3), Division(stored=1.0, products=1.0, by_weights=0.0)),
        (Manual(pp=2), Division(stored=0.0, products=1.0, by_weights=0.0)),
    ],
    ids=("data", "zero-3", "stages"),
)
def test_recipes(manual: Manual, wanted: Division) -> None:
    assert division(planned("mlp", machine((1, 2)), manual)) == wanted


@pytest.mark.parametrize("n_ranks", [1, 2, 4])
def test_all_do_all(n_ranks: int) -> None:
    """Links are so slow that every rank computes everything."""
    slow = Link(1e9, 1e9)
    mesh = Mesh((1, n_ranks), links=[slow, slow], device=Device(1e12, 1e12, 1e12))
    assert division(planned("mlp", mesh)) == Division(
        0.0, float(n_ranks == 1), 0.0, repeated=1 - 1 / n_ranks
    )


def test_tensor_parallel() -> None:
    """Of 3 x (32 x 32 + 32) elements, only biases that follow a sum over ranks stay whole."""
    pipeline = planned("mlp", machine((1, 2)), Manual(tp=2))
    (stage,) = pipeline.stages
    whole = sum(p.stored.shape[0] for p in stage.parameters if not is_sharded(p.stored))
    n_elements = 3 * (WIDTH * WIDTH + WIDTH)
    assert 0 < whole <= 2 * WIDTH
    found = division(pipeline)
    assert found == Division(found.stored, products=1.0, by_weights=1.0)
    assert found.stored == pytest.approx(1 - whole / n_elements)


def test_a_tied_parameter_counts_once() -> None:
    """Its mirror on the last stage is not counted again."""
    pipeline = planned("gpt2", machine((2, 2)), Manual(pp=2, tp=2))
    held = [(p, p.mirror_of) for s in pipeline.stages for p in s.parameters]
    (tied,) = (p for p, mirror in held if mirror is not None)
    assert tied.shape == (VOCABULARY, WIDTH)
    own = [p for p, mirror in held if mirror is None]
    sizes = [(math.prod(p.shape), is_sharded(p.stored)) for p in own]
    wanted = sum(n for n, sharded in sizes if sharded) / sum(n for n, _ in sizes)
    assert 0.5 < wanted < 1
    assert division(pipeline).stored == pytest.approx(wanted)


def test_products_of_two_activations_have_no_weight() -> None:
    """GPT-2: four matmuls with weights per layer and one in the head; attention has no weight."""
    (stage,) = planned("gpt2", machine((1, 2)), Manual(tp=2)).stages
    kinds = [p.weight_is_sharded for p in products(stage)]
    assert kinds.count(None) == 2
    assert kinds.count(True) == 2 * 4 + 1
    assert len(kinds) == 2 * 5 + 1
    assert all(p.whole_flops == 2 * p.rank_flops for p in products(stage))


def test_a_gathered_weight_is_a_weight() -> None:
    """ZeRO-3 gathers each weight right before its matmul, which uses it whole."""
    (stage,) = planned("gpt2", machine((1, 2)), Manual(dp=2, zero=3)).stages
    kinds = [p.weight_is_sharded for p in products(stage)]
    assert kinds.count(None) == 2
    assert kinds.count(False) == 2 * 4 + 1


def test_text() -> None:
    text = (
        "Parameter bytes sharded: 50%. Matmul FLOPs sharded: over 99%; through sharded weights: 0%"
    )
    assert str(Division(0.5, 0.999, 0.0)) == text
    assert str(Division(0.5, 0.999, 0.0, 0.004)) == (
        f"{text}. Of the FLOPs of all ranks, under 1% repeat another rank's"
    )
