"""Costs of pipelines: exact messages and collectives of every rank, and times by hand."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable

import pytest
import torch

from autopar.cost.hardware import flat_group
from autopar.cost.laws import CostModel, collective_time_s
from autopar.cost.price import collectives_of, link_between, predict, stage_times, timeline_of
from autopar.cost.price.prediction import transfer_s
from autopar.mesh import Link, Mesh
from autopar.program import Collective, Messages, Piece, Pipeline, rank_collectives
from autopar.runtime.groups import CollectiveCall
from autopar.schedule import Action
from tests.helpers.harness import generated_code, model_case
from tests.helpers.pipeline_harness import Layout, Shapes, random_ends, random_pipeline
from tests.helpers.ranks import pipeline_step

__all__ = ["generated_code"]

Row = tuple[str, str, str | tuple[str, ...], int]
SHAPES: tuple[Shapes, ...] = (
    ((1, 2), (1, 2)),
    ((1, 1), (1, 3)),
    ((2, 2), (1, 1)),
    ((2, 1), (1, 2), (1, 1)),
    ((1, 1),) * 4,
)
FAST, SLOW = Link(1e-6, 1e-9), Link(1e-4, 1e-7)
Wanted = Callable[[Pipeline], bool]


def drawn(
    model: str, shapes: Shapes, n_microbatches: int, seed: int, order: str = "1f1b"
) -> Pipeline:
    analysis = model_case(model).analysis
    rng = random.Random(seed)
    ends = random_ends(analysis.program, len(shapes), rng)
    return random_pipeline(analysis, ends, Layout(shapes, n_microbatches, order), rng)


def first_with(wanted: Wanted, model: str, shapes: Shapes, n_microbatches: int = 2) -> Pipeline:
    """The first drawn pipeline that has what a test needs."""
    pipelines = (drawn(model, shapes, n_microbatches, seed) for seed in range(40))
    found = next((p for p in pipelines if wanted(p)), None)
    assert found is not None, "no drawn pipeline has it"
    return found


def skips(pipeline: Pipeline) -> bool:
    return any(c.target - c.source > 1 for c in pipeline.crossings)


def predicted_rows(rows: Iterable[Collective]) -> Counter[Row]:
    found: Counter[Row] = Counter()
    for c in rows:
        found[c.kind, c.phase, c.axis, c.size_bytes] += c.count
    return found


def recorded_rows(calls: Iterable[CollectiveCall]) -> Counter[Row]:
    return Counter(
        (c.kind, c.phase, c.axes[0] if len(c.axes) == 1 else c.axes, c.size_bytes) for c in calls
    )


def costs_of(pipeline: Pipeline) -> list[CostModel]:
    return [CostModel(mesh, torch.float64) for mesh in pipeline.meshes]


@pytest.mark.parametrize(("order", "n_microbatches"), [("gpipe", 1), ("gpipe", 4), ("1f1b", 4)])
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
@pytest.mark.parametrize("model", ["mlp", "gpt2", "llama"])
def test_every_rank_records_what_is_predicted(
    model: str, shapes: Shapes, order: str, n_microbatches: int
) -> None:
    case = model_case(model)
    pipeline = drawn(model, shapes, n_microbatches, n_microbatches // 4, order)
    _, calls = pipeline_step(case.analysis.program, pipeline, case.batch(0), 0)
    for rank, found in enumerate(calls):
        assert recorded_rows(found) == predicted_rows(rank_collectives(pipeline, rank)), rank
    firsts = [calls[mesh.first_rank] for mesh in pipeline.meshes]
    total = predicted_rows(collectives_of(pipeline))
    assert total == sum(map(recorded_rows, firsts), Counter())


@pytest.mark.parametrize(
    ("wanted", "model", "shapes"),
    [(lambda p: bool(p.ties), "gpt2", ((2, 1), (1, 2), (1, 1))), (skips, "llama", ((1, 1),) * 4)],
    ids=["ties", "skips"],
)
def test_ties_and_skips_are_recorded_too(wanted: Wanted, model: str, shapes: Shapes) -> None:
    case, pipeline = model_case(model), first_with(wanted, model, shapes)
    _, calls = pipeline_step(case.analysis.program, pipeline, case.batch(0), 0)
    for rank, found in enumerate(calls):
        assert recorded_rows(found) == predicted_rows(rank_collectives(pipeline, rank))


def test_rows_of_a_pipeline_are_named() -> None:
    pipeline = first_with(lambda p: bool(p.ties), "gpt2", ((1, 2), (1, 2)))
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


def test_ranks_that_send_send_equal_bytes() -> None:
    """From 2 ranks to 3: pieces differ in size, but every sender sends equally many bytes."""
    for seed in range(10):
        pipeline = drawn("llama", ((1, 2), (1, 3)), 1, seed)
        for pieces in (Messages(pipeline).of(a) for a in pipeline.schedule if a.is_send):
            by_tensor: dict[str, Counter[int]] = {}
            for piece in pieces:
                sent = by_tensor.setdefault(piece.tensor, Counter())
                sent[piece.source_rank] += piece.size_bytes
            for sent in by_tensor.values():
                assert len(set(sent.values())) == 1
                assert min(sent) in {mesh.first_rank for mesh in pipeline.meshes}


def test_a_message_takes_as_long_as_its_slowest_rank() -> None:
    between = link_between(Mesh((2, 2)), (SLOW, FAST))
    pieces = [Piece(0, 1, 1000, "x"), Piece(0, 2, 1000, "x"), Piece(3, 2, 1000, "x")]
    fast_s, slow_s = 1e-6 + 1e-6, 1e-4 + 1e-4
    assert transfer_s(pieces[:1], between) == pytest.approx(fast_s)
    # First rank 0 sends both pieces one by one, then rank 2 receives both one by one.
    assert transfer_s(pieces[:2], between) == pytest.approx(fast_s + slow_s)
    assert transfer_s(pieces[1:], between) == pytest.approx(slow_s + fast_s)
    assert transfer_s([], between) == 0.0


def test_a_pipeline_of_two_by_hand() -> None:
    """With one microbatch nothing overlaps, so a step is the sum of its parts."""
    pipeline = drawn("mlp", ((1, 1), (1, 1)), 1, 0)
    costs = costs_of(pipeline)
    found = predict(pipeline, costs, "sgd", lambda a, b: FAST, n_samples=16)
    stages = [stage_times(p, c, "sgd") for p, c in zip(pipeline.stages, costs, strict=True)]
    messages = Messages(pipeline)
    sent = [transfer_s(messages.of(a), lambda a, b: FAST) for a in pipeline.schedule if a.is_send]
    assert len(sent) == 2
    assert sent[0] == pytest.approx(
        sum(FAST.latency_s + c.sent.local.size_bytes * FAST.s_per_byte for c in pipeline.crossings)
    )
    loss_s = collective_time_s("all_reduce", 8, flat_group(2, FAST))
    busy_s = [s.forward.total_s + s.of("backward").total_s for s in stages]
    update_s = max(s.update_s for s in stages)
    assert found.step_time_s == pytest.approx(sum(busy_s) + sum(sent) + loss_s + update_s)
    assert found.compute_time_s == pytest.approx(max(busy_s))
    assert found.exposed_comm_s == pytest.approx(sent[0] + loss_s)
    assert found.samples_per_s == pytest.approx(16 / found.step_time_s)
    flops = sum(getattr(line, "model_flops", 0) for p in pipeline.stages for line in p.body)
    assert found.mfu == pytest.approx(flops / (2 * found.step_time_s))
    assert found.bubble == pytest.approx(
        1 - (sum(busy_s) + 2 * loss_s + sum(sent) + sum(s.update_s for s in stages))
        / (2 * found.step_time_s)
    )  # fmt: skip


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_slower_links_never_make_a_faster_step(shapes: Shapes) -> None:
    pipeline = first_with(lambda p: bool(p.ties), "gpt2", shapes)
    costs = costs_of(pipeline)
    fast, slow = (
        predict(pipeline, costs, "adamw", lambda a, b, k=k: k)  # type: ignore[misc]
        for k in (FAST, Link(1e2, 1e0))
    )
    assert fast.step_time_s < slow.step_time_s
    assert fast.compute_time_s <= fast.step_time_s
    assert 0 <= slow.bubble < 1
    assert slow.peak_bytes == max(slow.peak_bytes_per_stage)
    assert len(slow.peak_bytes_per_stage) == len(shapes)


def test_the_timeline_runs_the_actions_of_the_schedule() -> None:
    pipeline = drawn("gpt2", ((1, 2), (1, 1)), 4, 1)
    timeline = timeline_of(pipeline, costs_of(pipeline), "adamw", lambda a, b: FAST)
    schedule = pipeline.schedule
    done = Counter(e.action for e in timeline.events if e.action[0].isdigit())
    assert done == Counter(str(a) for a in schedule if a.is_compute or a.is_send)
    for k, actions in enumerate(schedule.stages):
        own = [e for e in timeline.events if e.device == k and not e.is_message]
        own.sort(key=lambda e: e.start_s)
        computes = [str(a) for a in actions if a.is_compute]
        assert [e.action for e in own if e.action in computes] == computes
    started = {e.action: e.start_s for e in timeline.events}
    ended = {e.action: e.end_s for e in timeline.events}
    for action in schedule:
        if action.kind == "recv_forward":
            forward = Action("forward", action.stage, action.microbatch)
            assert ended[str(action.partner)] <= started[str(forward)] + 1e-9
