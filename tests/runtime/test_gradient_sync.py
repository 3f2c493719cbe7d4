"""Gradient sync beside backward: it begins when a bucket is complete."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

import autopar
from autopar import Manual
from autopar.program import rank_collectives, sync_bucket_bytes
from tests.helpers.harness import generated_code
from tests.helpers.jobs import MlpWithLoss, machine
from tests.helpers.ranks import TOLERANCE, pipeline_step

__all__ = ["generated_code"]

MIB = 2**20
WIDTH, N_LAYERS = 512, 4  # a weight has 2 MiB, so it fills buckets of its own
# Period of the sync -> recipe: once a step, and once a microbatch.
PLANS = {
    "step": Manual(dp=2, tp=2),
    "step of four microbatches": Manual(dp=2, tp=2, microbatch_size=2),
    "microbatch": Manual(dp=2, tp=2, zero=2, microbatch_size=4),
}


@pytest.mark.parametrize("name", PLANS)
def test_it_begins_beside_backward(name: str) -> None:
    """Gradients are those of one process, and the calls are those foretold."""
    torch.manual_seed(0)
    batch = {key: torch.randn(16, WIDTH, dtype=torch.float64) for key in ("x", "y")}
    plan = autopar.plan(
        MlpWithLoss(WIDTH, N_LAYERS), machine((1, 4)), batch, precision="fp64", manual=PLANS[name]
    )
    assert plan.bound is not None
    pipeline = plan.bound.pipeline
    errors, calls = pipeline_step(plan.bound.analysis.program, pipeline, batch, 0)
    assert {name: error for name, error in errors.items() if not error <= TOLERANCE} == {}
    for rank, made in enumerate(calls):
        foretold: Counter[tuple[str, str, int]] = Counter()
        for c in rank_collectives(pipeline, rank):
            foretold[c.kind, c.phase, c.size_bytes] += c.count
        assert Counter((c.kind, c.phase, c.size_bytes) for c in made) == foretold
        phases = [c.phase for c in made]
        assert any(p == "grad_sync" and "backward" in phases[i:] for i, p in enumerate(phases))


def test_buckets_are_an_eighth_within_bounds() -> None:
    sizes = [sync_bucket_bytes(n * MIB) for n in (1, 8, 40, 4000)]
    assert sizes == [MIB, MIB, 5 * MIB, 25 * MIB]
