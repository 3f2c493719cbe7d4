"""The stage recurrence and the listing against all plans enumerated."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest

from autopar.passes.solvers.problem import ProblemError
from autopar.passes.solvers.stages import (
    CostToGo,
    StageProblem,
    least_span_s,
    plans,
    span_s,
)
from tests.helpers.problems import seeds

SIZES = [(1,), (1, 2), (1, 2, 4), (2, 2, 4), (1, 1, 2, 3)]


def span_of(problem: StageProblem, stages: Sequence[int]) -> float:
    """The span of a plan, given by the indices of its stages."""
    levels = [min(k, problem.n_levels - 1) for k in reversed(range(len(stages)))]
    at = list(stages), levels
    return span_s(problem.work_s[at], problem.added_s[at], problem.n_microbatches)


def stages_problem(
    n_layers: int,
    sizes: tuple[int, ...],
    n_devices: int,
    seed: int,
    n_stages: int | None = None,
    node_devices: int | None = None,
    n_levels: int = 3,
    m: int | None = None,
) -> StageProblem:
    """Every range of layers in every configuration, with whole numbers of seconds.

    Deeper levels take at least as long. A fifth of the stages is forbidden from some level on.
    """
    rng = np.random.default_rng(seed)
    ranges = [(a, b) for a in range(n_layers) for b in range(a, n_layers)]
    rows = [(a, b, c) for a, b in ranges for c in range(len(sizes))]
    first, last, config = np.array(rows, dtype=np.int64).T.copy()
    shape = len(rows), n_stages or n_levels
    work_s = np.cumsum(rng.integers(0, 9, shape), axis=1).astype(float)
    work_s[(rng.random(shape) < 0.1).cumsum(axis=1) > 0] = math.inf
    added_s = np.minimum(rng.integers(0, 4, shape), work_s)
    on = n_layers, n_devices, n_stages, node_devices, m
    return StageProblem(first, last, config, work_s, added_s, sizes, *on)


def problems(chunk: int, is_1f1b: bool = False) -> list[StageProblem]:
    out = []
    for seed in range(chunk * 40, chunk * 40 + 40):
        rng = np.random.default_rng(1000 + seed)
        n_devices = int(rng.integers(1, 7))
        out.append(
            stages_problem(
                int(rng.integers(1, 5)), SIZES[seed % len(SIZES)], n_devices, seed,
                int(rng.integers(1, 4)) if seed % 3 == 0 else None,
                int(rng.choice([n for n in (1, 2, 3, 4) if n_devices % n == 0]))
                if seed % 2
                else None,
                6 if is_1f1b else int(rng.integers(1, 4)),
                int(rng.integers(1, 7)) if is_1f1b else None,
            )
        )  # fmt: skip
    return out


def every_plan(problem: StageProblem) -> list[tuple[float, list[int]]]:
    """(span, indices of the stages) of every plan, best first: all pipelines enumerated."""
    spans = (
        (span_of(problem, stages), stages) for stages in all_cuts(problem, 0, problem.n_devices)
    )
    return sorted(
        (least_s, stages)
        for least_s, stages in spans
        if problem.n_stages in (None, len(stages)) and math.isfinite(least_s)
    )


def all_cuts(problem: StageProblem, first: int, n_left: int) -> Iterator[list[int]]:
    """All ways to cut the layers from `first` on into stages on exactly `n_left` devices."""
    if first == problem.n_layers:
        if n_left == 0:
            yield []
        return
    for stage in range(*problem.starts[first : first + 2].tolist()):
        _, last, config = problem.choice(stage)
        if problem.may_begin(config, n_left):
            for rest in all_cuts(problem, last + 1, n_left - problem.config_devices[config]):
                yield [stage, *rest]


@pytest.mark.parametrize("chunk", seeds(2, 5))
def test_every_plan_is_listed_best_first(chunk: int) -> None:
    n_some = 0
    for problem in problems(chunk):
        expected, found = every_plan(problem), list(plans(CostToGo(problem)))
        n_some += bool(expected)
        assert [least_s for least_s, _ in found] == [least_s for least_s, _ in expected]
        assert sorted(stages for _, stages in found) == sorted(stages for _, stages in expected)
        assert all(span_of(problem, stages) == least_s for least_s, stages in found)
        least_s = expected[0][0] if expected else math.inf
        assert least_span_s(problem) == least_s
    assert n_some > 10


@pytest.mark.parametrize("chunk", seeds(2, 3))
def test_every_plan_of_1f1b_is_listed_best_first(chunk: int) -> None:
    """Its span is at least the one of any schedule, and the least of all is not known exactly."""
    n_longer = n_exact = 0
    for problem in problems(chunk, is_1f1b=True):
        expected, found = every_plan(problem), list(plans(CostToGo(problem)))
        spans = [least_s for least_s, _ in found]
        assert spans == pytest.approx([least_s for least_s, _ in expected])
        assert sorted(stages for _, stages in found) == sorted(stages for _, stages in expected)
        of_any = replace(problem, n_microbatches=None)
        for least_s, stages in found:
            assert span_of(problem, stages) == pytest.approx(least_s)
            assert least_s >= span_of(of_any, stages) * (1 - 1e-12)
            n_longer += least_s > span_of(of_any, stages) * (1 + 1e-9)
        least_s = min(spans, default=math.inf)
        assert least_span_s(of_any) <= least_span_s(problem) <= least_s * (1 + 1e-12)
        is_exact = bool(found) and least_span_s(problem) == pytest.approx(least_s)
        assert is_exact or len(found) != 1, "there is nothing to choose from"
        n_exact += is_exact
    assert n_longer > 5 and n_exact > 5


def test_plans_end_at_the_limit() -> None:
    problem = stages_problem(4, (1, 2), 4, 3)
    every = [least_s for least_s, _ in plans(CostToGo(problem))]
    limit_s = every[len(every) // 2]
    below = [span_s for span_s in every if span_s <= limit_s]
    assert 0 < len(below) < len(every)
    assert [span_s for span_s, _ in plans(CostToGo(problem), limit_s)] == below


def test_there_may_be_no_plan() -> None:
    problem = stages_problem(2, (4,), 6, 0)
    assert list(plans(CostToGo(problem))) == [] == every_plan(problem)
    assert math.isinf(least_span_s(problem))


def test_bad_problems() -> None:
    good = stages_problem(2, (1,), 2, 0)
    with pytest.raises(ProblemError, match="work_s: an array of shape"):
        replace(good, work_s=good.work_s[:1])
    with pytest.raises(ProblemError, match="NaN or negative"):
        replace(good, added_s=good.work_s - 100)
    with pytest.raises(ProblemError, match="1 levels, but plans have up to 2 stages"):
        replace(stages_problem(2, (1,), 2, 0, n_levels=1), n_microbatches=4)
    with pytest.raises(ProblemError, match="at least 1"):
        replace(good, n_devices=0)
