"""Any operators may be recomputed: random ranges, in any mode, under random legal placements.

Steps compute what one process computes, and run the collectives that the program predicts.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from autopar.passes.lowering import lower
from autopar.program import Period
from autopar.verifier import verify_program
from tests.helpers.harness import (
    abstract_cost,
    free_problem,
    generated_code,
    legal_storages,
    model_case,
    random_ranges,
    random_strategy,
    thread_step,
)

__all__ = ["generated_code"]

SEEDS = range(4)


@pytest.mark.parametrize("period", [None, "use"])
@pytest.mark.parametrize("sizes", [(2,), (2, 2)])
@pytest.mark.parametrize("model", ["mlp", "bert-chunk", "gpt2", "llama"])
def test_any_ranges(model: str, sizes: Sequence[int], period: Period | None) -> None:
    case, cost, n_segments = model_case(model), abstract_cost(tuple(sizes)), 0
    for seed in SEEDS:
        rng, n_microbatches = random.Random(f"{model} {sizes} {period} {seed}"), 1 + seed % 2
        problem = free_problem(model, tuple(sizes), n_microbatches)
        strategy = random_strategy(case.analysis, problem, n_microbatches, rng)
        if period is not None:
            found = legal_storages(case.analysis, problem, strategy.operators)
            each_use = {n: [s for s in legal if s.period == period] for n, legal in found.items()}
            storage = {n: rng.choice(legal) for n, legal in each_use.items() if legal}
            strategy = replace(strategy, storage={**strategy.storage, **storage})
        strategy = replace(strategy, recomputed=random_ranges(case.analysis, rng))
        program = lower(case.analysis, strategy, cost)
        verify_program(program)
        n_segments += len(program.segments)
        step = thread_step(case.analysis, cost, strategy, case.batch(seed), seed)
        assert step.wrong == {}, seed
        assert Counter(step.calls) == Counter(step.foretold), seed
    assert n_segments > len(SEEDS)
