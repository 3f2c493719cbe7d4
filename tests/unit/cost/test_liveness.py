"""Predicted peak memory against live tensors of real steps, within a few percent."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from functools import lru_cache

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

import autopar
from autopar import Manual
from autopar.cost.laws import CostModel
from autopar.cost.memory import peak_memory
from autopar.cost.price import peak_of_stage
from autopar.measured import LiveBytes
from autopar.mesh import Device, Link, LogicalMesh
from autopar.passes.analysis import Analysis, cut
from autopar.passes.intra import Constraints, PlacementRequest, choose
from autopar.passes.lowering import lower
from autopar.program.lines import Pipeline, Strategy
from autopar.runtime.launch import WorkerPool
from autopar.schedule import ORDERS, devices_of
from tests.helpers.captures import captured
from tests.helpers.harness import (
    abstract_cost,
    free_problem,
    generated_code,
    model_case,
    random_strategy,
    zero_strategy_of,
)
from tests.helpers.nightly import nightly
from tests.helpers.ranks import Rank, named_inputs, random_parameters, run_ranks
from tests.helpers.whole_steps import WholeStep, bytes_of_each, step_bytes

__all__ = ["generated_code"]

CLOSE = 0.05
Pool = Callable[[int], WorkerPool]


@lru_cache
def small_gpt2(n_layer: int = 2) -> Analysis:
    """16 x 32 tokens, in float32."""
    config = GPT2Config(
        n_layer=n_layer, n_embd=64, n_head=4, vocab_size=256, n_positions=32, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    ids = torch.zeros((16, 32), dtype=torch.int64)
    return Analysis.of(captured(GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids}))


def laid_out(n_microbatches: int, n_ranks: int, how: str) -> tuple[CostModel, Strategy]:
    """`how` is "plain" (the planner's choice), "tensor", or "zero1" to "zero3"."""
    analysis = small_gpt2()
    # A slow device makes tensor parallelism pay.
    device = Device(1e8 if how == "tensor" else 1e12, 1e11, 1e10, 1e-6)
    mesh = LogicalMesh((n_ranks,), ("tp",), (Link(1e-6, 1e-9),), device)
    cost = CostModel(mesh, torch.float32)
    if how.startswith("zero"):
        return cost, zero_strategy_of(analysis, cost, int(how[-1]), n_microbatches)
    forbid = frozenset({"data", "sequence"} if how == "tensor" else ())
    chosen = choose(
        analysis, PlacementRequest(cost, n_microbatches, Constraints(forbid)), "adamw", None
    )
    return cost, chosen.strategy


def batch() -> dict[str, Tensor]:
    ids = torch.randint(0, 256, (16, 32), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


def whole_step(pipeline: Pipeline) -> WholeStep:
    return WholeStep.of(small_gpt2().program, pipeline, batch())


def one_stage(n_microbatches: int, n_ranks: int, how: str) -> Pipeline:
    cost, strategy = laid_out(n_microbatches, n_ranks, how)
    return Pipeline.single(lower(small_gpt2(), strategy, cost), cost.mesh)


def predicted_bytes(pipeline: Pipeline) -> float:
    return peak_memory(pipeline.stages[0], "adamw").peak_bytes


@pytest.mark.parametrize("n_microbatches", [1, 4])
def test_peak_memory_of_one_rank(n_microbatches: int) -> None:
    pipeline = one_stage(n_microbatches, 1, "plain")
    measured, between_bytes = whole_step(pipeline).bytes()
    assert measured > 2 * between_bytes, "activations must matter"
    assert predicted_bytes(pipeline) == pytest.approx(measured, rel=CLOSE)


CASES = [("plain", 4), ("tensor", 1), ("zero1", 1), ("zero2", 4), ("zero3", 4)]


def thread_bytes(pipeline: Pipeline, n_layer: int = 2) -> list[float]:
    """Peaks of thread ranks. What a collective makes counts for the rank that comes last."""
    program = small_gpt2(n_layer).program
    inputs, parameters = named_inputs(program, batch()), random_parameters(program, 0)

    def work(rank: Rank) -> float:
        return step_bytes(rank.executor, inputs)[0]

    return run_ranks(program, pipeline, parameters, work)


@pytest.mark.parametrize(("how", "n_microbatches"), CASES)
def test_peak_memory_of_two_ranks(how: str, n_microbatches: int) -> None:
    pipeline = one_stage(n_microbatches, 2, how)
    assert predicted_bytes(pipeline) == pytest.approx(max(thread_bytes(pipeline)), rel=CLOSE)


# Devices of a rank each, stages of each device, microbatches, order.
STAGED: list[tuple[int, int, int, str]] = [
    (2, 1, 1, "1f1b"),
    (2, 1, 8, "1f1b"),
    (2, 1, 4, "gpipe"),
    (2, 1, 8, "zero-bubble"),
    (2, 2, 8, "interleaved"),
    (2, 2, 8, "zero-bubble-v"),
    (2, 2, 8, "dualpipe-v"),
]
FOUR = (4, 1, 8, "1f1b")


def staged_pipeline(
    n_devices: int, n_chunks: int, n_microbatches: int, order: str, n_layer: int = 2
) -> Pipeline:
    """Equal numbers of operators per stage, placed by the planner."""
    analysis, devices = small_gpt2(n_layer), devices_of(order, n_devices, n_chunks)
    n, links = len(list(analysis.program.operators)), (Link(1e-6, 1e-9),)
    parts = cut(analysis.program, [n * (k + 1) // len(devices) for k in range(len(devices))])
    device = Device(1e12, 1e11, 1e10, 1e-6)
    meshes = [LogicalMesh((1,), ("tp",), links, device, first_rank) for first_rank in devices]
    stages = []
    for program, mesh in zip(parts, meshes, strict=True):
        part, cost = analysis.part(program), CostModel(mesh, torch.float32)
        chosen = choose(part, PlacementRequest(cost, n_microbatches, Constraints()), "adamw", None)
        stages.append(lower(part, chosen.strategy, cost))
    return Pipeline.of(stages, meshes, ORDERS[order])


@pytest.mark.parametrize("case", STAGED)
def test_peak_memory_of_two_devices(case: tuple[int, int, int, str]) -> None:
    pipeline = staged_pipeline(*case)
    predicted = [peak_of_stage(pipeline, k, "adamw") for k in range(2)]
    assert predicted == pytest.approx(thread_bytes(pipeline), rel=CLOSE)


@nightly
@pytest.mark.parametrize("case", STAGED)
def test_peak_memory_of_whole_blocks(case: tuple[int, int, int, str]) -> None:
    """Stages of two blocks or four: what is sent counts less than in stages of half a block."""
    pipeline = staged_pipeline(*case, n_layer=8)
    predicted = [peak_of_stage(pipeline, k, "adamw") for k in range(2)]
    assert predicted == pytest.approx(thread_bytes(pipeline, n_layer=8), rel=0.03)


@nightly
def test_peak_memory_of_four_stages(workers: Pool) -> None:
    """With microbatches in flight, received tensors, and gradients that are being sent."""
    pipeline = staged_pipeline(*FOUR)
    for k, ((measured, _),) in enumerate(workers(4).run(bytes_of_each, [whole_step(pipeline)])):
        assert peak_of_stage(pipeline, k, "adamw") == pytest.approx(measured, rel=CLOSE)


def test_earlier_stages_hold_more_microbatches() -> None:
    n_microbatches = 8
    program = staged_pipeline(2, 1, n_microbatches, "1f1b").stages[0]
    peaks = [peak_memory(program, "adamw", n).peak_bytes for n in (1, 2, 3, 4)]
    steps = [b - a for a, b in itertools.pairwise(peaks)]
    assert steps == pytest.approx([steps[0]] * 3)
    assert steps[0] > 0
    # No more microbatches are in flight than there are.
    assert peak_memory(program, "adamw", 99) == peak_memory(program, "adamw", n_microbatches)


class Shared(nn.Module):
    """The gradient of a sum is that of both terms, and one of them gets another one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(512)), nn.Parameter(torch.ones(512))

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.a.expand(64, 512), x * self.b
        read = (first * x).sum()
        return read + ((first + second) * x).sum()


def test_a_gradient_of_two_tensors_is_not_added_in_place() -> None:
    x = torch.ones(64, 512)
    plan = autopar.plan(Shared(), (1, 1), {"x": x}, manual=Manual())
    assert plan.bound is not None
    step = WholeStep.of(plan.bound.analysis.program, plan.bound.pipeline, {"x": x})
    assert peak_of_stage(plan.bound.pipeline, 0, "adamw") == pytest.approx(
        step.bytes()[0], rel=CLOSE
    )


@pytest.mark.parametrize("model", ["mlp", "gpt2"])
def test_memory_of_any_program_is_bounded_by_what_it_must_hold(model: str) -> None:
    """The peak is at least the persistent state and the gradients; its parts add up to it."""
    analysis, cost = model_case(model).analysis, abstract_cost((2, 2))
    for seed in range(4):
        n_microbatches = 1 + seed % 2
        problem = free_problem(model, (2, 2), n_microbatches)
        strategy = random_strategy(analysis, problem, n_microbatches, random.Random(seed))
        program = lower(analysis, strategy, cost)
        found = peak_memory(program, "adamw")
        stored_bytes = sum(p.stored.size_bytes for p in program.parameters)
        assert sum(found.parts.values()) == pytest.approx(found.peak_bytes)
        assert found.parts["parameters"] == stored_bytes
        assert found.peak_bytes >= 5 * stored_bytes  # two moments, a gradient, the update
        assert found.at


def test_live_bytes_counts_storages_once_and_until_they_are_gone() -> None:
    x = torch.zeros(1000, requires_grad=True)
    with LiveBytes([x, x.detach()]) as live:
        assert live.live_bytes == 4000
        y = (x * 2).exp()
        view = y.view(10, 100)
        assert live.live_bytes == 4000 + 4000
        del y
        assert live.live_bytes == 8000
        assert (live.peak_bytes, live.peak_at) == (12000, "aten.exp.default")
        view.sum().backward()
        del view
        assert live.live_bytes == 8000, "the gradient stays"
        live.reset_peak()
        assert live.peak_bytes == 8000
    x.grad = None
    assert live.live_bytes == 4000
