"""What pruning loses is next to nothing: plans against those of a planner that prunes much less.

The wider planner has no tolerance, and trusts no score. It proposes four times as many pipelines:
nearly equal ones, and those up to half slower. It tries every number of microbatches, and may cut
blocks in halves. Ordinary runs plan a GPT-2 on four devices, `make nightly` a Llama of real width
on 64 A100.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest

import autopar
from autopar import Mesh, Plan
from autopar.passes.inter import joint, recipes, stage_search
from autopar.passes.inter.layers import MOST_LAYERS
from autopar.passes.search import recipes as plain_recipes
from autopar.passes.search import refined, several_stages
from tests.helpers.harness import random_tokens, tiny_gpt2
from tests.helpers.machines import A100
from tests.helpers.models.wide_models import meta_tokens, wide_llama
from tests.helpers.nightly import nightly

REGRET = 0.01


def every_count(counts: Sequence[int], cost_s: Callable[[int], float]) -> int:
    """In place of `climb`: tries all counts; it returns the first, so both directions are tried."""
    for m in counts:
        cost_s(m)
    return counts[0]


def widen(patch: pytest.MonkeyPatch) -> None:
    """Patches all the constants that the planner prunes by."""
    patch.setattr(several_stages, "PRUNE_RATIO", math.inf)
    patch.setattr(refined, "PRUNE_RATIO", 2.0)
    patch.setattr(several_stages, "_N_SEARCHED", 24)
    patch.setattr(several_stages, "_N_RECIPES", 12)
    patch.setattr(several_stages, "PIPELINE_SCORE_REL", 10.0)
    patch.setattr(plain_recipes, "SCORE_REL", 10.0)
    patch.setattr(stage_search, "_PLANS_PER_COUNT", 24)
    patch.setattr(stage_search, "_WITHIN", 0.5)
    patch.setattr(stage_search, "_GAP_GOAL", 0.0)
    patch.setattr(joint, "_ALIKE_REL", 0.0)
    patch.setattr(joint.JointSearch, "bound_s", lambda self, m, n_stages: 0.0)
    patch.setattr(joint, "climb", every_count)
    patch.setattr(recipes, "climb", every_count)
    for module in ("joint", "recipes"):
        patch.setattr(f"autopar.passes.inter.{module}.MOST_LAYERS", 10 * MOST_LAYERS)


def regret(make: Callable[[float], Plan]) -> float:
    pruned = make(0.01)
    with pytest.MonkeyPatch.context() as patch:
        widen(patch)
        wide = make(0.0)
    n_simulated = [
        sum(row.step_time_s is not None and not row.is_estimate for row in plan.data.alternatives)
        for plan in (pruned, wide)
    ]
    assert n_simulated[1] > n_simulated[0], "nothing was widened"
    return pruned.predicted.step_time_s / wide.predicted.step_time_s - 1


def llama(tolerance: float) -> Plan:
    mesh, limits = Mesh((8, 8), hardware=A100), {"tolerance": tolerance, "tie": 0.0}
    return autopar.plan(wide_llama(n_words=128256), mesh, meta_tokens(64, 4096), **limits)


def small_gpt2(tolerance: float) -> Plan:
    mesh, limits = Mesh((2, 2), hardware="cpu-local"), {"tolerance": tolerance, "tie": 0.0}
    return autopar.plan(tiny_gpt2(2), mesh, random_tokens(0), microbatches=4, **limits)


def test_little_is_lost_on_a_small_model() -> None:
    assert regret(small_gpt2) <= REGRET


@nightly
def test_little_is_lost_on_64_devices() -> None:
    assert regret(llama) <= REGRET
