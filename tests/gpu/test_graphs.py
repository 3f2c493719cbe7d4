"""`compile="regions+graphs"`: training as without, on one GPU and on as many as there are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile

import autopar
from autopar import Manual
from tests.helpers.jobs import gpt2, machine, tokens

# The first step warms up, the second records, the others replay.
N_STEPS = 5
LAYOUTS: dict[str, Callable[[int], Manual]] = {
    "tensor": lambda n: Manual(tp=n),
    "data": lambda n: Manual(dp=n),
    "zero-3": lambda n: Manual(dp=n, zero=3),
    "stages": lambda n: Manual(pp=n),
}


def parallelized(compiling: str, layout: str = "tensor", n: int = 1) -> autopar.ParallelModule:
    """A GPT-2 in float64, two microbatches a step."""
    torch.manual_seed(0)
    manual = LAYOUTS[layout](n) if n > 1 else Manual()
    model = gpt2(n_layers=4, activation_function="gelu_new", resid_pdrop=0.1).double()
    return autopar.parallelize(
        model, machine((1, n)), tokens(0), precision="fp64", manual=manual, microbatches=2,
        compile=compiling,
    )  # fmt: skip


def losses(compiling: str, layout: str = "tensor", n: int = 1) -> list[float]:
    """Losses of steps with AdamW, read after the last one; every second step adds gradients up."""
    pm = parallelized(compiling, layout, n)
    optimizer = torch.optim.AdamW(pm.parameters(), lr=1e-2)
    found = []
    for seed in range(2 * N_STEPS):
        found.append(pm.step(**tokens(seed)))
        if seed % 2:
            optimizer.step()
            optimizer.zero_grad()
    return [loss.item() for loss in found]


@pytest.mark.parametrize("compiling", ["regions", "regions+graphs"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_is_that_without(gpu: torch.device, compiling: str, layout: str) -> None:
    n = 2 if torch.cuda.device_count() >= 2 else 1
    wanted = autopar.launch(losses, n, "none", layout, n)
    for found, expected in zip(
        autopar.launch(losses, n, compiling, layout, n), wanted, strict=True
    ):
        assert found == pytest.approx(expected, abs=1e-10)


def n_launches(pm: autopar.ParallelModule) -> int:
    """Calls of one step that put work on the GPU: kernels, and whole graphs."""
    for seed in range(N_STEPS):
        pm.step(**tokens(seed))
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        pm.step(**tokens(0))
    return sum("Launch" in event.name for event in seen.events())


def test_a_region_is_launched_once(gpu: torch.device) -> None:
    counters.clear()
    eager, graphed = parallelized("none"), parallelized("regions+graphs")
    assert n_launches(graphed) < n_launches(eager)
    assert counters["inductor"]["cudagraph_skips"] == 0
    assert counters["inductor"]["cudagraph_recorded_non_static_inputs"] > 0


def test_an_evaluation_between_steps_changes_nothing(gpu: torch.device) -> None:
    pm, alone = parallelized("regions+graphs"), parallelized("none")
    for seed in range(N_STEPS):
        found = pm.step(**tokens(seed))
        outside = pm.loss(**tokens(seed + 1))
        assert outside.isfinite()
        assert found.item() == pytest.approx(alone.step(**tokens(seed)).item(), abs=1e-10)
        alone.loss(**tokens(seed + 1))
    for name, gradient in pm.full_gradients().items():
        torch.testing.assert_close(gradient, alone.full_gradients()[name], atol=1e-10, rtol=0)
