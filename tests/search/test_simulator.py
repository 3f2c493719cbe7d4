"""Simulations of candidates: steps are near what placements take at least, and never below it on
one stage; peaks over the budget are mended."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import pytest
import torch

from autopar.cost.laws import CostModel
from autopar.cost.price import link_between, predict
from autopar.errors import InfeasibleError
from autopar.mesh import Device, Link, Mesh, factored_view
from autopar.options import Options
from autopar.passes.analysis import Analysis
from autopar.passes.inter import Candidate, StageLayout, n_operators, recipe_limits
from autopar.passes.intra import Constraints
from autopar.passes.search import Evaluator, Placed, Simulator, Solved
from autopar.passes.search.recipes import SLACK_REL
from autopar.plans import Predicted
from autopar.program import Pipeline
from tests.helpers.captures import captured
from tests.helpers.every_plan import Choices, choices_of
from tests.helpers.machines import A100, FAST, SLOW, TIERED, hardware_of
from tests.helpers.models.wide_models import meta_tokens, wide_gpt2, wide_llama

REL = 1e-9


@cache
def llama() -> Analysis:
    return Analysis.of(captured(wide_llama(), meta_tokens(32, 4096)))


@pytest.mark.parametrize(
    ("dp", "tp", "pp", "m", "is_recipe"),
    [
        (8, 1, 1, 1, False),
        (4, 2, 1, 2, False),
        (2, 4, 1, 4, True),
        (2, 2, 2, 8, False),
        (1, 4, 2, 8, True),
    ],
)
def test_steps_are_near_what_placements_take_at_least(
    dp: int, tp: int, pp: int, m: int, is_recipe: bool
) -> None:
    mesh = Mesh((1, 8), hardware=A100)
    hardware = hardware_of(mesh, torch.bfloat16)

    def predicted(pipeline: Pipeline, costs: Sequence[CostModel]) -> Predicted:
        return predict(pipeline, costs, "adamw", link_between(mesh, hardware.links))

    evaluator = Evaluator(llama(), Options.of(), hardware, 1e12)
    limits = recipe_limits(evaluator.options, None) if is_recipe else Constraints()
    n, axes = n_operators(llama().program), {"dp": dp, "tp": tp}
    stages = tuple(
        StageLayout(factored_view(mesh, hardware.links, hardware.device, axes, k * dp * tp), limits)
        for k in range(pp)
    )
    ends = (n,) if pp == 1 else (n // 2, n)
    placed = evaluator.placed(Candidate("", ends, stages, m), None)
    step_time_s = Simulator(evaluator, predicted).simulated(placed).step_time_s
    assert placed.least_s == pytest.approx(step_time_s, rel=SLACK_REL)


@pytest.mark.parametrize("speed", [FAST, SLOW, TIERED])
@pytest.mark.parametrize("model", ["mlp", "gpt2"])
def test_no_step_of_one_stage_is_below_what_its_placements_take_at_least(
    model: str, speed: tuple[float, float]
) -> None:
    """With the fastest placements and with leaner ones."""
    options = Options.of(stages=1, recompute="none", microbatches=4)
    choices, nearest = choices_of(model, (2, 2), speed, options), 0.0
    for candidate in choices.candidates():
        least_bytes = choices.evaluator.least_bytes(candidate)
        for budget_bytes in (None, least_bytes, 1.3 * least_bytes):
            placed = choices.evaluator.placed(candidate, budget_bytes)
            step_time_s = choices.simulator.as_placed(placed).step_time_s
            assert placed.least_s <= step_time_s * (1 + REL), candidate.name
            nearest = max(nearest, placed.least_s / step_time_s)
    assert nearest > 0.9


@pytest.mark.parametrize("s_per_byte", [2e-11, 5e-10])
def test_no_step_is_below_the_bound_of_all_placements(s_per_byte: float) -> None:
    """Gradients are in many buckets. What is in the last one is known on average: the tighter of
    two bounds holds, the one with slack for that or the one as if it were hidden."""
    device = Device(1e13, 1e11, 1e12, 1e-9)
    mesh = Mesh((1, 4), links=[Link(1e-6, s_per_byte)] * 2, device=device)
    analysis = Analysis.of(captured(wide_gpt2(4, 256, 64, 1024), meta_tokens(16, 64)))
    options = Options.of(stages=1, recompute="none", microbatches=1)
    choices, nearest = Choices(analysis, mesh, options), 0.0
    for candidate in choices.candidates():
        bound_s = choices.evaluator.placed(candidate, None).bound_s
        for words in ((), ("zero3",), ("zero1", "zero2"), ("zero1", "zero2", "zero3")):
            placed = choices.evaluator.placed(candidate.forbidding(*words), None)
            step_time_s = choices.simulator.as_placed(placed).step_time_s
            assert bound_s <= step_time_s * (1 + REL), (candidate.name, words)
            nearest = max(nearest, bound_s / step_time_s)
    assert nearest > 0.9


@cache
def placed_mlp() -> tuple[Choices, tuple[Placed, ...]]:
    """Every plan of an MLP on two nodes, with one, two, three and four stages."""
    choices = choices_of("mlp", (2, 2), TIERED, Options.of(microbatches=16))
    return choices, tuple(choices.evaluator.placed(c, None) for c in choices.candidates())


def test_a_simulator_gives_each_candidate_what_a_new_one_does() -> None:
    """Candidates share stages; each is simulated with its fastest placements and its leanest."""
    choices, fastest = placed_mlp()
    evaluator, pricer = choices.evaluator, choices.simulator.pricer
    every = list(fastest)
    for placed in fastest:
        leanest_bytes = evaluator.least_bytes(placed.candidate)
        every.append(evaluator.placed(placed.candidate, leanest_bytes))
    one = Simulator(evaluator, pricer)
    found = [one.simulated(placed) for placed in every]
    assert found == [Simulator(evaluator, pricer).simulated(placed) for placed in every]
    assert len({solved.step_time_s for solved in found}) > len(fastest)


# -- memory ----------------------------------------------------------------------------------------


CASES: list[tuple[tuple[float, float], int]] = [(FAST, 1), (FAST, 4), (SLOW, 16)]


@cache
def limits_of(speed: tuple[float, float], m: int) -> list[float]:
    """Budgets that some plans exceed a little when they are simulated."""
    choices = choices_of("mlp", (4,), speed, Options.of(microbatches=m))
    peaks: set[float] = set()
    for candidate in choices.candidates():
        for budget_bytes in (None, choices.evaluator.least_bytes(candidate)):
            placed = choices.evaluator.placed(candidate, budget_bytes)
            peaks.add(choices.simulator.simulated(placed).peak_bytes)
    return [peak_bytes - 1 for peak_bytes in sorted(peaks)[::2]]


def step_time_s(simulator: Simulator, placed: Placed) -> float:
    """Infinite if it does not fit."""
    try:
        return simulator.simulated(placed).step_time_s
    except InfeasibleError:
        return math.inf


@pytest.mark.parametrize(("speed", "m"), CASES)
def test_a_peak_over_the_budget_is_mended_or_bounded(speed: tuple[float, float], m: int) -> None:
    """A candidate whose simulated peak is over the budget is solved within smaller ones. If it is
    given up because it cannot be below some seconds, it takes at least those it is bounded by. Of
    several stages that is an estimate."""
    n_leaner = n_bounded = n_failed = 0
    for budget_bytes in limits_of(speed, m):
        options = Options.of(microbatches=m, memory_limit=budget_bytes, recompute="none")
        choices = choices_of("mlp", (4,), speed, options)
        for candidate in choices.candidates():
            try:
                placed = choices.evaluator.placed(candidate, budget_bytes)
            except InfeasibleError:
                continue
            alone_s = step_time_s(choices.simulator, placed)
            n_failed += math.isinf(alone_s)
            first = choices.simulator.as_placed(placed)
            if math.isinf(alone_s) or first.peak_bytes <= budget_bytes:
                continue
            simulator = Simulator(choices.evaluator, choices.simulator.pricer)
            assert simulator.simulated(placed).peak_bytes <= budget_bytes
            n_leaner += 1
            for limit_s in (0.99 * placed.least_s, placed.least_s, alone_s):
                found = simulator.fit_to_budget(placed, limit_s)
                if isinstance(found, Solved):
                    assert found.step_time_s == alone_s
                elif len(candidate.stages) == 1:
                    assert limit_s <= found <= alone_s * (1 + REL), candidate.name
                    n_bounded += 1
    assert n_failed, "everything fits"
    assert n_leaner and (n_bounded or m == 1)
