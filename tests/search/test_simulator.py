"""Scores and simulations of candidates: scores are near, and nothing faster is left out."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch

from autopar.cost.laws.model import CostModel
from autopar.cost.price.prediction import link_between, predict
from autopar.errors import InfeasibleError
from autopar.mesh import Mesh, factored_view
from autopar.options import Options
from autopar.passes.analysis.analysis import Analysis
from autopar.passes.inter.candidate import Candidate, StageLayout, n_operators
from autopar.passes.inter.recipes import recipe_limits
from autopar.passes.intra.constraints import Constraints
from autopar.passes.search.evaluator import Evaluator, Scored
from autopar.passes.search.simulator import SCORE_REL, UNSIMULATED_REL, Simulator
from autopar.plans.predicted import Predicted
from autopar.program.pipeline import Pipeline
from tests.helpers.captures import captured
from tests.helpers.every_plan import Choices, choices_of
from tests.helpers.machines import A100, FAST, SLOW, TIERED, hardware_of
from tests.helpers.models.wide_models import meta_tokens, wide_llama

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
def test_scores_are_near_what_is_simulated(
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
    scored = evaluator.scored(Candidate("", ends, stages, m), None)
    step_time_s = Simulator(evaluator, predicted).simulated(scored).step_time_s
    assert scored.score_s == pytest.approx(step_time_s, rel=SCORE_REL)


@cache
def scored_mlp() -> tuple[Choices, tuple[Scored, ...]]:
    """Every plan of an MLP on two nodes, with one, two, three and four stages."""
    choices = choices_of("mlp", (2, 2), TIERED, Options.of(microbatches=16))
    return choices, tuple(choices.evaluator.scored(c, None) for c in choices.candidates())


def test_a_simulator_gives_each_candidate_what_a_new_one_does() -> None:
    """Candidates share stages; each is simulated with its fastest placements and its leanest."""
    choices, fastest = scored_mlp()
    evaluator, pricer = choices.evaluator, choices.simulator.pricer
    every = list(fastest)
    for scored in fastest:
        leanest_bytes = evaluator.least_bytes(scored.candidate)
        every.append(evaluator.scored(scored.candidate, leanest_bytes))
    one = Simulator(evaluator, pricer)
    found = [one.simulated(scored) for scored in every]
    assert found == [Simulator(evaluator, pricer).simulated(scored) for scored in every]
    assert len({solved.step_time_s for solved in found}) > len(fastest)


# -- which candidates are simulated ----------------------------------------------------------------


def identity(pipeline: Pipeline) -> object:
    """Tells the plans of `scored_mlp` apart."""
    meshes = (mesh.sizes for mesh in pipeline.meshes)
    names = (tuple(p.name for p in stage.parameters) for stage in pipeline.stages)
    return tuple(zip(meshes, names, strict=True))


@cache
def identities() -> tuple[object, ...]:
    choices, every = scored_mlp()
    found: list[object] = []

    def noted(pipeline: Pipeline, costs: Sequence[CostModel]) -> Predicted:
        found.append(identity(pipeline))
        return choices.simulator.pricer(pipeline, costs)

    for scored in every:
        Simulator(choices.evaluator, noted).simulated(scored)
    assert len(set(found)) == len(every)
    return tuple(found)


@dataclass(frozen=True)
class Drawn:
    """A pricer that returns drawn step times, by `identity`."""

    step_times_s: Mapping[object, float]

    def __call__(self, pipeline: Pipeline, costs: Sequence[CostModel]) -> Predicted:
        step_time_s = self.step_times_s[identity(pipeline)]
        return Predicted(step_time_s, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, None, None, 0.0)


def draw(seed: int) -> tuple[list[Scored], Drawn]:
    """Scores exceed the drawn step times by at most `SCORE_REL`. Those of plans with several stages
    exceed them by one more margin, at most `UNSIMULATED_REL`, that all of these plans have."""
    rng, (_, every) = random.Random(seed), scored_mlp()
    of_stages = rng.choice((0.0, rng.uniform(0, UNSIMULATED_REL), UNSIMULATED_REL))
    times_s = [rng.choice((1.0, 1.01, rng.uniform(1, 1.3))) + 1e-6 * rng.random() for _ in every]
    scored = []
    for one, time_s in zip(every, times_s, strict=True):
        least_rel = of_stages if len(one.candidate.stages) > 1 else rng.uniform(-0.05, 0)
        over_rel = least_rel + rng.choice((rng.random(), 0.999)) * SCORE_REL
        scored.append(replace(one, score_s=time_s * (1 + over_rel)))
    return scored, Drawn(dict(zip(identities(), times_s, strict=True)))


def test_what_is_left_out_is_no_faster_than_what_is_found() -> None:
    n_left = n_misleading = 0
    for seed in range(60):
        scored, drawn = draw(seed)
        simulator = Simulator(scored_mlp()[0].evaluator, drawn)
        found = simulator.fastest(scored).found
        least_s = min(solved.step_time_s for solved in found)
        assert least_s == min(drawn.step_times_s.values()), seed
        n_left += len(scored) - len(found)
        best_scored = min(scored, key=lambda one: one.score_s)
        n_misleading += simulator.simulated(best_scored).step_time_s > least_s
    assert n_left > 60, "hardly anything is left out"
    assert n_misleading > 20, "scores alone are enough"


# -- memory ----------------------------------------------------------------------------------------


CASES: list[tuple[tuple[float, float], int]] = [(FAST, 1), (FAST, 4), (SLOW, 16)]


@cache
def limits_of(speed: tuple[float, float], m: int) -> list[float]:
    """Budgets that some plans exceed a little when they are simulated."""
    choices = choices_of("mlp", (4,), speed, Options.of(microbatches=m))
    peaks: set[float] = set()
    for candidate in choices.candidates():
        for budget_bytes in (None, choices.evaluator.least_bytes(candidate)):
            scored = choices.evaluator.scored(candidate, budget_bytes)
            peaks.add(choices.simulator.simulated(scored).peak_bytes)
    return [peak_bytes - 1 for peak_bytes in sorted(peaks)[::2]]


def step_time_s(simulator: Simulator, scored: Scored) -> float:
    """Infinite if it does not fit."""
    try:
        return simulator.simulated(scored).step_time_s
    except InfeasibleError:
        return math.inf


@pytest.mark.parametrize(("speed", "m"), CASES)
def test_the_best_within_a_budget_is_that_of_candidates_alone(
    speed: tuple[float, float], m: int
) -> None:
    """A candidate whose simulated peak is over the budget is solved within smaller ones. Those that
    are pruned are slower than the best, and the lower bounds on them hold."""
    n_pruned = n_failed = 0
    for budget_bytes in limits_of(speed, m):
        options = Options.of(microbatches=m, memory_limit=budget_bytes, recompute="none")
        choices = choices_of("mlp", (4,), speed, options)
        scored = []
        for candidate in choices.candidates():
            try:
                scored.append(choices.evaluator.scored(candidate, budget_bytes))
            except InfeasibleError:
                continue
        alone_s = {one.candidate.name: step_time_s(choices.simulator, one) for one in scored}
        found = Simulator(choices.evaluator, choices.simulator.pricer).fastest(scored)
        for solved in found.found:
            assert solved.peak_bytes <= budget_bytes
        least_s = min((solved.step_time_s for solved in found.found), default=math.inf)
        assert least_s == min(alone_s.values(), default=math.inf)
        for name, pruned_s in found.pruned_s.items():
            assert least_s <= pruned_s <= alone_s[name] * (1 + REL), name
        assert all(alone_s[name] == math.inf for name in found.failed)
        n_pruned += len(found.pruned_s)
        n_failed += len(found.failed)
    assert n_failed, "everything fits"
    assert n_pruned or speed == SLOW, "nothing is pruned"
