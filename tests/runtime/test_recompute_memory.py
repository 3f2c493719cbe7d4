"""Memory of recomputed blocks: live bytes of real steps against predictions, by mode."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from functools import lru_cache

import pytest

import autopar
from autopar import Device, Link, Manual, Mesh, Plan
from autopar.cost.price import peak_of_stage
from autopar.manual import Recompute
from autopar.planning import Bound, bind
from tests.helpers.harness import OPERATOR_MODES, generated_code, random_ranges
from tests.helpers.models.recompute_models import recomputing
from tests.helpers.nightly import nightly, one_in, sampled
from tests.helpers.plans import bound_of
from tests.helpers.pools import Pool
from tests.helpers.recompute_plans import batch, model
from tests.helpers.whole_steps import WholeStep, bytes_of_each

__all__ = ["generated_code"]

CLOSE = 0.03
ALONE = Manual()


@lru_cache
def planned(kind: str, manual: Manual) -> Plan:
    device = Device(1e12, 1e11, 1e10, 1e-6)
    mesh = Mesh((1, manual.n_ranks), links=[Link(1e-6, 1e-9)] * 2, device=device)
    # Two blocks a stage: with one, the rerun of a whole block may hold as much as of its parts.
    return autopar.plan(model(kind, n_layers=2 * manual.pp), mesh, batch(), manual=manual)


def bound(kind: str, mode: Recompute | None, manual: Manual) -> Bound:
    plan = planned(kind, manual)
    return bound_of(recomputing(plan, mode) if mode else plan)


def whole_step(bound: Bound) -> WholeStep:
    return WholeStep.of(bound.analysis.program, bound.pipeline, batch())


def peaks(bound: Bound) -> tuple[float, float]:
    """(measured, predicted) peak of live bytes over a whole step of one process."""
    return whole_step(bound).bytes()[0], peak_of_stage(bound.pipeline, 0, "adamw")


@lru_cache
def measured_and_predicted(
    kind: str, mode: Recompute | None, manual: Manual
) -> tuple[float, float]:
    return peaks(bound(kind, mode, manual))


# Mode -> upper bound on its peak / the peak without recompute, for attention by primitives.
FALLS: dict[Recompute, float] = {"full": 0.65, "selective": 0.75, "attention-core": 0.95}


@one_in(3)
@pytest.mark.parametrize(
    ("mode", "kind"),
    sampled(
        [*itertools.product(FALLS, ("plain", "dropped", "eager"))],
        [*((mode, "eager") for mode in FALLS), ("selective", "dropped")],
    ),
)
def test_less_is_held_and_as_much_as_is_predicted(mode: Recompute, kind: str) -> None:
    """In one microbatch, where blocks hold most of the memory, and in four."""
    whole, predicted = measured_and_predicted(kind, mode, ALONE)
    without, _ = measured_and_predicted(kind, None, ALONE)
    assert predicted == pytest.approx(whole, rel=CLOSE)
    assert whole < (FALLS[mode] if kind == "eager" else 1) * without
    part, predicted = measured_and_predicted(kind, mode, Manual(microbatch_size=4))
    assert part < whole
    assert predicted == pytest.approx(part, rel=CLOSE)


@pytest.mark.parametrize(
    ("seed", "kind"),
    sampled(
        [*itertools.product(range(6), ("dropped", "eager"))],
        [(0, "dropped"), (1, "dropped"), (2, "eager"), (3, "eager")],
    ),
)
def test_any_operators(seed: int, kind: str) -> None:
    """Ranges begin and end anywhere and have different modes."""
    plain = bound(kind, None, ALONE)
    (stage,) = plain.stages
    ranges = random_ranges(plain.analysis, random.Random(seed), OPERATOR_MODES)
    stage = replace(stage, strategy=replace(stage.strategy, recomputed=ranges))
    again = bind(plain.data, plain.analysis, plain.mesh, (stage,))
    assert again.pipeline.stages[0].segments
    measured, predicted = peaks(again)
    assert predicted == pytest.approx(measured, rel=0.01)


# Layout -> modes; each holds more than the one before.
CASES: dict[Manual, tuple[Recompute | None, ...]] = {
    Manual(tp=2, sp=True): ("full", "selective", "attention-core", "gathers", None),
    Manual(dp=2, zero=3, microbatch_size=4): ("full", None),
    Manual(pp=2, microbatch_size=4): ("full", "selective", None),
}


@nightly
def test_peaks_of_two_processes(workers: Pool) -> None:
    """With shards, gathered parameters and stages, peaks are as predicted, in the same order."""
    cases = [(manual, mode) for manual, modes in CASES.items() for mode in modes]
    pipelines, steps = [], []
    for manual, mode in cases:
        found = bound("eager", mode, manual)
        pipelines.append(found.pipeline)
        steps.append(whole_step(found))
    for rank, sizes in enumerate(workers(2).run(bytes_of_each, steps)):
        peaks: dict[Manual, list[float]] = {}
        for (manual, mode), pipeline, (measured, _) in zip(cases, pipelines, sizes, strict=True):
            predicted = peak_of_stage(pipeline, pipeline.stages_of(rank)[0], "adamw")
            assert predicted == pytest.approx(measured, rel=CLOSE), (rank, manual, mode)
            peaks.setdefault(manual, []).append(measured)
        for manual, rising in peaks.items():
            assert rising == sorted(set(rising)), (rank, manual)
