"""All pipelines enumerated: the definition that the stage search is tested against."""

from __future__ import annotations

import math
from collections.abc import Iterator

from autopar.passes.solvers.problem import Infeasible, ProblemError
from autopar.passes.solvers.stages.problem import (
    StageChoice,
    StagePlan,
    StageProblem,
    too_little_memory,
)

MAX_PLANS = 2**16


def solve_stages_brute_force(
    problem: StageProblem, n_best: int = 1
) -> tuple[StagePlan, ...] | Infeasible:
    """The `n_best` cheapest plans; ties by number of stages, then the smallest stages.

    Raises `ProblemError` above `MAX_PLANS` plans.
    """
    found: list[StagePlan] = []
    bytes_before = [problem.stage_bytes(n_after) for n_after in range(problem.n_layers)]
    min_bytes = math.inf
    for n_plans, stages in enumerate(_covers(problem, 0, problem.n_devices)):
        if n_plans == MAX_PLANS:
            raise ProblemError(
                f"more than {MAX_PLANS} plans are too many to enumerate",
                hint="use autopar.passes.solvers.stages.solve_stages",
            )
        if problem.n_stages not in (None, len(stages)):
            continue
        after = zip(reversed(stages), bytes_before, strict=False)
        most_bytes = max(float(sizes[stage]) for stage, sizes in after)
        min_bytes = min(min_bytes, most_bytes)
        if most_bytes <= problem.limit_bytes:
            found.append(problem.evaluate(stages))
    if not found:
        return too_little_memory(problem, min_bytes)
    found.sort(key=lambda plan: (plan.objective_s, len(plan.stages), plan.stages))
    best_s = found[0].objective_s
    return tuple(problem.evaluate(plan.stages, best_s) for plan in found[:n_best])


def _covers(problem: StageProblem, first: int, n_devices: int) -> Iterator[tuple[StageChoice, ...]]:
    """All ways to cut the layers from `first` on into stages on exactly `n_devices`."""
    if first == problem.n_layers:
        if n_devices == 0:
            yield ()
        return
    for last in range(first, problem.n_layers):
        for config, size in enumerate(problem.config_devices):
            may_begin = problem.may_begin(config, n_devices)
            if may_begin and math.isfinite(problem.time_s[first, last, config]):
                for rest in _covers(problem, last + 1, n_devices - size):
                    yield (StageChoice(first, last, config), *rest)
