"""The hand-written pipeline of GPT-2 is right: only then is it a baseline."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from autopar.capture import capture, reference_step
from autopar.runtime.launch import WorkerPool
from examples.compare import Size
from examples.compare_pipeline import AUTOPAR, TORCH, disagreements, stages
from examples.pipeline_gpt2 import N_STAGES, PipelineGPT2, ScheduleName
from tests.helpers.jobs import BATCH, HEADS, N_STEPS, SEQUENCE, advance, gpt2, gradient, tokens
from tests.helpers.nightly import one_in, sampled

TOLERANCE = 1e-10
LEARNING_RATE = 0.1


class Trained(NamedTuple):
    """Losses of all steps, and the gradients of the first by parameter."""

    losses: list[float]
    gradients: dict[str, Tensor]


def weights() -> dict[str, Tensor]:
    """Parameters of GPT-2 with an untied head, in float64."""
    torch.manual_seed(0)
    model = gpt2(tie_word_embeddings=False).double()
    return {name: p.detach() for name, p in model.named_parameters()}


@lru_cache(maxsize=1)
def one_process() -> Trained:
    program = capture(gpt2(tie_word_embeddings=False), tokens(0), precision="fp64")
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
    """This rank's losses (none on the first stage), and the largest error of its gradients."""
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


@one_in(2)
@pytest.mark.parametrize(
    ("n_microbatches", "schedule", "n_tensor"),
    sampled(
        [(m, schedule, n) for m in (4, 16) for schedule in ("gpipe", "1f1b") for n in (1, 2)],
        [(4, "gpipe", 1), (4, "1f1b", 2)],
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
    found = workers(N_STAGES * n_tensor).run(
        in_a_pipeline, n_microbatches, schedule, n_tensor, alone.gradients
    )
    for rank, (losses, worst) in enumerate(found):
        assert worst <= TOLERANCE * max(1.0, scale)
        if rank >= n_tensor:
            assert losses == pytest.approx(alone.losses, rel=0, abs=TOLERANCE)
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
