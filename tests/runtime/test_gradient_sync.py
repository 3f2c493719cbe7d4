"""Gradient sync beside backward: it begins when a bucket is complete, and changes no bits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

import autopar
from autopar import Manual
from autopar.program import bucketing, rank_collectives
from autopar.runtime.groups import CollectiveCall, Recorder
from tests.helpers.harness import generated_code
from tests.helpers.jobs import machine, tokens
from tests.helpers.models.dropout_models import dropped_gpt2
from tests.helpers.ranks import Rank, named_inputs, random_parameters, run_ranks

__all__ = ["generated_code"]

# Period of the sync -> recipe: once a step, and once a microbatch.
PLANS = {
    "step": Manual(dp=2, tp=2),
    "step of four microbatches": Manual(dp=2, tp=2, microbatch_size=2),
    "microbatch": Manual(dp=2, tp=2, zero=2, microbatch_size=4),
}


def step(manual: Manual) -> tuple[list[dict[str, Tensor]], list[Sequence[CollectiveCall]]]:
    """Gradients and calls of every rank in one step; the calls are those foretold."""
    torch.manual_seed(0)
    plan = autopar.plan(
        dropped_gpt2(2), machine((1, 4)), tokens(0), precision="fp64", manual=manual
    )
    assert plan.bound is not None
    program, pipeline = plan.bound.analysis.program, plan.bound.pipeline

    def work(rank: Rank) -> tuple[dict[str, Tensor], Sequence[CollectiveCall]]:
        with Recorder() as recorder:
            rank.executor.step(rank.stored, named_inputs(program, tokens(0)))
        gradients = {n: p.grad for n, p in rank.stored.items() if p.grad is not None}
        return gradients, recorder.calls

    results = run_ranks(program, pipeline, random_parameters(program, 0), work)
    for rank, (_, calls) in enumerate(results):
        foretold: Counter[tuple[str, str, int]] = Counter()
        for c in rank_collectives(pipeline, rank):
            foretold[c.kind, c.phase, c.size_bytes] += c.count
        assert Counter((c.kind, c.phase, c.size_bytes) for c in calls) == foretold
    return [gradients for gradients, _ in results], [calls for _, calls in results]


@pytest.mark.parametrize("name", PLANS)
def test_it_begins_beside_backward_and_changes_no_bits(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With small buckets calls of backward follow; with one bucket, none of its microbatch does."""
    whole, _ = step(PLANS[name])
    monkeypatch.setattr(bucketing, "_LEAST_BUCKET_BYTES", 2**10)
    parts, calls = step(PLANS[name])
    for phases in ([c.phase for c in made] for made in calls):
        n_before_the_end = sum(
            phase == "grad_sync" and "backward" in phases[i:] for i, phase in enumerate(phases)
        )
        assert n_before_the_end > 0
    for gradients, others in zip(whole, parts, strict=True):
        assert gradients.keys() == others.keys()
        assert all(torch.equal(gradients[n], others[n]) for n in gradients)


def test_buckets_are_an_eighth_within_bounds() -> None:
    mib = 2**20
    sizes = [bucketing.sync_bucket_bytes(n * mib) for n in (1, 8, 40, 4000)]
    assert sizes == [mib, mib, 5 * mib, 25 * mib]
