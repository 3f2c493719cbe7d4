"""Planning that is stopped: by a time limit, which leaves the best plan so far, or by the user."""

from __future__ import annotations

import itertools
import json
import time
from dataclasses import replace
from functools import cache
from typing import Any

import numba
import pytest
import torch

import autopar
from autopar.errors import AutoparError
from autopar.passes.search import time_limit
from autopar.passes.search.time_limit import TimeLimit, TimeUp
from autopar.passes.solvers.problem import compile_s
from autopar.planning import Plan
from autopar.plans import Alternative
from autopar.report import optimality
from tests.helpers.harness import Mlp


def planned(**options: Any) -> Plan:
    torch.manual_seed(0)
    batch = {name: torch.zeros(16, 64) for name in ("x", "y")}
    mesh = autopar.Mesh((1, 4), hardware="a100-80gb")
    return autopar.plan(Mlp(width=64, n_layers=4), mesh, batch, **options)


@cache
def undisturbed(stages: int | str = "auto") -> Plan:
    return planned(stages=stages)


def test_after_the_limit_there_is_the_best_plan_so_far_and_its_gap() -> None:
    whole, limited = undisturbed(), planned(time_limit_s=1e-9)
    assert len(limited.data.alternatives) < len(whole.data.alternatives)
    assert "not tried when time_limit_s=1e-09 had passed" in limited.explain()
    # What is proven covers what more time finds, on this model of launches and latencies too.
    assert limited.gap is not None and 0 < limited.gap < 1
    assert limited.bound_s is not None and limited.bound_s <= whole.predicted.step_time_s
    assert json.loads(limited.data.to_json())["bound_s"] == limited.bound_s
    assert "no plan takes less than" in limited.explain()
    assert whole.bound_s is not None and limited.bound_s <= whole.bound_s
    assert whole.gap is not None and 0 <= whole.gap < limited.gap


def test_without_a_plan_the_search_ends_soon_after_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A clock on which every look takes a minute."""
    clock = itertools.count(0.0, 60.0)
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    with pytest.raises(AutoparError, match="no plan that fits was found in twice") as caught:
        planned(time_limit_s=1.0)
    assert "raise time_limit_s" in (caught.value.hint or "")


def test_what_is_compiled_meanwhile_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten seconds, of which 0.2 are for what comes after the search."""
    now_s, compiling_s = [0.0], [5.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now_s[0])
    monkeypatch.setattr(time_limit, "compile_s", lambda: compiling_s[0])
    limit = TimeLimit.after(10.0)
    limit.has_plan = True
    with limit.running():
        now_s[0], compiling_s[0] = 20.0, 20.0
        limit.check()
        assert limit.left_s == pytest.approx(4.8)
        now_s[0] = 25.0
        with pytest.raises(TimeUp):
            limit.check()


def test_seconds_of_compiling_are_counted() -> None:
    before_s = compile_s()
    assert numba.njit(lambda x: x + 1)(1) == 2
    assert compile_s() > before_s


def test_what_the_tie_gives_is_told_from_what_is_not_known() -> None:
    data = undisturbed().data
    step_s = undisturbed().predicted.step_time_s
    said = optimality(data, step_s)
    faster = Alternative("faster", 0.99 * step_s)
    estimated = Alternative("estimated", 0.5 * step_s, is_estimate=True)
    alternatives = (*data.alternatives, faster, estimated)
    now = optimality(replace(data, alternatives=alternatives), step_s)
    assert "not as simple" not in said
    assert now == said.replace(
        " below this", " below this (the fastest found, not as simple: 1.0%)"
    )


@pytest.mark.parametrize("stages", [2, "auto"])
def test_an_interrupt_leaves_nothing_behind_and_a_long_limit_changes_nothing(
    stages: int | str,
) -> None:
    said: list[str] = []

    def interrupt(text: str) -> None:
        said.append(text)
        if len(said) == 6:
            raise KeyboardInterrupt

    before = undisturbed(stages)
    with pytest.raises(KeyboardInterrupt):
        planned(stages=stages, progress=interrupt)
    assert len(said) == 6
    assert planned(stages=stages, time_limit_s=600.0).data == before.data
