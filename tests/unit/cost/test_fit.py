"""Fitting constants to published runs: planted values, priors, outliers, shipped constants."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from autopar.cost.hardware import CONSTANTS as KNOWN
from autopar.cost.hardware import Software, available_software, load_software
from autopar.cost.published import fitted_constants
from autopar.cost.published.fit import Constant, fit, leave_one_out, log_error
from autopar.cost.published.rows import PublishedRun, read_row
from autopar.options import SOFTWARE

NAME = "megatron-core"
RATE, ACROSS = "sustained_rate_ratio", "network_time_ratio"
# These priors are so weak that runs alone decide.
CONSTANTS = (Constant(RATE, 0.8, 10.0), Constant(ACROSS, 1.0, 10.0))
GATED = {"layers": 4, "hidden": 2048, "heads": 16, "ffn": 5632, "seq": 2048, "vocab": 32000}


def row_of(run_id: str, model: Mapping[str, Any] = GATED, **changes: Any) -> PublishedRun:
    """A Llama run on one node, without a published figure."""
    return read_row({
        "id": run_id, "source": "arXiv 2407.00001", "profile": "a100-80gb", "model": model,
        "tp": 1, "pp": 1, "dp": 8, "microbatch": 2, "global_batch": 64, "dtype": "bf16",
        "recompute": "none",
    } | changes)  # fmt: skip


def published(row: PublishedRun, software: Software, factor: float = 1.0) -> PublishedRun:
    """The run with the step time that `software` predicts, times `factor`."""
    return replace(row, step_time_s=factor * row.step(software).step_time_s())


# Each kind of work in two sizes: matmuls, recompute, several nodes.
ROWS = [
    row_of("products"),
    row_of("wide", GATED | {"hidden": 4096, "heads": 32, "ffn": 11264}),
    row_of("again", recompute="full"),
    row_of("nodes", dp=64, global_batch=128),
    row_of("more nodes", dp=256, global_batch=512),
]
PLANTED = {RATE: 0.62, ACROSS: 1.5}


@pytest.fixture(scope="module")
def planted() -> list[PublishedRun]:
    return [published(row, row.software.with_constants(PLANTED)) for row in ROWS]


@pytest.mark.parametrize("groups", [[], [("products", "wide", "nodes"), ("unknown", "long")]])
def test_planted_constants_are_found(
    planted: list[PublishedRun], groups: list[tuple[str, ...]]
) -> None:
    found = fit(NAME, planted, CONSTANTS, groups)
    assert (found.software, found.n_runs) == (NAME, len(planted))
    assert found.values == pytest.approx(PLANTED, rel=0.01)
    fitted = [(row, row.software.with_constants(found.values)) for row in planted]
    assert max(abs(log_error(row, software)) for row, software in fitted) < 0.005


def test_priors_hold_where_no_run_is(planted: list[PublishedRun]) -> None:
    priors = {constant.name: constant.prior for constant in CONSTANTS}
    elsewhere = [replace(row, software=load_software("torch-eager")) for row in planted]
    silent = [replace(row, step_time_s=None) for row in planted]
    for rows in ([], elsewhere, silent):
        found = fit(NAME, rows, CONSTANTS)
        assert found.n_runs == 0
        assert found.values == pytest.approx(priors)


def test_priors_hold_for_what_no_run_tells(planted: list[PublishedRun]) -> None:
    """Runs on one node say nothing about links between nodes."""
    values = fit(NAME, planted[:3], CONSTANTS).values
    assert values[ACROSS] == pytest.approx(1.0)
    assert values[RATE] == pytest.approx(PLANTED[RATE], rel=0.02)


def test_the_nearer_the_prior_is_held_the_less_a_run_moves_it(planted: list[PublishedRun]) -> None:
    """The number of steps does not matter: all converge to the same minimum."""
    constants = [[Constant(RATE, 0.8, sigma)] for sigma in (1e-4, 0.03, 0.1, 10.0)]
    rates, later = (
        [fit(NAME, planted[:2], one, n_steps=n).values[RATE] for one in constants] for n in (8, 24)
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
    base = odd.software.with_constants(PLANTED)
    planted_rate = PLANTED[RATE]
    slow = published(replace(odd, id="odd"), base, factor=2.0)
    alone = fit(NAME, [slow], constants, n_steps=8).values[RATE]
    among = fit(NAME, [*alike, slow], constants, n_steps=8).values[RATE]
    assert alone < 0.6 * planted_rate
    assert 0.96 * planted_rate < among < planted_rate


def test_runs_of_a_group_are_held_to_each_other(planted: list[PublishedRun]) -> None:
    """All runs are 20% slower than planted, and one constant is free. Without a group it absorbs
    the 20%; in a group it explains only what differs between the runs."""
    slower = [
        replace(row, step_time_s=1.2 * row.step_time_s)
        for row in (planted[0], *planted[3:])
        if row.step_time_s
    ]
    known = [Constant(RATE, PLANTED[RATE], 1e-6)]
    group = tuple(row.id for row in slower)
    apart = fit(NAME, slower, [CONSTANTS[1], *known]).values[ACROSS]
    together = fit(NAME, slower, [CONSTANTS[1], *known], [group]).values[ACROSS]
    assert apart > 1.5 * PLANTED[ACROSS]
    assert PLANTED[ACROSS] < together < 1.5 * PLANTED[ACROSS]


def test_no_constant_is_below_its_least_value(planted: list[PublishedRun]) -> None:
    known = Constant(RATE, PLANTED[RATE], 1e-6)
    values = fit(NAME, planted, [known, Constant(ACROSS, 2.5, 10.0, least=2.0)]).values
    assert values[ACROSS] == pytest.approx(2.0, rel=1e-3)


def test_a_paper_is_predicted_without_its_own_runs() -> None:
    """Doubled times of one paper give an error of -50%, since only the others are fitted."""
    small = [
        row_of(f"{paper} {i}", source=f"arXiv 2407.0000{paper}", microbatch=i)
        for paper in (1, 2, 3)
        for i in (1, 2)
    ]
    priors = {constant.name: constant.prior for constant in fitted_constants()}
    at_prior = small[0].software.with_constants(priors)
    rows = [published(row, at_prior, 2.0 if row.id.startswith("3") else 1.0) for row in small]
    rows.append(replace(rows[0], id="no time", step_time_s=None))
    found = leave_one_out(rows, [("1 1", "1 2", "3 1")])
    papers = [f"arXiv 2407.0000{k}" for k in (1, 2, 3)]
    assert list(found) == papers
    assert [set(errors) for errors in found.values()] == [{f"{k} 1", f"{k} 2"} for k in (1, 2, 3)]
    assert found[papers[2]] == {key: pytest.approx(-0.5, abs=1e-9) for key in ("3 1", "3 2")}
    assert all(0.0 < error < 1.0 for paper in papers[:2] for error in found[paper].values())


@pytest.mark.parametrize("name", available_software())
def test_constants_of_software_have_sources(name: str) -> None:
    software = load_software(name)
    assert set(software.constants) <= set(KNOWN) and len(software.constants) <= 5
    quantities = [*software.constants.values(), *software.intervals.values()]
    assert all(found.source.strip() and found.value > 0 for found in quantities)
    fitted = {n for n, found in software.constants.items() if found.source.startswith("fit to")}
    assert fitted in (set(), {constant.name for constant in fitted_constants()})
    assert all(found.value > 1 for found in software.intervals.values())


def test_options_name_the_shipped_software() -> None:
    assert {*SOFTWARE, "autopar-cpu"} == set(available_software())
    assert all(0 < c.sigma < 1 and c.source for c in fitted_constants())
