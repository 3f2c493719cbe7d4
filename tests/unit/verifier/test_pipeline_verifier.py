"""The verifier of pipelines accepts what lowering makes, and names every planted fault."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import pytest
import torch

from autopar.errors import VerificationError
from autopar.program.lines import Boundary, Crossing, Pipeline
from autopar.schedule import Action, Schedule
from autopar.verifier import check_rendezvous, verify_pipeline
from autopar.verifier.pipeline import pipeline_sequences
from tests.helpers.harness import model_case
from tests.helpers.nightly import sampled
from tests.helpers.pipeline_harness import Layout, Shapes, random_ends, random_pipeline

SHAPES: tuple[Shapes, ...] = (((1, 2), (1, 3)), ((2, 2), (1, 1)), ((2, 1), (1, 2), (1, 1)))


@lru_cache
def drawn(model: str, shapes: Shapes, order: str, seed: int) -> Pipeline:
    analysis = model_case(model).analysis
    rng = random.Random(seed)
    ends = random_ends(analysis.program, len(shapes), rng)
    return random_pipeline(analysis, ends, Layout(shapes, 4, order), rng)


def tied() -> Pipeline:
    pipelines = (drawn("gpt2", SHAPES[0], "1f1b", seed) for seed in range(20))
    return next(p for p in pipelines if p.ties)


def refused(pipeline: Pipeline, reason: str) -> None:
    with pytest.raises(VerificationError, match=reason):
        verify_pipeline(pipeline)


EVERY = [(m, s, o) for m in ("mlp", "gpt2", "llama") for s in SHAPES for o in ("gpipe", "1f1b")]


@pytest.mark.parametrize(
    ("model", "shapes", "order"), sampled(EVERY, [c for c in EVERY if c[0] == "gpt2"])
)
def test_lowered_pipelines_pass(model: str, shapes: Shapes, order: str) -> None:
    for seed in range(3):
        verify_pipeline(drawn(model, shapes, order, seed))


def reordered(pipeline: Pipeline, stage: int, i: int, j: int) -> Pipeline:
    """`pipeline` with two actions of one stage swapped."""
    actions = list(pipeline.schedule.rows[stage])
    actions[i], actions[j] = actions[j], actions[i]
    stages = [*pipeline.schedule.rows]
    stages[stage] = tuple(actions)
    return replace(pipeline, schedule=replace(pipeline.schedule, rows=tuple(stages)))


def message_pairs(schedule: Schedule, stage: int) -> list[tuple[int, int]]:
    """Positions of neighbouring messages with the same peer stage."""
    actions = schedule.rows[stage]
    return [
        (i, i + 1)
        for i, (a, b) in enumerate(itertools.pairwise(actions))
        if not a.is_compute and not b.is_compute and a.peer == b.peer
    ]


@pytest.mark.parametrize("stage", [0, 1])
def test_a_swapped_pair_of_messages(stage: int) -> None:
    """1f1b exchanges activations one way for gradients the other; one stage swaps the two."""
    pipeline = drawn("mlp", SHAPES[1], "1f1b", 0)
    pairs = message_pairs(pipeline.schedule, stage)
    assert pairs
    for i, j in pairs:
        wrong = reordered(pipeline, stage, i, j)
        refused(wrong, "wait for each other for ever")
        with pytest.raises(VerificationError, match="call different collectives"):
            check_rendezvous(pipeline_sequences(wrong))


def test_messages_of_another_microbatch() -> None:
    pipeline = drawn("mlp", SHAPES[1], "gpipe", 0)
    sends = [
        i for i, a in enumerate(pipeline.schedule.rows[0]) if a == Action("send_forward", 0, 0, 1)
    ]
    other = pipeline.schedule.rows[0].index(Action("send_forward", 0, 1, 1))
    refused(reordered(pipeline, 0, sends[0], other), "before|for ever")


def with_crossing(pipeline: Pipeline, change: Callable[[Crossing], Crossing]) -> Pipeline:
    first, *rest = pipeline.crossings
    return replace(pipeline, crossings=(change(first), *rest))


def test_a_tensor_that_is_another_one_at_its_end() -> None:
    pipeline = drawn("mlp", SHAPES[1], "1f1b", 0)

    def other(boundary: Boundary) -> Boundary:
        return replace(boundary, local=replace(boundary.local, dtype=torch.float32))

    refused(with_crossing(pipeline, lambda c: replace(c, sent=other(c.sent))), "does not send it")
    wrong = with_crossing(pipeline, lambda c: replace(c, received=other(c.received)))
    refused(wrong, "crosses 1 times")


def test_a_crossing_that_is_missing_or_doubled() -> None:
    pipeline = drawn("mlp", SHAPES[1], "1f1b", 0)
    refused(replace(pipeline, crossings=pipeline.crossings[1:]), "crosses 0 times")
    doubled = (*pipeline.crossings, pipeline.crossings[0])
    refused(replace(pipeline, crossings=doubled), "crosses 2 times")


def test_a_transfer_without_its_gradient() -> None:
    pipeline = drawn("mlp", SHAPES[1], "1f1b", 0)
    assert pipeline.schedule.transfers is not None
    transfers = frozenset(replace(t, has_gradient=False) for t in pipeline.schedule.transfers)
    kept = tuple(
        tuple(a for a in actions if not a.kind.endswith("_backward"))
        for actions in pipeline.schedule.rows
    )
    schedule = replace(pipeline.schedule, transfers=transfers, rows=kept)
    refused(replace(pipeline, schedule=schedule), "brings no gradient back")


def test_ties_that_are_not_equal() -> None:
    pipeline = tied()
    (stage, name) = pipeline.ties[0].places[1]

    def with_mirror(**changes: object) -> Pipeline:
        program = pipeline.stages[stage]
        parameters = tuple(
            replace(p, **changes) if p.name == name else p  # type: ignore[arg-type]
            for p in program.parameters
        )
        stages = list(pipeline.stages)
        stages[stage] = replace(program, parameters=parameters)
        return replace(pipeline, stages=tuple(stages))

    refused(with_mirror(mirror_of="other"), "it mirrors other")
    refused(with_mirror(shape=(1, 2)), "shape is")


def test_stages_that_do_not_fit_together() -> None:
    pipeline = drawn("mlp", SHAPES[1], "1f1b", 0)
    first, second = pipeline.meshes
    moved = replace(second, first_rank=second.first_rank + 1)
    refused(replace(pipeline, meshes=(first, moved)), "it begins at rank 5, not 4")
    other = replace(first, sizes=(4, 1))
    refused(replace(pipeline, meshes=(other, second)), "its program is for axes")
    fewer = replace(pipeline.stages[1], n_microbatches=2)
    refused(replace(pipeline, stages=(pipeline.stages[0], fewer)), "2 microbatches")
    still = replace(pipeline.stages[1], trains=False)
    refused(replace(pipeline, stages=(pipeline.stages[0], still)), "does not train")
    refused(replace(pipeline, meshes=(first,)), "stages, meshes and lines")


def test_blocks_of_rows_that_a_stage_does_not_divide() -> None:
    pipelines = (drawn("mlp", SHAPES[0], "1f1b", seed) for seed in range(20))
    split = next(p for p in pipelines if p.n_blocks > 1)
    refused(replace(split, n_blocks=1), "1 blocks of rows for [23] shards")


def test_every_rank_takes_part() -> None:
    pipeline = tied()
    found = pipeline_sequences(pipeline)
    assert sorted(found) == list(range(pipeline.n_ranks))
    everywhere = tuple(range(pipeline.n_ranks))
    assert all(calls[-1].ranks == everywhere for calls in found.values())
    tied_calls = [c for c in found[0] if "tied" in str(c.what)]
    assert tied_calls
