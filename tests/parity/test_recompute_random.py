"""Any operators may run again: random ranges of them, in any mode, under random legal placements.

What they compute is what one process computes, and the collectives that run are those foretold.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from autopar.passes.analysis.analysis import Analysis
from autopar.passes.analysis.recompute import MODES
from autopar.passes.lowering.lines import lower
from autopar.program.strategy import Period, Recomputed
from autopar.verifier.stage import verify_program
from tests.helpers.harness import (
    abstract_cost,
    free_problem,
    generated_code,
    legal_storages,
    model_case,
    random_strategy,
    thread_step,
)

__all__ = ["generated_code"]

SEEDS = range(4)


def random_ranges(analysis: Analysis, rng: random.Random) -> tuple[Recomputed, ...]:
    """One to four, up to all operators, next to each other or apart."""
    names = [operator.name for operator in analysis.operators]
    n_edges = 2 * rng.randint(1, 4)
    edges = sorted(rng.choices(range(len(names) + 1), k=n_edges))
    spans = list(zip(edges[::2], edges[1::2], strict=True))
    if rng.random() < 0.5:  # no operator is left between two
        spans = list(itertools.pairwise(edges))
    return tuple(Recomputed(rng.choice(MODES), tuple(names[a:b])) for a, b in spans if a < b)


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
