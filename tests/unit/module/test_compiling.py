"""`compile="auto"`: who decides, by what, and what a user is told."""

from __future__ import annotations

import os

import pytest

import autopar
from autopar import Device, Link, Manual, Mesh, NotSupportedError
from autopar.module.compiling import N_STEPS, verdict
from autopar.report import REGION_S
from tests.helpers.jobs import gpt2, tokens
from tests.helpers.pools import Pool


@pytest.fixture(autouse=True)
def as_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")


def slow_memory(n_ranks: int) -> Mesh:
    """A kilobyte per second: what is not fused takes hours."""
    return Mesh((1, n_ranks), links=[Link(1.0, 1e-9)] * 2, device=Device(1e12, 1e3, 1e15, 0.0))


def has_regions(pm: autopar.ParallelModule) -> bool:
    return "@compiled" in pm.code_path.read_text()


def test_a_run_of_long_steps_is_compiled() -> None:
    even_s = 5 * REGION_S / N_STEPS
    assert verdict(1.01 * even_s, 5)[0] == "regions"
    assert verdict(0.99 * even_s, 5)[0] == "none"
    assert verdict(0.5, 5) == (
        "regions", "compiled: 1,000 steps would gain 500 s, compiling 5 regions takes some 32 s"
    )  # fmt: skip
    assert verdict(-0.5, 0)[1].startswith("eager: 1,000 steps would gain 0 s, compiling 0 regions")


def test_steps_decide(capsys: pytest.CaptureFixture[str]) -> None:
    """Those of a tiny model are short; with a slow memory they are long."""
    model = gpt2()
    short = autopar.parallelize(model, 1, tokens(0), compile="auto")
    said = capsys.readouterr().err
    assert said.startswith('autopar compile="auto": eager: 1,000 steps would gain')
    assert said.count("\n") == 1
    assert not has_regions(short)
    long = autopar.parallelize(model, slow_memory(1), tokens(0), compile="auto")
    assert 'compile="auto": compiled: 1,000 steps' in capsys.readouterr().err
    assert has_regions(long)
    assert "compiled" in long.plan.explain()
    assert long.step(**tokens(0)).item() == pytest.approx(short.step(**tokens(0)).item(), abs=1e-5)


def test_a_saved_plan_is_decided_again(capsys: pytest.CaptureFixture[str]) -> None:
    model = gpt2()
    plan = autopar.plan(model, slow_memory(1), tokens(0), compile="auto")
    assert "@compiled" not in plan.code()["stage_0.py"]
    pm = autopar.parallelize(model, slow_memory(1), plan=plan, compile="auto")
    assert has_regions(pm)
    assert "compiled" in capsys.readouterr().err


def test_without_a_compiler_steps_are_eager(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    pm = autopar.parallelize(gpt2(), slow_memory(1), tokens(0), compile="auto")
    assert not has_regions(pm)
    wanted = "eager: rank 0 needs a C++ compiler, and there is no no-such-compiler"
    assert wanted in capsys.readouterr().err
    report = autopar.verify(gpt2(), (1, 2), tokens(0), manual=Manual(tp=2), compile="auto")
    assert report.ok and not report.uncompiled_errors


def on_two_ranks(lacks: bool) -> bool:
    """The second one may have no compiler."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    if lacks and os.environ["RANK"] == "1":
        os.environ["CXX"] = "no-such-compiler"
    try:
        pm = autopar.parallelize(
            gpt2(), slow_memory(2), tokens(0), manual=Manual(tp=2), compile="auto"
        )
        pm.step(**tokens(0))
        return has_regions(pm)
    finally:
        del os.environ["TORCHDYNAMO_DISABLE"]
        os.environ.pop("CXX", None)


def test_parity_of_ranks_with_and_without_a_compiler(workers: Pool) -> None:
    assert workers(2).run(on_two_ranks, False) == [True, True]
    assert workers(2).run(on_two_ranks, True) == [False, False]


def test_graphs_are_refused_on_a_cpu() -> None:
    wanted = r'needs a GPU, and this rank runs on the cpu[\s\S]*compile="regions" runs there'
    with pytest.raises(NotSupportedError, match=wanted):
        autopar.parallelize(gpt2(), 1, tokens(0), compile="regions+graphs")
    with pytest.raises(NotSupportedError, match=wanted):
        autopar.verify(gpt2(), 1, tokens(0), compile="regions+graphs")
