"""Pipelines beyond a plain chain of stages: each feature on a model made for it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.capture.reference import reference_step
from autopar.passes.analysis import Analysis
from autopar.placement import TensorType, gather
from autopar.program.communication import message_edges
from autopar.program.graph import Program
from autopar.program.lines import Pipeline
from autopar.runtime.collectives import Messenger, Posted, Send
from tests.helpers.harness import generated_code
from tests.helpers.models.pipeline_models import (
    Frozen,
    SideOutput,
    Skip,
    Tied,
    analysis_of,
    batch_of,
)
from tests.helpers.pipeline_harness import Layout, Shapes, ends_before, random_ends, random_pipeline
from tests.helpers.ranks import (
    TOLERANCE,
    Batch,
    Rank,
    above,
    compare_with,
    gradient_of,
    named_inputs,
    random_parameters,
    relative_error,
    run_ranks,
    wrong_in_step,
)

__all__ = ["generated_code"]

ORDERS = ("gpipe", "1f1b")
FOUR: tuple[Shapes, ...] = (((1, 1),) * 4, ((1, 2), (1, 1), (2, 1), (1, 1)))
MakeOptimizer = Callable[[Iterable[Tensor]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, 0.01),
}


def made(
    model: type[nn.Module], modules: str, layout: Layout, seed: int = 0
) -> tuple[Analysis, Pipeline]:
    """`model` cut before `modules`, with a random assignment."""
    analysis = analysis_of(model)
    ends = ends_before(analysis.program, *modules.split())
    return analysis, random_pipeline(analysis, ends, layout, random.Random(seed))


def crossings_of(pipeline: Pipeline, value: str) -> list[tuple[int, int]]:
    return [(c.source, c.target) for c in pipeline.crossings if c.value == value]


@pytest.mark.parametrize("model", [Skip, Tied])
def test_messages_go_along_the_edges_of_the_pipeline(
    model: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On GPUs each edge has a communicator, made before the first step."""
    analysis, pipeline = made(model, "b c d", Layout(FOUR[1], 4), 0)
    sent: set[tuple[int, int]] = set()
    post = Messenger.post

    def watched(self: Messenger, sends: Sequence[Send], receives: Any, *phase: str) -> Posted:
        sent.update((self.rank, peer) for x, peer in sends)
        return post(self, sends, receives, *phase)

    monkeypatch.setattr(Messenger, "post", watched)
    assert wrong_in_step(analysis.program, pipeline, batch_of(model, 0), 0) == {}
    assert tuple(sorted(sent)) == message_edges(pipeline)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("shapes", FOUR)
def test_skips_of_every_dtype(shapes: Shapes, order: str) -> None:
    """Values skip from the first stage to later ones; gradients of all readers add up."""
    for seed in range(2):
        analysis, pipeline = made(Skip, "b c d", Layout(shapes, 4, order), seed)
        assert crossings_of(pipeline, "tanh") == [(0, 1), (0, 3)]
        from_first = {
            c.value: (c.sent.local.dtype, c.has_grad)
            for c in pipeline.crossings
            if (c.source, c.target) == (0, 3)
        }
        assert from_first == {
            "tanh": (torch.float64, True),
            "gt": (torch.bool, False),
            "remainder": (torch.int64, False),
            "exp": (torch.float64, False),
        }
        assert wrong_in_step(analysis.program, pipeline, batch_of(Skip, seed), seed) == {}


def test_every_reader_adds_to_the_gradient() -> None:
    """Stages 1, 2 and 3 read one tensor of stage 0."""
    analysis = analysis_of(Skip)
    ends = [*ends_before(analysis.program, "b")[:1], 11, 15, len(list(analysis.program.operators))]
    pipeline = random_pipeline(analysis, ends, Layout(FOUR[1], 2), random.Random(1))
    assert crossings_of(pipeline, "tanh") == [(0, 1), (0, 2), (0, 3)]
    assert wrong_in_step(analysis.program, pipeline, batch_of(Skip, 0), 0) == {}


@pytest.mark.parametrize("order", ORDERS)
def test_a_received_value_that_does_not_reach_the_loss(order: str) -> None:
    """The value requires a gradient, so zeros go back."""
    analysis = analysis_of(SideOutput)
    ends = ends_before(analysis.program, "b", "c")
    layout = Layout(((1, 2), (1, 1), (2, 1)), 4, order)
    pipeline = random_pipeline(analysis, ends, layout, random.Random(0), with_outputs=True)
    (extra,) = (c for c in pipeline.crossings if (c.source, c.target) == (0, 2))
    assert extra.has_grad
    assert wrong_in_step(analysis.program, pipeline, batch_of(SideOutput, 0), 0) == {}


@pytest.mark.parametrize("shapes", FOUR)
def test_frozen_parameters_and_a_stage_without_any(shapes: Shapes) -> None:
    analysis, pipeline = made(Frozen, "b act c", Layout(shapes, 2))
    assert [len(stage.parameters) for stage in pipeline.stages] == [2, 2, 0, 2]
    assert [(c.source, c.target, c.has_grad) for c in pipeline.crossings] == [
        (0, 1, False),
        (1, 2, True),
        (2, 3, True),
    ]
    assert wrong_in_step(analysis.program, pipeline, batch_of(Frozen, 0), 0) == {}

    def gradients(rank: Rank) -> set[str]:
        rank.executor.step(rank.stored, named_inputs(analysis.program, batch_of(Frozen, 0)))
        return {name for name, p in rank.stored.items() if p.grad is not None}

    found = run_ranks(analysis.program, pipeline, random_parameters(analysis.program, 0), gradients)
    assert set().union(*found) == {"b.weight", "c.weight", "c.bias"}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("order", ORDERS)
def test_mirrors_stay_bit_equal(order: str, optimizer: str) -> None:
    """Mirrors on three stages with different layouts, through optimizer steps."""
    for seed in range(2):
        analysis, pipeline = made(Tied, "b c d", Layout(FOUR[1], 4, order), seed)
        steps = [batch_of(Tied, k) for k in range(4)]
        wanted, found = trained(analysis.program, pipeline, steps, OPTIMIZERS[optimizer], seed)
        assert above(compare_with(pipeline, found, wanted)) == {}
        (tie,) = pipeline.ties
        assert tie.places == ((0, "a.weight"), (1, "b.weight"), (3, "d.weight"))
        first, *others = (whole(pipeline, found, *place) for place in tie.places)
        assert all(torch.equal(first, other) for other in others)


def trained(
    program: Program,
    pipeline: Pipeline,
    batches: list[dict[str, Tensor]],
    make: MakeOptimizer,
    seed: int,
) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """Parameters after a step on each batch: of one process, and by rank."""
    parameters = random_parameters(program, seed)
    before = {name: p.detach().clone() for name, p in parameters.items()}
    optimizer = make(parameters.values())
    losses = []
    for batch in batches:
        loss, _ = reference_step(program, parameters, batch)
        assert loss is not None
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def work(rank: Rank) -> dict[str, Tensor]:
        mine = make(rank.stored.values())
        for batch, expected in zip(batches, losses, strict=True):
            found = rank.executor.step(rank.stored, named_inputs(program, batch))
            assert found.item() == pytest.approx(expected, rel=0, abs=TOLERANCE)
            mine.step()
            mine.zero_grad()
        return {name: p.detach() for name, p in rank.stored.items()}

    found = run_ranks(program, pipeline, before, work)
    return {name: p.detach() for name, p in parameters.items()}, found


def whole(pipeline: Pipeline, found: list[dict[str, Tensor]], stage: int, name: str) -> Tensor:
    """A parameter of one stage, put together from its ranks."""
    p, mesh = pipeline.parameter(stage, name), pipeline.meshes[stage]
    parts = [found[rank][name] for rank in mesh.ranks]
    value, spread = gather(parts, TensorType(p.dims, 8, True), p.stored.spec, mesh.sizes)
    assert spread == 0.0
    return value


def test_gradients_of_several_steps_add_up() -> None:
    """Without `zero_grad`, a tie sums only the gradient of this step, not of earlier ones."""
    for seed in range(2):
        analysis, pipeline = made(Tied, "b c d", Layout(FOUR[1], 2), seed)
        program, batches = analysis.program, [batch_of(Tied, k) for k in range(3)]
        parameters = random_parameters(program, seed)
        for batch in batches:
            loss, _ = reference_step(program, parameters, batch)
            assert loss is not None
            loss.backward()

        def work(
            rank: Rank, program: Program = program, batches: Sequence[Batch] = batches
        ) -> dict[str, Tensor]:
            for batch in batches:
                rank.executor.step(rank.stored, named_inputs(program, batch))
            return {name: gradient_of(p) for name, p in rank.stored.items()}

        found = run_ranks(program, pipeline, parameters, work)
        expected = {name: gradient_of(p) for name, p in parameters.items()}
        assert above(compare_with(pipeline, found, expected)) == {}


def rows_of(value: Tensor, pipeline: Pipeline, index: int) -> Tensor:
    """The rows of one microbatch: part `index` of every block."""
    n_blocks, m = pipeline.n_blocks, pipeline.n_microbatches
    return value.unflatten(0, (n_blocks, m, -1))[:, index].flatten(0, 1)


@pytest.mark.parametrize("order", ORDERS)
def test_outputs_of_every_microbatch_on_the_last_stage(order: str) -> None:
    analysis = analysis_of(SideOutput)
    program, batch = analysis.program, batch_of(SideOutput, 0)
    ends = ends_before(program, "b", "c")
    layout = Layout(((1, 2), (2, 1), (1, 2)), 4, order)
    pipeline = random_pipeline(analysis, ends, layout, random.Random(2), with_outputs=True)
    parameters = random_parameters(program, 0)
    _, expected = reference_step(program, parameters, batch)

    def work(rank: Rank) -> list[tuple[Tensor, ...]]:
        seen: list[tuple[Tensor, ...]] = []
        rank.executor.step(rank.stored, named_inputs(program, batch), on_outputs=seen.append)
        return seen

    for rank, seen in enumerate(run_ranks(program, pipeline, parameters, work)):
        if 2 not in pipeline.stages_of(rank):
            assert seen == []
            continue
        assert len(seen) == 4
        for k, outputs in enumerate(seen):
            found = program.rebuild(outputs)
            for name in ("z", "extra"):
                wanted = rows_of(expected[name].detach(), pipeline, k)
                assert relative_error(found[name], wanted) <= TOLERANCE


@pytest.mark.parametrize("everywhere", [False, True])
def test_evaluation(everywhere: bool) -> None:
    """The loss everywhere, outputs whole on the last stage or everywhere, no gradients."""
    analysis, batch = analysis_of(SideOutput, training=False), batch_of(SideOutput, 0)
    program = analysis.program
    ends = random_ends(program, 3, random.Random(0))
    layout = Layout(((1, 2), (1, 1), (2, 1)), 1)
    pipeline = random_pipeline(analysis, ends, layout, random.Random(0), with_outputs=True)
    forward = Pipeline.of(pipeline.stages, pipeline.meshes)
    parameters = random_parameters(program, 0)
    loss, expected = reference_step(program, parameters, batch)
    assert loss is not None

    def work(rank: Rank) -> tuple[object, ...]:
        inputs = named_inputs(program, batch)
        found = rank.executor.forward(rank.stored, inputs, everywhere=everywhere)
        assert all(p.grad is None for p in rank.stored.values())
        return found

    tensors = [t for t in torch.utils._pytree.tree_leaves(expected) if isinstance(t, Tensor)]
    for rank, (found, *outputs) in enumerate(run_ranks(program, forward, parameters, work)):
        assert isinstance(found, Tensor)
        assert relative_error(found, loss.detach()) <= TOLERANCE
        if 2 not in pipeline.stages_of(rank) and not everywhere:
            assert outputs == [None] * len(tensors)
            continue
        for mine, wanted in zip(outputs, tensors, strict=True):
            assert isinstance(mine, Tensor)
            assert relative_error(mine, wanted.detach()) <= TOLERANCE
