"""What a memory budget costs at least in recompute (`LeastRerun`): a bound, and a near one."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from autopar import Device, Link
from autopar.cost.laws import CostModel
from autopar.errors import InfeasibleError
from autopar.mesh import LogicalMesh
from autopar.options import Options
from autopar.passes.analysis import Analysis, Recomputable
from autopar.passes.intra import (
    Constraints,
    LeastRerun,
    PlacementRequest,
    choose,
    least_static_bytes,
)
from tests.helpers.captures import captured
from tests.helpers.harness import language_model, tiny_gpt2, tiny_llama
from tests.helpers.jobs import rows
from tests.helpers.machines import AXIS_NAMES
from tests.helpers.models.recompute_models import Blocks
from tests.helpers.nightly import nightly, one_in

# Elementwise operators and launches take a good part of these small models' steps.
DEVICE = Device(1e12, 1e11, 1e15, 1e-9)
MODELS = {"gpt2": tiny_gpt2, "llama": tiny_llama}


@cache
def analysis_of(name: str) -> Analysis:
    torch.manual_seed(0)
    if name == "blocks":
        return Analysis.of(captured(Blocks(n_blocks=3), rows(0, "x"), precision="fp64"))
    return language_model(MODELS[name], 2)


def cost_of(sizes: tuple[int, ...]) -> CostModel:
    links = (Link(1e-9, 1e-12),) * len(sizes)
    mesh = LogicalMesh(sizes, AXIS_NAMES[len(sizes)], links, DEVICE)
    return CostModel(mesh, torch.float64, hides=False)


@one_in(4)
@pytest.mark.parametrize(
    ("name", "sizes", "n_microbatches"),
    [
        ("blocks", (2,), 1),
        ("blocks", (1,), 2),
        ("gpt2", (1,), 2),
        ("llama", (1,), 1),
        pytest.param("gpt2", (2,), 1, marks=nightly),
        pytest.param("llama", (2,), 2, marks=nightly),
    ],
)
def test_no_optimum_within_a_budget_is_below_the_bound(
    name: str, sizes: tuple[int, ...], n_microbatches: int
) -> None:
    """Budgets from the leanest plan to one that binds a little; with and without the bytes of
    activations in the placements that are bounded."""
    analysis, cost = analysis_of(name), cost_of(sizes)
    recomputable = Recomputable.of(analysis, Options())
    assert recomputable is not None
    ask = PlacementRequest(cost, n_microbatches, Constraints())
    least_rerun_s = LeastRerun(analysis, recomputable, cost)
    static = least_static_bytes(analysis, cost, "adamw", Constraints(), n_microbatches)
    free = choose(analysis, ask, "adamw", None)
    with pytest.raises(InfeasibleError) as error:
        choose(analysis, ask, "adamw", 0.0, recomputable=recomputable)
    assert error.value.least_bytes is not None
    leanest_bytes, nearest = error.value.least_bytes * (1 + 1e-9), 0.0
    for share in (0.0, 0.2, 0.6, 0.95):
        budget_bytes = leanest_bytes + share * (free.size_bytes - leanest_bytes)
        best = choose(analysis, ask, "adamw", budget_bytes, recomputable=recomputable)
        again_s = least_rerun_s(n_microbatches, 1, budget_bytes - static)
        assert free.hidden_bound_s + again_s <= best.objective_s * (1 + 1e-9), share
        if best.strategy.recomputed:
            nearest = max(nearest, again_s / (best.objective_s - free.objective_s))
    assert nearest > 0.3, "the bound says next to nothing"
