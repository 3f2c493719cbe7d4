"""The planner's choice against all plans: every cut, submesh, view and number of microbatches.

Every plan is solved and simulated (`tests/helpers/every_plan.py`). The planner simulates few of
them. It may lose at most `REGRET` by that, and nothing if one stage is best.

`make nightly` adds every number of microbatches, and a GPT-2 on four and eight devices: three
minutes.
"""

from __future__ import annotations

import pytest

import autopar
from autopar import Manual
from autopar.options import Options
from tests.helpers.every_plan import MODELS, batch_of, choices_of
from tests.helpers.machines import FAST, SLOW, TIERED, two_tiers
from tests.helpers.nightly import nightly, one_in, sampled

# How much slower (relative, simulated) the plan may be than the best of all plans.
REGRET = 0.01
REL = 1e-9


Case = tuple[str, tuple[int, ...], tuple[float, float], int | None]
FEW: list[Case] = [
    ("mlp", (2, 2), TIERED, 16),
    # Messages into a part of a node; stages whose boundary specs are not those of one stage.
    ("mlp", (2, 4), TIERED, 16),
    ("mlp", (2, 4), SLOW, 16),
    ("gpt2", (2,), SLOW, 4),
]
MANY: list[Case] = [
    ("mlp", (4,), SLOW, None),
    ("gpt2", (2,), SLOW, None),
    ("mlp", (2, 2), SLOW, None),
    *(("mlp", shape, speed, None) for shape in ((4,), (2, 2)) for speed in (TIERED, FAST)),
    *(("mlp", (2, 4), speed, None) for speed in (SLOW, TIERED, FAST)),
    *(("gpt2", (2, 2), speed, 4) for speed in (SLOW, TIERED, FAST)),
    ("gpt2", (2, 2), TIERED, None),
]


@one_in(4)
@pytest.mark.parametrize(
    ("model", "shape", "s_per_byte", "microbatches"), sampled([*FEW, *MANY], FEW)
)
def test_no_plan_is_faster_by_more_than_the_bound(
    model: str, shape: tuple[int, ...], s_per_byte: tuple[float, float], microbatches: int | None
) -> None:
    """And the bound is below all."""
    options = Options.of(microbatches=microbatches or "auto", tie=0.0)
    choices = choices_of(model, shape, s_per_byte, options)
    found = choices.step_times_s()
    best = min(found, key=found.__getitem__)
    assert len(found) >= 6, "too little to choose from"
    result = choices.planned()
    solved = result.solved
    assert result.bound_s is not None and 0 < result.bound_s <= found[best] * (1 + REL)
    lost = solved.step_time_s / found[best] - 1
    assert lost <= REGRET, f"{solved.candidate.name} {solved.candidate.ends} loses to {best}"
    if " | " not in best:
        assert lost <= REL, f"{solved.candidate.name} loses to {best}"


@nightly
def test_no_recipe_with_stages_is_predicted_faster() -> None:
    mesh, batch = two_tiers((2, 4), TIERED, 1e10), batch_of("mlp")
    model, precision = MODELS["mlp"](), "fp64"
    plan = autopar.plan(model, mesh, batch, precision=precision, tolerance=0.0, tie=0.0)
    recipe = autopar.plan(
        model, mesh, batch, precision=precision, manual=Manual(dp=2, tp=2, pp=2), microbatches=8
    )
    assert plan.predicted.step_time_s <= recipe.predicted.step_time_s * (1 + REL)
