"""Fitting constants to published runs: planted values, priors, outliers, shipped constants."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from autopar.cost.hardware import Profile, load_profile
from autopar.cost.published.fit import (
    PRIORS,
    Constant,
    at_priors,
    constants_of,
    fit,
    leave_one_out,
    log_error,
    with_values,
)
from autopar.cost.published.predict import step_model
from autopar.cost.published.rows import PublishedRun, read_row

PROFILE = "a100-80gb"
RATE = ("device.achieved_flops_fraction.float16", "device.achieved_flops_fraction.bfloat16")
FORWARD, BACKWARD = "device.attention_fraction.forward", "device.attention_fraction.backward"
ACROSS = "link.inter_node.s_per_byte"
# These priors are so weak that runs alone decide.
CONSTANTS = (
    Constant(RATE, 0.8, 10.0),
    Constant((FORWARD,), 0.57, 10.0),
    Constant((BACKWARD,), 0.5, 10.0),
    Constant((ACROSS,), 4e-11, 10.0),
)
GATED = {"layers": 4, "hidden": 2048, "heads": 16, "ffn": 5632, "seq": 2048, "vocab": 32000}
LONG = GATED | {"hidden": 1024, "ffn": 2816, "seq": 32768}


def row_of(run_id: str, model: Mapping[str, Any] = GATED, **changes: Any) -> PublishedRun:
    """A Llama run on one node, without a published figure."""
    return read_row({
        "id": run_id, "source": "arXiv 2407.00001", "profile": PROFILE, "model": model,
        "tp": 1, "pp": 1, "dp": 8, "microbatch": 2, "global_batch": 64, "dtype": "bf16",
        "recompute": "none",
    } | changes)  # fmt: skip


def published(row: PublishedRun, profile: Profile, factor: float = 1.0) -> PublishedRun:
    """The run with the step time that `profile` predicts, times `factor`."""
    return replace(row, step_time_s=factor * step_model(row, profile).step_time_s())


# Each kind of work in two sizes: matmuls, attention in both passes, recompute, several nodes.
ROWS = [
    row_of("products"),
    row_of("wide", GATED | {"hidden": 4096, "heads": 32, "ffn": 11264}),
    row_of("long", LONG, microbatch=1, global_batch=8),
    row_of("longer", LONG | {"seq": 65536}, microbatch=1, global_batch=8),
    row_of("long again", LONG, microbatch=1, global_batch=8, recompute="full"),
    row_of("longer again", LONG | {"seq": 65536}, microbatch=1, global_batch=8, recompute="full"),
    row_of("nodes", dp=64, global_batch=128),
    row_of("more nodes", dp=256, global_batch=512),
]
PLANTED = {**dict.fromkeys(RATE, 0.62), FORWARD: 0.7, BACKWARD: 0.42, ACROSS: 6e-11}


@pytest.fixture(scope="module")
def planted() -> list[PublishedRun]:
    profile = with_values(load_profile(PROFILE), PLANTED)
    return [published(row, profile) for row in ROWS]


@pytest.mark.parametrize("groups", [[], [("products", "wide", "nodes"), ("unknown", "long")]])
def test_planted_constants_are_found(
    planted: list[PublishedRun], groups: list[tuple[str, ...]]
) -> None:
    found = fit(PROFILE, planted, CONSTANTS, groups)
    assert (found.profile, found.n_runs) == (PROFILE, len(planted))
    assert found.values == pytest.approx(PLANTED, rel=0.01)
    fitted = with_values(load_profile(PROFILE), found.values)
    assert max(abs(log_error(row, fitted)) for row in planted) < 0.005


def test_priors_hold_where_no_run_is(planted: list[PublishedRun]) -> None:
    priors = {key: c.prior for c in CONSTANTS for key in c.keys}
    elsewhere = [replace(row, profile="h100-sxm") for row in planted]
    silent = [replace(row, step_time_s=None) for row in planted]
    for rows in ([], elsewhere, silent):
        found = fit(PROFILE, rows, CONSTANTS)
        assert found.n_runs == 0
        assert found.values == pytest.approx(priors)


def test_priors_hold_for_what_no_run_tells(planted: list[PublishedRun]) -> None:
    """Runs on one node say nothing about links between nodes."""
    values = fit(PROFILE, planted[:6], CONSTANTS).values
    assert values[ACROSS] == pytest.approx(4e-11)
    assert values[RATE[0]] == pytest.approx(PLANTED[RATE[0]], rel=0.02)


def test_the_nearer_the_prior_is_held_the_less_a_run_moves_it(planted: list[PublishedRun]) -> None:
    """The number of steps does not matter: all converge to the same minimum."""
    constants = [[Constant(RATE, 0.8, sigma)] for sigma in (1e-4, 0.03, 0.1, 10.0)]
    rates, later = (
        [fit(PROFILE, planted[:2], one, n_steps=n).values[RATE[0]] for one in constants]
        for n in (8, 24)
    )
    assert rates == pytest.approx(later, rel=1e-3)
    assert rates == sorted(rates, reverse=True)
    assert rates[0] == pytest.approx(0.8, rel=1e-4)
    assert rates[1] - rates[2] > 0.01


def test_a_run_unlike_the_others_moves_constants_little(planted: list[PublishedRun]) -> None:
    """One of six takes twice its time: least squares would make all 2 ** (1/6) as long, +12%."""
    odd = planted[0]
    alike = [replace(odd, id=str(i)) for i in range(5)]
    constants = CONSTANTS[:1]
    base = with_values(load_profile(PROFILE), PLANTED)
    planted_rate = PLANTED[RATE[0]]
    slow = published(replace(odd, id="odd"), base, factor=2.0)
    alone = fit(PROFILE, [slow], constants, n_steps=8).values[RATE[0]]
    among = fit(PROFILE, [*alike, slow], constants, n_steps=8).values[RATE[0]]
    assert alone < 0.6 * planted_rate
    assert 0.96 * planted_rate < among < planted_rate


def test_runs_of_a_group_are_held_to_each_other(planted: list[PublishedRun]) -> None:
    """All runs are 20% slower than planted, and one constant is free. Without a group it absorbs
    the 20%; in a group it explains only what differs between the runs."""
    slower = [
        replace(row, step_time_s=1.2 * row.step_time_s)
        for row in (planted[0], *planted[6:])
        if row.step_time_s
    ]
    known = [Constant((key,), PLANTED[key], 1e-6) for key in (*RATE, FORWARD, BACKWARD)]
    group = tuple(row.id for row in slower)
    apart = fit(PROFILE, slower, [CONSTANTS[3], *known]).values[ACROSS]
    together = fit(PROFILE, slower, [CONSTANTS[3], *known], [group]).values[ACROSS]
    assert apart > 1.5 * PLANTED[ACROSS]
    assert PLANTED[ACROSS] < together < 1.5 * PLANTED[ACROSS]


def test_a_paper_is_predicted_without_its_own_runs() -> None:
    """Doubled times of one paper give an error of -50%, since only the others are fitted."""
    small = [
        row_of(f"{paper} {i}", profile="a100-40gb", source=f"arXiv 2407.0000{paper}", microbatch=i)
        for paper in (1, 2, 3)
        for i in (1, 2)
    ]
    at_prior = at_priors("a100-40gb")
    rows = [published(row, at_prior, 2.0 if row.id.startswith("3") else 1.0) for row in small]
    rows.append(replace(rows[0], id="no time", step_time_s=None))
    found = leave_one_out(rows, [("1 1", "1 2", "3 1")])
    papers = [f"arXiv 2407.0000{k}" for k in (1, 2, 3)]
    assert list(found) == papers
    assert [set(errors) for errors in found.values()] == [{f"{k} 1", f"{k} 2"} for k in (1, 2, 3)]
    assert found[papers[2]] == {key: pytest.approx(-0.5, abs=1e-9) for key in ("3 1", "3 2")}
    assert all(0.0 < error < 1.0 for paper in papers[:2] for error in found[paper].values())


FITTED = tuple(tomllib.loads(PRIORS.read_text())["profile"])


@pytest.mark.parametrize("name", FITTED)
def test_constants_are_keys_of_their_profile(name: str) -> None:
    quantities = load_profile(name).quantities
    keys = [key for constant in constants_of(name) for key in constant.keys]
    assert len(keys) == len(set(keys))
    assert set(keys) <= set(quantities)
    assert all(c.prior > 0 and 0 < c.sigma < 1 for c in constants_of(name))
    said = {key for key, found in quantities.items() if found.source.startswith("fit to")}
    assert said <= set(keys)
    assert RATE[0] in said
