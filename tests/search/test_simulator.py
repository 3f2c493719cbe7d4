"""Simulations of candidates: steps are near what placements take at least, and never below it on
one stage; peaks over the budget are mended."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from functools import cache

import pytest
import torch

from autopar.cost.memory import static_bytes_per_param
from autopar.errors import InfeasibleError
from autopar.options import Options
from autopar.passes.intra import Constraints, Role
from autopar.passes.search import Proposal, Simulator, Solved
from tests.helpers.every_plan import Choices, choices_of
from tests.helpers.machines import FAST, SLOW, TIERED
from tests.helpers.nightly import one_in, sampled

REL = 1e-9


STEPS = list(itertools.product(("mlp", "gpt2"), (FAST, SLOW, TIERED)))


@one_in(3)
@pytest.mark.parametrize(
    ("model", "speed"), sampled(STEPS, [("mlp", TIERED), ("gpt2", FAST), ("gpt2", SLOW)])
)
def test_no_step_of_one_stage_is_below_its_bounds(model: str, speed: tuple[float, float]) -> None:
    """What its placements take at least, and what all placements do: with the fastest placements,
    with leaner ones, and with those that store parameters alike."""
    options = Options.of(stages=1, recompute="none", microbatches=4)
    choices, nearest = choices_of(model, (2, 2), speed, options), 0.0
    evaluator = choices.evaluator
    for candidate in choices.candidates():
        bound_s = evaluator.placed(candidate, None).bound_s
        least_bytes = evaluator.least_bytes(candidate)
        every = [evaluator.placed(candidate, b) for b in (None, least_bytes, 1.3 * least_bytes)]
        for words in (("zero3",), ("zero1", "zero2"), ("zero1", "zero2", "zero3")):
            every.append(evaluator.placed(candidate.restrict(*words), None))
        for placed in every:
            step_time_s = choices.simulator.simulate_once(placed).step_time_s
            assert bound_s <= step_time_s * (1 + REL), candidate.name
            assert placed.least_s <= step_time_s * (1 + REL), candidate.name
            nearest = max(nearest, placed.least_s / step_time_s)
    assert nearest > 0.9


@cache
def placed_mlp() -> tuple[Choices, tuple[Proposal, ...]]:
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


CASES: list[tuple[tuple[float, float], int]] = [(FAST, 4), (SLOW, 16)]


@cache
def limits_of(speed: tuple[float, float], m: int) -> list[float]:
    """Budgets that some plans exceed a little when they are simulated."""
    choices = choices_of("mlp", (4,), speed, Options.of(microbatches=m))
    peaks: set[float] = set()
    for candidate in choices.candidates():
        for budget_bytes in (None, choices.evaluator.least_bytes(candidate)):
            placed = choices.evaluator.placed(candidate, budget_bytes)
            peaks.add(choices.simulator.simulated(placed).peak_bytes)
    return [peak_bytes - 1 for peak_bytes in sorted(peaks)[::4]]


def step_time_s(simulator: Simulator, placed: Proposal) -> float:
    """Infinite if it does not fit."""
    try:
        return simulator.simulated(placed).step_time_s
    except InfeasibleError:
        return math.inf


@pytest.mark.parametrize(("speed", "m"), sampled(CASES, CASES[:1]))
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
            first = choices.simulator.simulate_once(placed)
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
    assert n_leaner and n_bounded


ROLES = itertools.product(
    (("data", "tensor"), ("copy", "data"), ("data", "context"), ("data", "data")), (0, 1, 2, 3)
)


@one_in(4)
@pytest.mark.parametrize(("roles", "zero"), sampled([*ROLES], [(("data", "tensor"), 1)]))
@pytest.mark.parametrize("n_microbatches", [1, 4])
def test_no_size_is_above_what_the_solver_needs(
    roles: tuple[Role, Role], zero: int, n_microbatches: int
) -> None:
    """Sizes leave out attempts before anything is solved, so they count no byte too many; but for
    the table of positions, which has no batch, and is sharded where the others are whole."""
    options = Options.of(microbatches=n_microbatches, recompute="none")
    choices, nearest = choices_of("gpt2", (2, 2), TIERED, options), 0.0
    evaluator, static = choices.evaluator, static_bytes_per_param("adamw", torch.float32)
    (shape,) = (p.shape for n, p in choices.analysis.program.parameters.items() if "wpe" in n)
    table_bytes = math.prod(shape) * static.total_bytes
    for candidate in itertools.islice(choices.candidates(), 0, None, 5):
        stages = [
            replace(s, constraints=Constraints(roles=roles[: s.view.n_axes], zero=zero))
            for s in candidate.stages
        ]
        of = replace(candidate, stages=tuple(stages))
        size_bytes, least_bytes = evaluator.size_bound_bytes(of), evaluator.least_bytes(of)
        assert size_bytes - table_bytes <= least_bytes * (1 + REL), candidate.name
        nearest = max(nearest, size_bytes / least_bytes)
    assert nearest > 0.9
