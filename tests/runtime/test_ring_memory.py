"""Memory of a sequence that ranks share: live bytes of real steps against predictions."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import pytest
import torch
from torch import Tensor

from autopar.capture import capture
from autopar.cost.laws import CostModel
from autopar.cost.price import peak_of_stage
from autopar.passes.analysis import Analysis
from autopar.passes.intra import Constraints, PlacementRequest, choose
from autopar.passes.lowering import PlacedStage, join
from tests.helpers.harness import abstract_cost, generated_code
from tests.helpers.nightly import nightly
from tests.helpers.pools import Pool
from tests.helpers.whole_steps import WholeStep, bytes_of_each
from tests.parity.test_context_parallel import VOCABULARY, gpt2, llama

__all__ = ["generated_code"]

MODELS = {"gpt2": gpt2, "llama": llama}
N_TOKENS = 1024


def batch() -> Mapping[str, Tensor]:
    ids = torch.randint(0, VOCABULARY, (1, N_TOKENS), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


@lru_cache
def analysed(model: str) -> Analysis:
    """Of a model whose heads do not divide."""
    torch.manual_seed(0)
    return Analysis.of(capture(MODELS[model](N_TOKENS), batch()))


def step(model: str, n_ranks: int) -> tuple[WholeStep, float]:
    """A step, and its predicted peak."""
    analysis = analysed(model)
    cost = CostModel(abstract_cost((n_ranks,)).mesh, torch.float32)
    request = PlacementRequest(cost, 1, Constraints())
    strategy = choose(analysis, request, "adamw", None).strategy
    pipeline = join([PlacedStage(analysis, strategy, cost)], "1f1b")
    functions = {getattr(line, "lowered", None) for line in pipeline.stages[0].body}
    assert n_ranks == 1 or "ring_attention" in functions
    return WholeStep.of(analysis.program, pipeline, batch()), peak_of_stage(pipeline, 0, "adamw")


@nightly
def test_peaks_of_two_processes(workers: Pool) -> None:
    steps, expected = zip(*(step(model, 2) for model in MODELS), strict=True)
    for sizes in workers(2).run(bytes_of_each, list(steps)):
        for (measured, _), predicted in zip(sizes, expected, strict=True):
            assert predicted == pytest.approx(measured, rel=0.03)


@nightly
def test_two_ranks_hold_half_of_the_activations(workers: Pool) -> None:
    """Besides parameters, their moments and gradients, half of what one process holds."""
    (alone, _), (shared, _) = step("gpt2", 1), step("gpt2", 2)
    (whole, _), ((half, _), *_) = alone.bytes(), workers(2).run(bytes_of_each, [shared])[0]
    state = 16 * sum(p.numel() for p in gpt2(N_TOKENS).parameters())
    assert half - state <= 0.55 * (whole - state), (whole, half, state)
