"""Random legal assignments of whole models: loss and every gradient on every rank.

This is the first test of the project. For any legal placements of operators and parameters, the
lowered program computes what one process computes, with the collectives read off its lines.
Assignments include orders of two axes on one dim, every ZeRO period, vocabulary-parallel embedding
and cross-entropy, and grouped-query attention, since the planner can choose all of them.

`AUTOPAR_ASSIGNMENTS=N` runs the seeds 0 .. N-1 of every combination. By default `SAMPLE` says how
many seeds run.
"""

from __future__ import annotations

import os
import random
from collections import Counter

import pytest

from tests.helpers.harness import (
    MODELS,
    abstract_cost,
    free_problem,
    generated_code,
    model_case,
    random_strategy,
    thread_step,
)

__all__ = ["generated_code"]

MESHES = ((2,), (4,), (2, 2), (1, 4), (2, 2, 2))
# Seeds per mesh. Reshard tables of three axes take long to build, so only the MLP runs there by
# default.
SAMPLE = {(2,): 3, (4,): 3, (2, 2): 5, (1, 4): 1, (2, 2, 2): 2}
EXTRA = os.environ.get("AUTOPAR_ASSIGNMENTS")


def combinations() -> list[tuple[str, tuple[int, ...], int, int]]:
    """(model, mesh, microbatches, seed)."""
    return [
        (model, sizes, n_microbatches, seed)
        for model in MODELS
        for sizes in MESHES
        if EXTRA or len(sizes) < 3 or model == "mlp"
        for n_microbatches in (1, 2)
        for seed in range(int(EXTRA) if EXTRA else SAMPLE[sizes])
    ]


@pytest.mark.parametrize(("model", "sizes", "n_microbatches", "seed"), combinations())
def test_assignment(model: str, sizes: tuple[int, ...], n_microbatches: int, seed: int) -> None:
    """One assignment agrees with one process."""
    case, cost = model_case(model), abstract_cost(sizes)
    problem = free_problem(model, sizes, n_microbatches)
    rng = random.Random(f"{model} {sizes} {n_microbatches} {seed}")
    strategy = random_strategy(case.analysis, problem, n_microbatches, rng)
    step = thread_step(case.analysis, cost, strategy, case.batch(seed), seed)
    assert step.wrong == {}
    # The order may differ: autograd picks which of an operator's two parameters it regathers first.
    assert Counter(step.calls) == Counter(step.foretold)
