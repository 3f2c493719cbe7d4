"""Collectives and messages of a step of ZeRO, of local batches, of stages, and how lists name them.

That every thread rank records what is predicted is checked of all random programs
(`tests/helpers/random_programs.py`).
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from functools import lru_cache

import pytest

from autopar.cost.price import collectives_of
from autopar.passes.lowering import lower
from autopar.program.communication import Gather, Start, backward_order
from autopar.program.lines import Pipeline, Strategy
from autopar.runtime.groups import Recorder
from tests.helpers.harness import abstract_cost, generated_code, model_case, zero_strategy_of
from tests.helpers.nightly import sampled
from tests.helpers.pipeline_harness import Layout, random_ends, random_pipeline
from tests.helpers.random_programs import (
    RandomProgram,
    Row,
    faults,
    predicted_rows,
    recorded_rows,
)
from tests.helpers.ranks import Rank, named_inputs, random_parameters, run_ranks

__all__ = ["generated_code"]


def tied_pipeline() -> Pipeline:
    """Two stages of GPT-2, each on two ranks, that share a parameter."""
    analysis, layout = model_case("gpt2").analysis, Layout(((1, 2), (1, 2)), 2)
    for rng in map(random.Random, range(40)):
        ends = random_ends(analysis.program, 2, rng)
        if (pipeline := random_pipeline(analysis, ends, layout, rng)).ties:
            return pipeline
    raise AssertionError("no drawn pipeline has a tie")


@lru_cache
def zero_pipeline(model: str, stage: int, n_microbatches: int) -> Pipeline:
    """Data parallelism on two ranks, with ZeRO `stage` where a parameter can be sharded."""
    analysis, cost = model_case(model).analysis, abstract_cost((2,))
    strategy: Strategy = zero_strategy_of(analysis, cost, stage, n_microbatches)
    return Pipeline.single(lower(analysis, strategy, cost), cost.mesh)


EVERY_ZERO = list(itertools.product(("mlp", "gpt2"), range(4), (1, 4)))
FEW_ZERO = [("mlp", 0, 1), ("mlp", 1, 4), ("mlp", 2, 4), ("mlp", 3, 1), ("gpt2", 3, 4)]


@pytest.mark.parametrize(("model", "stage", "n_microbatches"), sampled(EVERY_ZERO, FEW_ZERO))
def test_zero(model: str, stage: int, n_microbatches: int) -> None:
    pipeline = zero_pipeline(model, stage, n_microbatches)
    case = model_case(model)
    assert faults(RandomProgram(case.analysis, pipeline, case.batch(0), 0, "")) == {}
    (program,) = pipeline.stages
    rows = collectives_of(pipeline)
    kinds: Counter[tuple[str, str]] = Counter()
    for row in rows:
        kinds[row.kind, row.phase] += row.count
    gathers, scatters = kinds["all_gather", "param_gather"], kinds["reduce_scatter", "grad_sync"]
    # Small parameters of one dtype share a bucket; ZeRO-3 gathers those of a block together.
    if stage < 3:
        assert kinds["all_reduce", "grad_sync"] == (stage == 0)
        assert gathers == (stage > 0)
        assert scatters == {0: 0, 1: 1, 2: n_microbatches}[stage]
    else:
        # Three numbered layers; the two embeddings, a block, the last norm, and the head.
        n_runs = {"mlp": 3, "gpt2": 5}[model]
        begun = [w.call if isinstance(w, Start) else w for w in backward_order(program)]
        n_again = sum(isinstance(call, Gather) for call in begun)
        assert scatters == n_microbatches * n_runs
        assert gathers == n_microbatches * (n_runs + n_again)
        assert 0 < n_again < n_runs
    named = {name for row in rows if row.phase == "grad_sync" for name in row.tensor.split(", ")}
    assert named == {p.name for p in program.parameters}


def test_own_rows_add_up_the_divisors() -> None:
    case, pipeline = model_case("gpt2"), zero_pipeline("gpt2", 0, 2)
    program = case.analysis.program
    inputs = named_inputs(program, case.batch(0))

    def work(rank: Rank) -> Counter[Row]:
        own = {name: value.chunk(2)[rank.world.rank] for name, value in inputs.items()}
        with Recorder() as recorder:
            rank.executor.step(rank.stored, own, is_local=True)
        return recorded_rows(recorder.calls)

    wanted = predicted_rows(collectives_of(pipeline, local_inputs=True))
    assert run_ranks(program, pipeline, random_parameters(program, 0), work) == [wanted] * 2
    extra = wanted - predicted_rows(collectives_of(pipeline))
    assert [(kind, phase, count) for (kind, phase, _, _), count in extra.items()] == (
        [("all_reduce", "loss", 1)]
    )


def test_rows_of_a_pipeline_are_named() -> None:
    pipeline = tied_pipeline()
    rows = collectives_of(pipeline)
    sent = [r for r in rows if (r.kind, r.phase) == ("send", "p2p")]
    assert {r.tensor for r in sent} == {c.sent.key for c in pipeline.crossings}
    # Activations from stage 0, their gradients from stage 1, for both microbatches.
    with_gradient = {c.sent.key for c in pipeline.crossings if c.has_grad}
    assert {r.tensor for r in sent if r.stage == 1} == with_gradient
    assert all(r.axis == "pp" and r.count % 2 == 0 for r in sent)
    tied = [(r.stage, r.tensor) for r in rows if (r.kind, r.phase) == ("send", "grad_sync")]
    assert set(tied) == set(pipeline.ties[0].places)
    loss = [r for r in rows if r.axis == "world"]
    assert [(r.kind, r.phase, r.stage, r.count, r.size_bytes) for r in loss] == [
        ("all_reduce", "loss", stage, 1, 8) for stage in range(2)
    ]
