"""Layer clustering and the stage search against all choices, enumerated; and properties."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import OptionError
from autopar.passes.solvers.problem import Infeasible, ProblemError
from autopar.passes.solvers.stages.brute_force import MAX_PLANS, solve_stages_brute_force
from autopar.passes.solvers.stages.clustering import Clustering, cluster_operators
from autopar.passes.solvers.stages.problem import StagePlan, StageProblem
from autopar.passes.solvers.stages.search import solve_stages
from autopar.passes.solvers.stages.tables import least_memory_bytes

REL = 1e-9
N_BEST = 5
N_CASES = 400


def random_stages(seed: int) -> StageProblem:
    """At most 5 layers, 6 devices, 4 configurations; whole times tie, others do not."""
    rng = np.random.default_rng(seed)
    n, n_configs = int(rng.integers(1, 6)), int(rng.integers(1, 5))
    shape = (n, n, n_configs)
    whole = bool(rng.integers(0, 2))

    def numbers(most: int) -> np.ndarray:
        return rng.integers(0, most, shape) * 1.0 if whole else rng.random(shape) * most

    time_s = numbers(4)
    time_s[rng.random(shape) < rng.choice([0.0, 0.1, 0.3])] = np.inf
    once_s = numbers(6) if rng.random() < 0.7 else np.zeros(shape)
    static, activation = numbers(6), numbers(3)
    # What is not read may be anything.
    below = np.tril(np.ones((n, n), dtype=bool), -1)
    for array in (time_s, once_s, static, activation):
        array[below] = np.nan
    once_s[np.isinf(time_s)] = np.nan
    return StageProblem(
        time_s,
        once_s,
        static,
        activation,
        config_devices=(1, *(int(d) for d in rng.integers(1, 4, n_configs - 1))),
        n_devices=int(rng.integers(1, 7)),
        n_microbatches=int(rng.integers(1, 9)),
        memory_bytes=None if rng.random() < 0.2 else float(rng.integers(2, 14)),
    )


def restricted_stages(seed: int) -> StageProblem:
    """`random_stages` with a number of stages, or nodes that stages may not straddle, or both."""
    problem = random_stages(seed)
    rng = np.random.default_rng(seed + 10**6)
    kind = int(rng.integers(0, 3))
    return replace(
        problem,
        n_stages=int(rng.integers(1, 5)) if kind != 1 else None,
        node_devices=int(rng.integers(1, 4)) if kind != 0 else None,
    )


def placed_stages(seed: int) -> StageProblem:
    """`restricted_stages` with nodes, and configurations that may begin at some devices of one."""
    problem = restricted_stages(seed)
    rng = np.random.default_rng(seed + 10**7)
    each = int(rng.integers(1, 5))
    offsets = [
        None if rng.random() < 0.4 else frozenset(np.flatnonzero(rng.random(each) < 0.8).tolist())
        for _ in problem.config_devices
    ]
    return replace(problem, node_devices=each, config_offsets=tuple(offsets))


def wide_stages(seed: int) -> StageProblem:
    """`placed_stages` with three devices for each."""
    problem = placed_stages(seed)
    assert problem.node_devices is not None and problem.config_offsets is not None
    return replace(
        problem,
        config_devices=tuple(3 * n for n in problem.config_devices),
        n_devices=3 * problem.n_devices,
        node_devices=3 * problem.node_devices,
        config_offsets=tuple(
            None if of is None else frozenset(3 * at for at in of) for of in problem.config_offsets
        ),
    )


def growing_stages(seed: int, n_layers: int, n_devices: int) -> StageProblem:
    """Work that adds up over layers, shared less than perfectly by 1, 2, 4... devices."""
    rng = np.random.default_rng(seed)
    sizes = [2**e for e in range(n_devices.bit_length()) if 2**e <= n_devices]
    work = np.cumsum([0, *(1 + 0.3 * rng.random(n_layers))])
    total = np.maximum(work[None, 1:] - work[:-1, None], 0)[:, :, None]
    size = np.array(sizes)
    time_s = np.where(total > 0, total * 1e-3 / size**0.9, np.inf)
    return StageProblem(
        time_s,
        once_s=total * 2e-3 / size * (1 + (size > 1)),
        static_bytes=16 * total / size,
        activation_bytes=10 * total / size,
        config_devices=tuple(sizes),
        n_devices=n_devices,
        n_microbatches=16,
        memory_bytes=float(80 * work[-1] / n_devices),
    )


def assert_legal(problem: StageProblem, plan: StagePlan) -> None:
    """Restates the definition, apart from the modules under test."""
    stages, n_stages = plan.stages, len(plan.stages)
    assert [s.first for s in stages] == [0, *(s.last + 1 for s in stages[:-1])]
    assert stages[-1].last == problem.n_layers - 1
    sizes = [problem.config_devices[s.config] for s in stages]
    assert sum(sizes) == problem.n_devices
    assert problem.n_stages in (None, n_stages)
    if problem.node_devices is not None:
        for first, size in zip(itertools.accumulate([0, *sizes]), sizes, strict=False):
            node, at = divmod(first, problem.node_devices)
            inside = (first + size - 1) // problem.node_devices == node
            assert inside if size <= problem.node_devices else at == 0
    if problem.config_offsets is not None and problem.node_devices is not None:
        for first, stage in zip(itertools.accumulate([0, *sizes]), stages, strict=False):
            offsets = problem.config_offsets[stage.config]
            assert offsets is None or first % problem.node_devices in offsets
    times = [problem.time_s[s.first, s.last, s.config] for s in stages]
    once = [problem.once_s[s.first, s.last, s.config] for s in stages]
    total = sum(times) + (problem.n_microbatches - 1) * max(times) + max(once)
    assert plan.objective_s == pytest.approx(total, rel=REL)
    assert (plan.t_max_s, plan.once_s) == (max(times), max(once))
    for s, stage in enumerate(stages):
        in_flight = min(problem.n_microbatches, n_stages - s)
        size = problem.static_bytes[stage] + in_flight * problem.activation_bytes[stage]
        assert problem.memory_bytes is None or size <= problem.memory_bytes * (1 + REL)
        assert size <= plan.peak_bytes


@pytest.mark.parametrize("make", [random_stages, restricted_stages, placed_stages, wide_stages])
@pytest.mark.parametrize("chunk", range(4))
def test_search_equals_every_plan_counted_out(
    chunk: int, make: Callable[[int], StageProblem]
) -> None:
    n_feasible = 0
    for seed in range(chunk * N_CASES // 4, (chunk + 1) * N_CASES // 4):
        problem = make(seed)
        expected = solve_stages_brute_force(problem, N_BEST)
        for n_best in (1, N_BEST):
            found = solve_stages(problem, n_best)
            if isinstance(expected, Infeasible):
                assert found == expected, seed
                continue
            assert not isinstance(found, Infeasible), seed
            for plan in found:
                assert_legal(problem, plan)
            # Equal numbers are equal plans: ties go by number of stages, then by stages.
            assert found == expected[:n_best], seed
            assert (found[0].gap, found[0].bound_s) == (0.0, found[0].objective_s)
        n_feasible += not isinstance(expected, Infeasible)
    assert n_feasible >= N_CASES // 16


def test_random_cases_cover_what_matters() -> None:
    """Memory that binds, memory that rules out all plans, forbidden stages that do, ties."""
    kinds = {"free": 0, "binds": 0, "too little": 0, "forbidden": 0, "ties": 0}
    for seed in range(N_CASES):
        problem = random_stages(seed)
        found = solve_stages(problem, 2)
        roomy = solve_stages(replace(problem, memory_bytes=None))
        if isinstance(found, Infeasible):
            kinds["forbidden" if found.min_bytes is None else "too little"] += 1
        else:
            assert not isinstance(roomy, Infeasible)
            kinds["binds" if found[0].stages != roomy[0].stages else "free"] += 1
            kinds["ties"] += len(found) == 2 and found[0].objective_s == found[1].objective_s
    assert min(kinds.values()) >= 20, kinds


def test_infeasible_names_the_memory_that_is_enough() -> None:
    n_checked = 0
    for seed in range(N_CASES):
        problem = random_stages(seed)
        found = solve_stages(problem)
        if isinstance(found, Infeasible) and found.min_bytes is not None:
            assert "are missing" in found.reason
            enough = replace(problem, memory_bytes=found.min_bytes)
            plans = solve_stages(enough)
            assert not isinstance(plans, Infeasible)
            assert plans[0].peak_bytes == found.min_bytes == least_memory_bytes(problem)
            less = replace(problem, memory_bytes=found.min_bytes * (1 - 1e-6))
            assert isinstance(solve_stages(less), Infeasible)
            n_checked += 1
    assert n_checked >= 20


@given(st.integers(0, 10**6), st.floats(0, 10))
@settings(max_examples=100, deadline=None)
def test_more_memory_is_never_worse(seed: int, more_bytes: float) -> None:
    problem = random_stages(seed)
    found = solve_stages(problem)
    if isinstance(found, Infeasible) or problem.memory_bytes is None:
        return
    roomier = solve_stages(replace(problem, memory_bytes=problem.memory_bytes + more_bytes))
    assert not isinstance(roomier, Infeasible)
    assert roomier[0].objective_s <= found[0].objective_s * (1 + REL)


@given(st.integers(0, 10**6), st.integers(0, 10**6))
@settings(max_examples=100, deadline=None)
def test_slower_stages_never_give_a_faster_plan(seed: int, by: int) -> None:
    problem = random_stages(seed)
    rng = np.random.default_rng(by)
    slower = replace(
        problem,
        time_s=problem.time_s + rng.integers(0, 3, problem.time_s.shape),
        once_s=problem.once_s + rng.integers(0, 3, problem.once_s.shape),
    )
    before, after = solve_stages(problem), solve_stages(slower)
    assert isinstance(before, Infeasible) == isinstance(after, Infeasible)
    if not isinstance(before, Infeasible) and not isinstance(after, Infeasible):
        assert before[0].objective_s <= after[0].objective_s * (1 + REL)


def test_unequal_stages_and_submeshes() -> None:
    """Layers of 1 and 3 seconds: one device for the first and three for the second are the best."""
    time_s = np.full((2, 2, 2), np.inf)
    time_s[0, 0] = [1.0, 0.5]  # on one device, on three
    time_s[1, 1] = [3.0, 1.0]
    time_s[0, 1] = [4.0, 1.5]
    zero = np.zeros_like(time_s)
    problem = StageProblem(time_s, zero, zero, zero, (1, 3), 4, 10)
    found = solve_stages(problem)
    assert not isinstance(found, Infeasible)
    assert found[0].stages == ((0, 0, 0), (1, 1, 1))
    assert found[0].objective_s == 1 + 1 + 9 * 1


def test_configurations_larger_than_the_machine_are_never_used() -> None:
    ones = np.ones((3, 3, 2))
    problem = StageProblem(ones, ones, ones, ones, (1, 9), 2, 4)
    found = solve_stages(problem, N_BEST)
    assert found == solve_stages_brute_force(problem, N_BEST)
    assert not isinstance(found, Infeasible) and len(found) == 2


def test_early_stages_hold_more_microbatches() -> None:
    """1F1B: stage s of S holds S - s microbatches, never more than there are."""
    time_s = np.full((3, 3, 1), np.inf)
    time_s[range(3), range(3), 0] = 1.0
    one, zero = np.ones_like(time_s), np.zeros_like(time_s)
    for n_microbatches, needed_bytes in ((1, 1), (2, 2), (3, 3), (8, 3)):
        problem = StageProblem(time_s, zero, zero, one, (1,), 3, n_microbatches, 0.5)
        found = solve_stages(problem)
        assert isinstance(found, Infeasible) and found.min_bytes == needed_bytes


@pytest.mark.parametrize("seed", range(3))
def test_larger_problems_are_proven_and_repeatable(seed: int) -> None:
    problem = growing_stages(seed, n_layers=12, n_devices=16)
    found = solve_stages(problem, 4)
    assert found == solve_stages(problem, 4)
    assert not isinstance(found, Infeasible)
    assert len({plan.stages for plan in found}) == 4
    costs = [plan.objective_s for plan in found]
    assert costs == sorted(costs) and found[0].gap == 0
    for plan in found:
        assert_legal(problem, plan)
    assert solve_stages(problem) == found[:1]


@pytest.mark.parametrize("seed", range(3))
def test_a_gap_is_kept_and_reported(seed: int) -> None:
    problem = growing_stages(seed, n_layers=12, n_devices=16)
    exact, near = solve_stages(problem), solve_stages(problem, gap_goal=0.2)
    assert not isinstance(exact, Infeasible) and not isinstance(near, Infeasible)
    assert near[0].bound_s <= exact[0].objective_s * (1 + REL)
    assert near[0].objective_s <= exact[0].objective_s / (1 - 0.2)
    assert 0 <= near[0].gap <= 0.2


def test_plans_far_from_the_best_may_be_left_out() -> None:
    n_shorter = 0
    for seed in range(N_CASES):
        problem = random_stages(seed)
        every, near = solve_stages(problem, N_BEST), solve_stages(problem, N_BEST, within_rel=0.1)
        if isinstance(every, Infeasible) or isinstance(near, Infeasible):
            assert every == near
            continue
        limit_s = every[0].objective_s * (1 + 0.1) * (1 + REL)
        assert near == tuple(plan for plan in every if plan.objective_s <= limit_s), seed
        n_shorter += len(near) < len(every)
    assert n_shorter >= 20


def test_bad_stage_problems_are_refused() -> None:
    good = random_stages(0)
    for change in (
        {"time_s": -np.ones_like(good.time_s)},
        {"time_s": good.time_s[:, :, :0]},
        {"once_s": np.full_like(good.time_s, np.nan)},
        {"static_bytes": np.full_like(good.time_s, np.inf)},
        {"n_devices": 0},
        {"n_microbatches": 0},
        {"config_devices": ()},
        {"memory_bytes": math.nan},
        {"n_stages": 0},
        {"node_devices": 0},
        {"config_offsets": (None,) * len(good.config_devices)},
        {"config_offsets": (), "node_devices": 2},
    ):
        with pytest.raises(ProblemError):
            replace(good, **change)
    with pytest.raises(OptionError, match="n_best"):
        solve_stages(good, 0)
    with pytest.raises(OptionError, match="gap_goal"):
        solve_stages(good, gap_goal=1.0)
    with pytest.raises(OptionError, match="within"):
        solve_stages(good, within_rel=-0.1)


def test_brute_force_refuses_what_it_cannot_count() -> None:
    shape = (9, 9, 4)
    ones = np.ones(shape)
    # None of those that are counted has the wanted number of stages, so none is evaluated.
    problem = StageProblem(ones, ones, ones, ones, (1, 1, 1, 1), 9, 4, n_stages=1)
    with pytest.raises(ProblemError, match=str(MAX_PLANS)):
        solve_stages_brute_force(problem)


def random_operators(seed: int) -> tuple[list[float], list[float], int, float]:
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 10))
    flops = rng.integers(0, 6, n) * 1.0
    cuts = rng.integers(0, 5, n - 1) * 1.0
    n_layers = int(rng.integers(1, n + 1))
    return flops.tolist(), cuts.tolist(), n_layers, float(rng.choice([0.0, 0.2, 0.5, 2.0]))


def every_clustering(
    flops: list[float], cuts: list[float], n_layers: int
) -> list[tuple[float, float, tuple[int, ...]]]:
    """(largest flops, largest cut, ends) of every partition."""
    n, out = len(flops), []
    for inner in itertools.combinations(range(1, n), n_layers - 1):
        bounds = (0, *inner, n)
        work = [sum(flops[a:b]) for a, b in itertools.pairwise(bounds)]
        out.append((max(work), max((cuts[i - 1] for i in inner), default=0.0), bounds[1:]))
    return out


@pytest.mark.parametrize("chunk", range(2))
def test_clustering_equals_every_partition_counted_out(chunk: int) -> None:
    n_infeasible = 0
    for seed in range(chunk * 200, chunk * 200 + 200):
        flops, cuts, n_layers, delta = random_operators(seed)
        limit = (1 + delta) * sum(flops) / n_layers * (1 + REL)
        every = every_clustering(flops, cuts, n_layers)
        within = [p for p in every if p[0] <= limit]
        found = cluster_operators(flops, cuts, n_layers, delta)
        assert found == cluster_operators(flops, cuts, n_layers, delta)
        if not within:
            assert isinstance(found, Infeasible), seed
            n_infeasible += 1
            continue
        assert isinstance(found, Clustering), seed
        assert (found.largest_flops, found.largest_cut_bytes, found.ends) in within
        least = min(p[1] for p in within)
        assert found.largest_cut_bytes == least, seed

        def squares(ends: tuple[int, ...], flops: list[float] = flops) -> float:
            return sum(sum(flops[a:b]) ** 2 for a, b in itertools.pairwise((0, *ends)))

        evenest = min(squares(p[2]) for p in within if p[1] == least)
        assert squares(found.ends) == evenest, seed
        assert [i for layer in found.layers() for i in layer] == list(range(len(flops)))
    assert 10 <= n_infeasible <= 150


def test_clustering_names_the_delta_that_works() -> None:
    found = cluster_operators([1, 1, 6], [0, 0], 2, delta=0.0)
    assert isinstance(found, Infeasible)
    assert "the least possible delta is 0.5" in found.reason
    assert cluster_operators([1, 1, 6], [0, 0], 2, delta=0.5) == Clustering((2, 3), 0.0, 6.0)


def test_equal_blocks_are_cut_between_blocks() -> None:
    """Eight blocks of four operators; only the stream between blocks is thin."""
    flops = [2.0, 4.0, 0.0, 4.0] * 8
    cuts = ([30.0, 30.0, 30.0, 10.0] * 8)[:-1]
    found = cluster_operators(flops, cuts, 4)
    assert found == Clustering((8, 16, 24, 32), 10.0, 20.0)


def test_bad_clusterings_are_refused() -> None:
    for flops, cuts, n_layers in (
        ([1.0], [], 2),
        ([1.0, 1.0], [1.0], 0),
        ([1.0, 1.0], [], 1),
        ([1.0, math.nan], [1.0], 1),
        ([1.0, 1.0], [-1.0], 1),
    ):
        with pytest.raises(ProblemError):
            cluster_operators(flops, cuts, n_layers)
    with pytest.raises(ProblemError, match="delta"):
        cluster_operators([1.0], [], 1, delta=-0.1)
