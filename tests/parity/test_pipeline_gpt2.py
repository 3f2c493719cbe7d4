"""The hand-written pipeline of GPT-2 is right: only then is it a baseline."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from autopar.capture import capture, reference_step
from autopar.runtime.launch import WorkerPool
from examples.compare import Size
from examples.compare_pipeline import AUTOPAR, TORCH, disagreements, stages
from examples.pipeline_gpt2 import N_PIPELINE, STAGES, PipelineGPT2, ScheduleName
from tests.helpers.jobs import BATCH, HEADS, N_STEPS, SEQUENCE, advance, gpt2, gradient, tokens
from tests.helpers.nightly import one_in, sampled

TOLERANCE = 1e-10
LEARNING_RATE = 0.1


class Trained(NamedTuple):
    """Losses of all steps, and the gradients of the first by parameter."""

    losses: list[float]
    gradients: dict[str, Tensor]


def model() -> nn.Module:
    """A GPT-2 with an untied head; four blocks, one for each stage of ranks with two."""
    torch.manual_seed(0)
    return gpt2(4, tie_word_embeddings=False)


def weights() -> dict[str, Tensor]:
    """Its parameters, in float64."""
    return {name: p.detach() for name, p in model().double().named_parameters()}


@lru_cache(maxsize=1)
def one_process() -> Trained:
    program = capture(model(), tokens(0), precision="fp64")
    values = {name: value.requires_grad_() for name, value in weights().items()}
    optimizer = torch.optim.SGD(values.values(), LEARNING_RATE)
    losses: list[float] = []
    gradients: dict[str, Tensor] = {}
    for step in range(N_STEPS):
        loss, _ = reference_step(program, values, tokens(step))
        assert loss is not None
        loss.backward()
        losses.append(loss.item())
        gradients = gradients or {name: gradient(p).clone() for name, p in values.items()}
        advance(optimizer)
    return Trained(losses, gradients)


def in_a_pipeline(
    n_microbatches: int, schedule: ScheduleName, n_tensor: int, gradients: dict[str, Tensor]
) -> tuple[list[float], float]:
    """This rank's losses (none without the last stage), and the largest error of its gradients."""
    sizes = (HEADS, BATCH, SEQUENCE, n_microbatches, schedule, n_tensor)
    pipeline, expected = PipelineGPT2(weights(), *sizes), PipelineGPT2(gradients, *sizes)
    optimizer = torch.optim.SGD(pipeline.module.parameters(), LEARNING_RATE)
    losses, worst = [], 0.0
    for step in range(N_STEPS):
        loss = pipeline.step(**tokens(step))
        if loss is not None:
            losses.append(loss.item())
        if step == 0:
            # Gradients are cut as weights are, so `expected` holds this rank's part of them.
            pairs = zip(pipeline.module.parameters(), expected.module.parameters(), strict=True)
            worst = max((gradient(p) - q).abs().max().item() for p, q in pairs)
        advance(optimizer)
    return losses, worst


@one_in(3)
@pytest.mark.parametrize(
    ("n_microbatches", "schedule", "n_tensor"),
    sampled(
        [(m, schedule, n) for m in (4, 16) for schedule in STAGES for n in (1, 2)],
        [(4, "1f1b", 2), (4, "zero-bubble-v", 1), (4, "interleaved", 1)],
    ),
)
def test_parity_with_one_process(
    n_microbatches: int,
    schedule: ScheduleName,
    n_tensor: int,
    workers: Callable[[int], WorkerPool],
) -> None:
    alone = one_process()
    scale = max(g.abs().max().item() for g in alone.gradients.values())
    found = workers(N_PIPELINE * n_tensor).run(
        in_a_pipeline, n_microbatches, schedule, n_tensor, alone.gradients
    )
    for rank, (losses, worst) in enumerate(found):
        assert worst <= TOLERANCE * max(1.0, scale)
        own = STAGES[schedule][rank // n_tensor]
        expected = alone.losses if max(map(max, STAGES[schedule])) in own else []
        assert losses == pytest.approx(expected, rel=0, abs=TOLERANCE)
    assert len(set(alone.losses)) == N_STEPS


def test_every_parameter_is_in_one_stage() -> None:
    size = Size(n_layers=3, width=8, n_heads=2, vocabulary=8, n_positions=4, tied=False)
    (first, _), (second, _) = stages(size)
    for name, _ in size.model().named_parameters():
        assert sum(name.startswith(f"{module}.") for module in (*first, *second)) == 1


def test_disagreements_are_noticed() -> None:
    assert disagreements({AUTOPAR: [1.0, 2.0], TORCH: [1.0, 2.0]}, 2) == []
    for losses in ([1.0, 2.0 + 1e-9], [1.0, float("nan")], [1.0]):
        assert len(disagreements({AUTOPAR: losses, TORCH: [1.0, 2.0]}, 2)) == 1
