"""What the planner leaves out costs next to nothing: its plan against that of a planner which
leaves out much less.

Wider: every candidate is solved and simulated whatever it scores, four times as many are proposed
(those up to half slower, and those alike), every number of microbatches is tried, and blocks may
be cut in halves.

    AUTOPAR_OPTIMALITY=1 .venv/bin/python -m pytest tests/search/test_pruning.py --timeout=3600

plans a Llama of real width on 64 A100; by default a GPT-2 on four devices.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence

import pytest

import autopar
from autopar import Mesh, Plan
from autopar.passes.inter import joint, recipes, stage_search
from autopar.passes.inter.layers import MOST_LAYERS
from autopar.passes.search import count_search as best_count
from autopar.passes.search import planner, refined
from autopar.passes.search import simulator as simulated
from tests.helpers.harness import random_tokens, tiny_gpt2
from tests.helpers.machines import A100
from tests.helpers.models.wide_models import meta_tokens, wide_llama

REGRET = 0.01
REL = 1e-9
WHOLE = os.environ.get("AUTOPAR_OPTIMALITY")


def every_count(counts: Sequence[int], cost_s: Callable[[int], float]) -> int:
    """In place of `climb`: says that it got nowhere, so that the other direction is tried too."""
    for m in counts:
        cost_s(m)
    return counts[0]


def widen(patch: pytest.MonkeyPatch) -> None:
    """All that is known of how the planner prunes."""
    patch.setattr(planner, "PRUNE_RATIO", math.inf)
    patch.setattr(refined, "PRUNE_RATIO", 2.0)
    patch.setattr(planner, "SKIP_RECOMPUTE_RATIO", 0.0)
    patch.setattr(planner, "_N_SEARCHED", 24)
    patch.setattr(planner, "_N_RECIPES", 12)
    patch.setattr(best_count, "WORTH_REL", 0.0)
    patch.setattr(simulated, "SCORE_REL", 10.0)
    patch.setattr(stage_search, "_PLANS_PER_COUNT", 24)
    patch.setattr(stage_search, "_WITHIN", 0.5)
    patch.setattr(stage_search, "_GAP_GOAL", 0.0)
    patch.setattr(joint, "_ALIKE_REL", 0.0)
    patch.setattr(joint.JointSearch, "bound_s", lambda self, m, n_stages: 0.0)
    patch.setattr(joint, "climb", every_count)
    patch.setattr(recipes, "climb", every_count)
    for module in ("joint", "recipes"):
        patch.setattr(f"autopar.passes.inter.{module}.MOST_LAYERS", 10 * MOST_LAYERS)


def regret(make: Callable[[], Plan]) -> float:
    pruned = make()
    with pytest.MonkeyPatch.context() as patch:
        widen(patch)
        wide = make()
    n_simulated = [sum(not row.note for row in plan.data.alternatives) for plan in (pruned, wide)]
    assert n_simulated[1] > n_simulated[0], "nothing was widened"
    return pruned.predicted.step_time_s / wide.predicted.step_time_s - 1


def llama() -> Plan:
    mesh = Mesh((8, 8), hardware=A100)
    return autopar.plan(wide_llama(n_words=128256), mesh, meta_tokens(64, 4096))


def small_gpt2() -> Plan:
    mesh = Mesh((2, 2), hardware="cpu-local")
    return autopar.plan(tiny_gpt2(2), mesh, random_tokens(0), microbatches=4)


def test_little_is_lost_on_a_small_model() -> None:
    assert regret(small_gpt2) <= REGRET


@pytest.mark.skipif(not WHOLE, reason="minutes: AUTOPAR_OPTIMALITY=1 runs it")
@pytest.mark.timeout(3600)
def test_little_is_lost_on_64_devices() -> None:
    assert regret(llama) <= REGRET
