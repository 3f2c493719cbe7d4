"""The order in which nodes are proposed does not change the plan, nor what is said of others."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import autopar
from autopar import Mesh
from autopar.passes.search import Planner
from autopar.passes.search.branch_bound import Node
from autopar.plans import PlanData
from tests.helpers.harness import random_tokens, tiny_gpt2, tiny_llama
from tests.helpers.recompute_plans import batch, model


def shuffled(
    propose: Callable[[Planner], Iterator[Node]], rng: random.Random
) -> Callable[[Planner], Iterator[Node]]:
    def found(planner: Planner) -> Iterator[Node]:
        nodes = [*propose(planner)]
        rng.shuffle(nodes)
        yield from nodes

    return found


def several_stages() -> PlanData:
    mesh = Mesh((2, 2), hardware="cpu-local")
    return autopar.plan(tiny_gpt2(2), mesh, random_tokens(0)).data


def tight() -> PlanData:
    """Memory binds, so recompute is searched, and recipes are tried with it."""
    mesh, limits = Mesh((1, 4), hardware="a100-80gb"), {"stages": 1, "memory_limit": 1_500_000}
    return autopar.plan(model("plain"), mesh, batch(), **limits).data


def fastest() -> PlanData:
    mesh, options = Mesh((1, 4), hardware="h100-sxm"), {"tolerance": 0.0, "tie": 0.0}
    return autopar.plan(tiny_llama(2), mesh, random_tokens(0), **options).data


@pytest.mark.parametrize("make", [several_stages, tight, fastest])
def test_a_shuffled_search_finds_the_same(
    make: Callable[[], PlanData], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = make()
    for seed in range(2):
        rng = random.Random(seed)
        with monkeypatch.context() as patch:
            for name in ("_recipes", "_roots"):
                propose: Any = getattr(Planner, name)
                patch.setattr(Planner, name, shuffled(propose, rng))
            assert make() == expected, seed
