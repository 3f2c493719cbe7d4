"""The planner's choice against every plan of small models, without any part of the search.

A case is a random program, machine, set of options and memory limit. Its plans are every view of
the devices with every number of microbatches, and all placements on it
(`tests/helpers/every_placement.py`).

Cases from 300 on run in compiled regions, those from 400 on are on three axes. `make nightly` takes
300 others. In `MISSED` the search does not find the optimum. Its bound is below it in all.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import pytest
import torch
from _pytest.mark import ParameterSet
from torch import Tensor, nn
from torch.nn import functional

from autopar import Device, Link, Mesh
from autopar.cost.hardware import Hardware, resolve
from autopar.cost.laws import CostModel
from autopar.cost.price import StepPricer
from autopar.options import Options
from autopar.passes.analysis import Analysis, compute_dtype
from autopar.passes.inter import (
    distinct_views,
    microbatch_counts,
)
from autopar.passes.search import Planner, PlanningResult
from tests.helpers.captures import captured
from tests.helpers.every_placement import REL, Plan, Space
from tests.helpers.nightly import nightly, one_in

# Case 5 takes ten seconds.
BY_DAY, N_CASES = frozenset(range(15)) - {5}, 300
# Others between 300 and 312 take up to two minutes.
COMPILED = 302, 303, 306, 307, 309, 311
# One linear layer on 2 x 2 x 2 devices. Others up to 416 take half a minute, and 410 ten.
THREE_AXES = 404, 400, 401, 403, 405, 408, 409, 412, 413, 416, 467
# Seeds whose plan is slower than the optimum by more than the tolerance, and by how much. In all
# but one memory is limited, and peaks are above the solver's bytes by what is gathered at a time.
MISSES = "neither the bound nor a rival leads to it"
MISSED: dict[int, float] = {
    169: 0.021, 199: 0.024, 227: 0.05, 263: 0.055, 267: 0.017,
}  # fmt: skip
CUBE = {"dp": 2, "cp": 2, "tp": 2}
FORBID = ("data", "tensor", "sequence", "zero1", "zero2", "zero3")


class Net(nn.Module):
    """One or two linear layers with an activation, under a mean of squares."""

    def __init__(self, width: int, hidden: int | None, bias: bool, activation: str) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden or width, bias=bias)
        self.down = nn.Linear(hidden, width, bias=bias) if hidden else nn.Identity()
        self.activation = activation

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        inner = getattr(functional, self.activation)(self.up(x))
        return (self.down(inner) - y).pow(2).mean()


# -- random cases ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A program, a machine and options; `spaces` are all plans with one stage."""

    analysis: Analysis
    mesh: Mesh
    hardware: Hardware
    options: Options
    spaces: tuple[Space, ...]

    def best(self, limit_bytes: float, known: Plan | None = None) -> Plan:
        for space in self.spaces:
            known = space.best(limit_bytes, known)
        assert known is not None
        return known

    def planner(self, limit_bytes: float) -> Planner:
        options = replace(self.options, memory_limit=math.floor(limit_bytes))
        return Planner(self.analysis, self.mesh, self.hardware, options)


def case_of(seed: int) -> Case:
    """One linear layer on all views of 2 or 4 devices or three axes of 8, or two layers on one axis
    of up to 8.

    Even seeds often have several numbers of microbatches.
    """
    rng = random.Random(seed)
    is_cube = seed in THREE_AXES
    has_two = rng.random() < 0.6 and not is_cube
    n_ranks = 8 if is_cube else rng.choice((2, 4, 8) if has_two else (2, 4))
    width, hidden = (rng.choice((8, 16, 32, 64)) for _ in range(2))
    bias = rng.random() < 0.4 and not has_two and n_ranks == 2
    model = Net(width, hidden if has_two else None, bias, rng.choice(("gelu", "relu")))
    rows = rng.choice((8, 16, 32, 64))
    batch = {name: torch.zeros(rows, width, dtype=torch.float64) for name in ("x", "y")}
    analysis = Analysis.of(captured(model, batch, precision="fp64"))
    options = Options.of(
        stages=1,
        recompute="none",
        tie=0.0,
        microbatches=rng.choice((1, 2, 4) if seed % 2 else (1, 2, "auto")),
        mesh_shape=CUBE if is_cube else rng.choice(({"dp": 1}, {"tp": 1})) if has_two else "auto",
        forbid=tuple(word for word in FORBID if rng.random() < 0.15),
    )
    mesh = machine(rng, n_ranks)
    hardware = resolve(mesh, compute_dtype(analysis))
    if seed >= N_CASES and not is_cube:
        hardware = replace(hardware, kernels="compiled")
    spaces = tuple(spaces_of(analysis, mesh, hardware, options))
    return Case(analysis, mesh, hardware, options, spaces)


def machine(rng: random.Random, n_ranks: int) -> Mesh:
    """Compute, launches, latencies and bytes sent all matter in some cases."""
    shape = rng.choice([(n_ranks,), (2, n_ranks // 2)] if n_ranks > 2 else [(n_ranks,)])
    links = [Link(10 ** rng.uniform(-8, -5), 10 ** rng.uniform(-11, -8)) for _ in shape]
    links.sort(key=lambda link: -link.s_per_byte)
    device = Device(
        10 ** rng.uniform(9, 12), 10 ** rng.uniform(10, 12), 1e12, 10 ** rng.uniform(-8, -6)
    )
    return Mesh(shape, links=links, device=device)


def spaces_of(
    analysis: Analysis, mesh: Mesh, hardware: Hardware, options: Options
) -> Iterator[Space]:
    pricer = StepPricer(mesh, hardware, options.optimizer)
    for view in distinct_views(mesh, hardware, options, [mesh.n_ranks]):
        for m in microbatch_counts(analysis, options, mesh.n_ranks):
            yield Space(analysis, CostModel.of(view, hardware), m, options.forbid, pricer)


@dataclass(frozen=True)
class Answer:
    """The optimum of a case within a memory limit."""

    seed: int
    case: Case
    limit_bytes: float
    best: Plan


@lru_cache(maxsize=64)
def answer_of(seed: int) -> Answer:
    """Every other case has a limit between the leanest and the fastest plan's peak."""
    case = case_of(seed)
    fastest, limit_bytes = case.best(math.inf), 1e12
    if seed % 2 == 0:
        return Answer(seed, case, limit_bytes, fastest)
    lean = min((space.leanest() for space in case.spaces), key=lambda plan: plan.peak_bytes)
    share = random.Random(seed).uniform(0.1, 0.9)
    if lean.peak_bytes < fastest.peak_bytes:
        limit_bytes = math.ceil(lean.peak_bytes * (1 - share) + fastest.peak_bytes * share)
    return Answer(seed, case, limit_bytes, case.best(limit_bytes, lean))


# -- the search against the optimum ----------------------------------------------------------------


@lru_cache(maxsize=64)
def planned(seed: int) -> PlanningResult:
    """What the search finds."""
    answer = answer_of(seed)
    return answer.case.planner(answer.limit_bytes).run()


def is_near(found: PlanningResult, answer: Answer) -> bool:
    """Is the optimum faster than the chosen plan by no more than the tolerance?"""
    least_s = found.solved.step_time_s * (1 - answer.case.options.tolerance)
    return answer.best.step_time_s >= least_s


def marked(known: Mapping[int, float]) -> list[ParameterSet]:
    """All seeds; those that are known to fail must."""
    marks = {s: [nightly] for s in range(N_CASES) if s not in BY_DAY}
    for seed, loss in known.items():
        marks.setdefault(seed, []).append(
            pytest.mark.xfail(strict=True, reason=f"{loss:.1%} above the optimum: {MISSES}")
        )
    return [pytest.param(s, marks=marks.get(s, [])) for s in range(N_CASES)]


@one_in(6)
@pytest.mark.parametrize("seed", marked(MISSED))
def test_no_plan_is_faster_by_more_than_the_tolerance(seed: int) -> None:
    answer, found = answer_of(seed), planned(seed)
    best, found_s = answer.best, found.solved.step_time_s
    said = f"seed {seed}: optimum {best.step_time_s:.6g} s, chosen {found_s:.6g} s, {best}"
    assert found_s >= best.step_time_s * (1 - REL), f"not all plans were tried; {said}"
    assert is_near(found, answer), said
    if not found.solved.candidate.recipe:
        assert found.forbid == answer.case.options.forbid, "a rival forbids more"


@one_in(3)
@pytest.mark.parametrize("seed", COMPILED)
def test_compiled_plans_are_found_within_their_bounds(seed: int) -> None:
    answer, found = answer_of(seed), planned(seed)
    assert found.solved.step_time_s >= answer.best.step_time_s * (1 - REL)
    assert is_near(found, answer), (seed, answer.best)
    assert found.bound_s is not None
    assert 0 < found.bound_s <= answer.best.step_time_s * (1 + REL)


@one_in(len(THREE_AXES))
@pytest.mark.parametrize("seed", THREE_AXES)
def test_three_axes_are_searched_within_their_bounds(seed: int) -> None:
    answer, found = answer_of(seed), planned(seed)
    best_s, found_s, bound_s = answer.best.step_time_s, found.solved.step_time_s, found.bound_s
    said = f"seed {seed}: optimum {best_s:.6g} s, chosen {found_s:.6g} s, {answer.best}"
    assert found_s >= best_s * (1 - REL), f"not all plans were tried; {said}"
    assert is_near(found, answer), said
    assert bound_s is not None and 0 < bound_s <= best_s * (1 + REL), said
    if seed % 2 == 0:  # memory is not limited
        assert bound_s >= found_s * 0.99, said


@one_in(3)
@pytest.mark.parametrize("seed", marked({}))
def test_no_bound_is_above_the_optimum(seed: int) -> None:
    best, bound_s = answer_of(seed).best, planned(seed).bound_s
    said = f"seed {seed}: optimum {best.step_time_s:.6g} s, bound {bound_s} s, {best}"
    assert bound_s is not None and 0 < bound_s <= best.step_time_s * (1 + REL), said
