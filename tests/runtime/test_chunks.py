"""Every schedule on thread ranks: several stages on one rank, backward in two actions.

Steps beside one process, gradients of all schedules beside 1F1B's bit by bit.
"""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from autopar.passes.analysis import Analysis
from autopar.program.lines import Pipeline
from autopar.schedule import ORDERS
from autopar.verifier import verify_pipeline
from tests.helpers.harness import generated_code
from tests.helpers.models.pipeline_models import SideOutput, Skip, Tied, analysis_of, batch_of
from tests.helpers.pipeline_harness import Layout, Shapes, ends_before, random_pipeline
from tests.helpers.ranks import Rank, named_inputs, random_parameters, run_ranks, wrong_in_step

__all__ = ["generated_code"]

CUTS = {Skip: "b c d", Tied: "b c d", SideOutput: "side b c"}
TWO: tuple[Shapes, ...] = (((1, 1), (1, 1)), ((1, 2), (2, 1)))
CHUNKED = ("interleaved", "zero-bubble-v", "dualpipe-v")


def lay_out(model: type[nn.Module], layout: Layout, seed: int) -> tuple[Analysis, Pipeline]:
    """`model` as four stages, with a random assignment."""
    analysis = analysis_of(model)
    ends = ends_before(analysis.program, *CUTS[model].split())
    assert len(ends) == layout.n_stages
    return analysis, random_pipeline(analysis, ends, layout, random.Random(seed))


@pytest.mark.parametrize("shapes", TWO)
@pytest.mark.parametrize("order", CHUNKED)
@pytest.mark.parametrize("model", CUTS)
def test_two_stages_a_rank(model: type[nn.Module], order: str, shapes: Shapes) -> None:
    for seed in range(2):
        analysis, pipeline = lay_out(model, Layout(shapes, 4, order, 2), seed)
        verify_pipeline(pipeline)
        assert wrong_in_step(analysis.program, pipeline, batch_of(model, seed), seed) == {}


@pytest.mark.parametrize("model", CUTS)
def test_zero_bubble(model: type[nn.Module]) -> None:
    shapes = ((1, 1), (1, 1), (1, 2), (1, 1))
    analysis, pipeline = lay_out(model, Layout(shapes, 4, "zero-bubble"), 0)
    verify_pipeline(pipeline)
    assert wrong_in_step(analysis.program, pipeline, batch_of(model, 0), 0) == {}


WAYS = (
    Layout(((1, 1),) * 4, 8, "1f1b"),
    Layout(((1, 1),) * 4, 8, "gpipe"),
    Layout(((1, 1),) * 4, 8, "zero-bubble"),
    Layout(((1, 1),) * 2, 8, "interleaved", 2),
    Layout(((1, 1),) * 2, 8, "zero-bubble-v", 2),
    Layout(((1, 1),) * 2, 8, "dualpipe-v", 2),
)


@pytest.mark.parametrize("model", CUTS)
def test_all_schedules_give_the_same_bits(model: type[nn.Module]) -> None:
    """Gradients add up by microbatch, of several readers and of tied weights by stage."""
    assert {layout.order for layout in WAYS} == ORDERS.keys()
    found = []
    for layout in WAYS:
        analysis, pipeline = lay_out(model, layout, 0)
        program, batch = analysis.program, batch_of(model, 0)

        def gradients(rank: Rank, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
            rank.executor.step(rank.stored, inputs)
            return {n: p.grad for n, p in rank.stored.items() if p.grad is not None}

        inputs = named_inputs(program, batch)
        parameters = random_parameters(program, 0)
        of_ranks = run_ranks(program, pipeline, parameters, partial(gradients, inputs=inputs))
        found.append({name: grad for own in of_ranks for name, grad in own.items()})
    first, *others = found
    for layout, other in zip(WAYS[1:], others, strict=True):
        assert first.keys() == other.keys()
        wrong = [name for name in first if not torch.equal(first[name], other[name])]
        assert not wrong, layout.order
