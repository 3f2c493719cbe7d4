"""Random pipelines: random cuts, unequal meshes, random legal assignments and boundaries.

For any stages on any meshes, loss and every gradient on every rank equal one process. Messages
wait for each other as NCCL's do. Every value crosses once, and so does its gradient. Collectives
are those read off the stages' programs.

`AUTOPAR_ASSIGNMENTS=N` runs the seeds 0 .. N-1 of every combination; by default a fixed sample.
"""

from __future__ import annotations

import math
import os
import random
from collections import Counter
from collections.abc import Sequence

import pytest

from autopar.program import Pipeline
from autopar.runtime.groups import WORLD_AXIS, CollectiveCall
from tests.helpers.harness import MODELS, foretold_calls, generated_code, model_case
from tests.helpers.pipeline_harness import Layout, Shapes, random_ends, random_pipeline
from tests.helpers.ranks import TOLERANCE, pipeline_step

__all__ = ["generated_code"]

EXTRA = os.environ.get("AUTOPAR_ASSIGNMENTS")
MESHES: tuple[Shapes, ...] = (
    ((1, 2), (1, 2)),
    ((1, 1), (1, 1), (1, 1), (1, 1)),
    ((1, 1), (1, 3)),
    ((2, 1), (2, 1)),
    ((2, 2), (1, 1)),
    ((2, 1), (1, 2), (1, 1)),
)
COUNTS = (1, 2, 4, 8)
ORDERS = ("gpipe", "1f1b")
# Samples of each model. Other models add no new shape of a pipeline, so they have few.
N_SAMPLED = {"mlp": 12, "gpt2": 10, "llama": 8, "t5": 8}
N_SAMPLED_OTHERS = 3
Combination = tuple[str, Shapes, int, str, int]


def combinations() -> list[Combination]:
    """(model, meshes, microbatches, order, seed)."""
    found = [
        (model, shapes, m, order)
        for model in MODELS
        for shapes in MESHES
        for m in COUNTS
        for order in ORDERS
    ]
    if EXTRA:
        return [(*one, seed) for one in found for seed in range(int(EXTRA))]
    rng = random.Random(0)
    return [
        (*one, seed)
        for model in MODELS
        for seed, one in enumerate(
            rng.sample(
                [one for one in found if one[0] == model], N_SAMPLED.get(model, N_SAMPLED_OTHERS)
            )
        )
    ]


@pytest.mark.parametrize(("model", "shapes", "n_microbatches", "order", "seed"), combinations())
def test_pipeline(model: str, shapes: Shapes, n_microbatches: int, order: str, seed: int) -> None:
    case = model_case(model)
    rng = random.Random(f"{model} {shapes} {n_microbatches} {order} {seed}")
    ends = random_ends(case.analysis.program, len(shapes), rng)
    layout = Layout(shapes, n_microbatches, order)
    pipeline = random_pipeline(case.analysis, ends, layout, rng)
    errors, calls = pipeline_step(case.analysis.program, pipeline, case.batch(seed), seed)
    assert {name: error for name, error in errors.items() if not error <= TOLERANCE} == {}
    assert bytes_sent(calls) == crossing_bytes(pipeline)
    for rank, found in enumerate(calls):
        check_collectives(pipeline, rank, found)


def bytes_sent(calls: Sequence[Sequence[CollectiveCall]]) -> int:
    return sum(c.size_bytes for found in calls for c in found if c.kind == "send")


def crossing_bytes(pipeline: Pipeline) -> int:
    """Bytes of every value and its gradient, per microbatch and reader; and gradients of ties."""
    n = 0
    for crossing in pipeline.crossings:
        local = crossing.sent.local
        whole = math.prod(size for dim in local.dims for size in dim) * local.dtype.itemsize
        n += pipeline.n_microbatches * whole * (1 + crossing.has_grad)
    for tie in pipeline.ties:
        p = pipeline.parameter(*tie.places[0])
        n_pairs = len(tie.places) * (len(tie.places) - 1)
        n += n_pairs * math.prod(p.shape) * p.stored.dtype.itemsize
    return n


def check_collectives(pipeline: Pipeline, rank: int, found: Sequence[CollectiveCall]) -> None:
    """A rank's collectives are those of its stage's program, one for the loss, and some for ties.

    Each partner of a tied parameter adds at most one all_reduce of its summed gradient.
    """
    stage = pipeline.stage_of(rank)
    foretold = Counter(foretold_calls(pipeline.stages[stage]))
    inside = Counter(c for c in found if c.kind != "send" and c.axes != (WORLD_AXIS,))
    assert not foretold - inside
    n_partners = sum(len(t.places) - 1 for t in pipeline.ties if stage in dict(t.places))
    extra = inside - foretold
    assert all((c.kind, c.phase) == ("all_reduce", "grad_sync") for c in extra)
    assert extra.total() <= n_partners
    assert sum(c.axes == (WORLD_AXIS,) for c in found) == 1
