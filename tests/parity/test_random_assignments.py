"""Random legal assignments of whole models: loss and every gradient on every rank.

The first test of the project: whatever legal placements operators and parameters are given,
the program lowered from them computes what one process computes, with the collectives that
are read off its lines. Assignments include orders
of two axes on one dim, every ZeRO period, vocabulary-parallel embedding and cross-entropy,
and grouped-query attention, since all of them are choices of the planner.

`AUTOPAR_ASSIGNMENTS=N` runs the seeds 0 .. N-1 of every combination; by default each has the
few that `SAMPLE` gives it.
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
# Seeds per mesh. Tables of reshards on three axes take long to build, so there only the MLP
# runs by default.
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
    # Not their order: autograd picks which of two parameters an operator gathers again first.
    assert Counter(step.calls) == Counter(step.foretold)
