"""Prices of a step by hand: stages and pipelines, buckets, messages, ZeRO."""

from __future__ import annotations

import math
import random
from functools import lru_cache

import pytest
import torch

from autopar.cost.hardware import flat_group
from autopar.cost.laws import CostModel, collective_time_s
from autopar.cost.memory import peak_memory
from autopar.cost.price import collectives_of, link_between, predict, stage_times
from autopar.cost.price.prediction import transfer_s
from autopar.errors import NotSupportedError
from autopar.mesh import Link, Mesh
from autopar.passes.intra import Constraints, PlacementRequest, choose
from autopar.passes.lowering import lower
from autopar.plans import Predicted
from autopar.program.communication import BUCKET_BYTES, Messages, Piece, buckets, primitive_bytes
from autopar.program.lines import Pipeline, StageProgram, Strategy
from tests.helpers.harness import abstract_cost, model_case, zero_strategy_of
from tests.helpers.pipeline_harness import Layout, random_ends, random_pipeline

FAST, SLOW = Link(1e-6, 1e-9), Link(1e-4, 1e-7)


@lru_cache
def zero_strategy(model: str, stage: int, n_microbatches: int) -> Strategy:
    """Data parallelism on two ranks, with ZeRO `stage` where a parameter can be sharded."""
    analysis, cost = model_case(model).analysis, abstract_cost((2,))
    return zero_strategy_of(analysis, cost, stage, n_microbatches)


def one_stage(program: StageProgram, cost: CostModel, optimizer: str) -> Predicted:
    return predict(Pipeline.single(program, cost.mesh), [cost], optimizer)


def test_an_optimizer_with_collectives_of_its_own_is_refused() -> None:
    program = lower(model_case("mlp").analysis, zero_strategy("mlp", 0, 1), abstract_cost((2,)))
    with pytest.raises(NotSupportedError, match="adafactor"):
        collectives_of(Pipeline.single(program, abstract_cost((2,)).mesh), "adafactor")


def test_buckets_keep_order_keys_apart_and_the_bound() -> None:
    steps = [[("a", 4)], [("b", 1)], [("a", 5)], [("a", 3)], [], [("a", 99)], [("a", 1)]]
    found = [(b.key, b.members, b.size_bytes) for b in buckets(steps, 9)]
    assert found == [
        ("a", (0, 2), 9), ("a", (3,), 3), ("a", (5,), 99), ("a", (6,), 1), ("b", (1,), 1)
    ]  # fmt: skip


def test_later_steps_wait_for_the_next_round() -> None:
    steps = [[("a", 1), ("b", 2)], [("b", 3)]]
    assert [(b.key, b.members) for b in buckets(steps, 99)] == [
        ("a", (0,)), ("b", (1,)), ("b", (0,))
    ]  # fmt: skip


def test_sizes_of_primitives() -> None:
    assert primitive_bytes("all_gather", 8, 4) == (32, 32)
    assert primitive_bytes("reduce_scatter", 8, 4) == (8, 2)
    assert primitive_bytes("all_to_all", 8, 4) == (8, 8)
    assert primitive_bytes("zero_pad", 8, 4) == (8, 32)


def test_a_step_is_compute_then_collectives_then_the_update() -> None:
    """Plain data parallelism of the MLP, by hand: unit links and 1 FLOP/s."""
    case, cost = model_case("mlp"), abstract_cost((2,))
    program = lower(case.analysis, zero_strategy("mlp", 0, 1), cost)
    pipeline = Pipeline.single(program, cost.mesh)
    found = predict(pipeline, [cost], "sgd", n_samples=16, n_tokens=64)
    gradient_bytes = 8 * sum(math.prod(p.shape) for p in program.parameters)
    sync_s = cost.primitive_time_s("all_reduce", gradient_bytes, (0,))
    loss_s = cost.primitive_time_s("all_reduce", 8, (0,))
    assert gradient_bytes < BUCKET_BYTES
    assert found.comm_time_s == pytest.approx(sync_s + loss_s)
    # 3 layers of 2 * rows * 16 * 16 FLOPs; the input of the first one has no gradient.
    rows = case.batch(0)["x"].shape[0]
    flops = (3 + 3 + 2) * 2 * rows * 16 * 16
    assert found.compute_time_s == pytest.approx(flops / 2, rel=1e-6)
    assert found.step_time_s == pytest.approx(
        found.compute_time_s + found.comm_time_s + found.optimizer_time_s
    )
    assert found.exposed_comm_s == found.comm_time_s
    assert found.bubble == 0.0
    assert found.samples_per_s == pytest.approx(16 / found.step_time_s)
    assert found.tokens_per_s == pytest.approx(64 / found.step_time_s)
    assert found.mfu == pytest.approx(flops / (2 * found.step_time_s))
    halved = predict(pipeline, [cost], "sgd", peak_flops_per_s=2.0)
    assert halved.mfu == pytest.approx(found.mfu / 2)
    assert halved.samples_per_s is None


def test_replicated_work_does_not_count_as_model_flops() -> None:
    case, cost = model_case("mlp"), abstract_cost((2,))
    everywhere = Constraints(frozenset({"data", "tensor", "sequence", "zero1", "zero2", "zero3"}))
    replicated = choose(case.analysis, PlacementRequest(cost, 1, everywhere), "sgd", None).strategy
    twice = one_stage(lower(case.analysis, replicated, cost), cost, "sgd")
    shared = one_stage(lower(case.analysis, zero_strategy("mlp", 0, 1), cost), cost, "sgd")
    assert twice.compute_time_s == pytest.approx(2 * shared.compute_time_s, rel=1e-6)
    assert twice.mfu <= 0.5 + 1e-9


def test_more_zero_is_less_memory_and_more_communication() -> None:
    case, cost = model_case("gpt2"), abstract_cost((2,))
    programs = [lower(case.analysis, zero_strategy("gpt2", s, 4), cost) for s in range(4)]
    comm_s = [one_stage(p, cost, "adamw").comm_time_s for p in programs]
    # all_reduce = reduce_scatter + all_gather: ZeRO-1 adds no communication.
    assert comm_s[0] == pytest.approx(comm_s[1])
    assert comm_s[1] < comm_s[2] < comm_s[3]
    plain, *zeros = (peak_memory(p, "adamw") for p in programs)
    for zero in zeros:
        assert zero.parts["optimizer"] == plain.parts["optimizer"] / 2
        assert zero.parts["parameters"] == plain.parts["parameters"] / 2
    assert zeros[-1].peak_bytes < plain.peak_bytes
    assert "converted" not in zeros[-1].parts


def test_a_message_takes_as_long_as_its_slowest_rank() -> None:
    between = link_between(Mesh((2, 2)), (SLOW, FAST))
    pieces = [Piece(0, 1, 1000, "x"), Piece(0, 2, 1000, "x"), Piece(3, 2, 1000, "x")]
    fast_s, slow_s = 1e-6 + 1e-6, 1e-4 + 1e-4
    assert transfer_s(pieces[:1], between) == pytest.approx(fast_s)
    # First rank 0 sends both pieces one by one, then rank 2 receives both one by one.
    assert transfer_s(pieces[:2], between) == pytest.approx(fast_s + slow_s)
    assert transfer_s(pieces[1:], between) == pytest.approx(slow_s + fast_s)
    assert transfer_s([], between) == 0.0


def random_stages(model: str, shapes: tuple[tuple[int, int], ...], seed: int) -> Pipeline:
    """One microbatch; cut and placed at random."""
    analysis, rng = model_case(model).analysis, random.Random(seed)
    ends = random_ends(analysis.program, len(shapes), rng)
    return random_pipeline(analysis, ends, Layout(shapes, 1), rng)


def costs_of(pipeline: Pipeline) -> list[CostModel]:
    return [CostModel(mesh, torch.float64) for mesh in pipeline.meshes]


def test_a_pipeline_of_two_by_hand() -> None:
    """With one microbatch nothing overlaps, so a step is the sum of its parts."""
    pipeline = random_stages("mlp", ((1, 1), (1, 1)), 0)
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
    busy_s = [s.forward.duration().time_s + s.of("backward").duration().time_s for s in stages]
    update_s = max(s.update_s for s in stages)
    assert found.step_time_s == pytest.approx(sum(busy_s) + sum(sent) + loss_s + update_s)
    assert found.compute_time_s == pytest.approx(max(busy_s))
    assert found.peak_bytes == max(found.peak_bytes_per_stage)
    assert len(found.peak_bytes_per_stage) == 2
    assert found.exposed_comm_s == pytest.approx(sent[0] + loss_s)
    assert found.samples_per_s == pytest.approx(16 / found.step_time_s)
    flops = sum(getattr(line, "model_flops", 0) for p in pipeline.stages for line in p.body)
    assert found.mfu == pytest.approx(flops / (2 * found.step_time_s))
    assert found.bubble == pytest.approx(
        1 - (sum(busy_s) + 2 * loss_s + sum(sent) + sum(s.update_s for s in stages))
        / (2 * found.step_time_s)
    )  # fmt: skip
