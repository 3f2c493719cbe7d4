"""All pipelines enumerated: what the recurrence and the listing are tested against."""

from __future__ import annotations

import math
from collections.abc import Iterator

from autopar.passes.solvers.problem import ProblemError
from autopar.passes.solvers.stages.problem import StageProblem

MAX_PLANS = 2**16


def every_plan(problem: StageProblem) -> list[tuple[float, list[int]]]:
    """(span, indices of the stages) of every plan, best first.

    Raises `ProblemError` above `MAX_PLANS` plans.
    """
    found = []
    for n_plans, stages in enumerate(_covers(problem, 0, problem.n_devices)):
        if n_plans == MAX_PLANS:
            raise ProblemError(
                f"more than {MAX_PLANS} plans are too many to enumerate",
                hint="use autopar.passes.solvers.stages.plans",
            )
        span_s = problem.span_of(stages)
        if problem.n_stages in (None, len(stages)) and math.isfinite(span_s):
            found.append((span_s, stages))
    return sorted(found)


def _covers(problem: StageProblem, first: int, n_left: int) -> Iterator[list[int]]:
    """All ways to cut the layers from `first` on into stages on exactly `n_left` devices."""
    if first == problem.n_layers:
        if n_left == 0:
            yield []
        return
    for stage in range(*problem.starts[first : first + 2].tolist()):
        _, last, config = problem.choice(stage)
        if problem.may_begin(config, n_left):
            for rest in _covers(problem, last + 1, n_left - problem.config_devices[config]):
                yield [stage, *rest]
