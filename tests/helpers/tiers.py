"""The two tiers of tests: what the first may take, and the shards of the second.

    first     `make test`: all tests without a mark, within `SUM_S` CPU seconds
    second    `make nightly SHARD=i/n`: the tests marked `nightly`, dealt to n shards

A test's CPU seconds are those of its call, with the processes it uses. A test of the first tier
above `LIMIT_S` fails the run, unless `LISTED` says why it stays. It runs a second time before: the
first call may pay for an import, a capture or processes that others share. On a machine that is
slower than the one where the limits were set, they are as much higher. A short loop measures that
all along: what else a machine does slows its cores for a while.

This is a plugin of pytest: `-p tests.helpers.tiers`, with `--first-tier` or `--shard=i/n`.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import statistics
import time
from collections.abc import Generator
from typing import Any
from zlib import crc32

import psutil
import pytest
from _pytest.runner import runtestprotocol
from _pytest.terminal import TerminalReporter

LIMIT_S = 3.0
SUM_S = 1150.0
LOOP_S = 0.0086  # `_loop_s` where the limits were set; within hours it was twice that, too
N_TESTS_A_LOOP = 10
N_SHOWN = 10
# Test, with or without its parameters -> why it may take more than `LIMIT_S`.
LISTED = {
    "tests/fuzz/programs/test_programs.py::test_programs": (
        "programs are drawn anew; most take a second"
    ),
    "tests/integrations/test_one_rank.py::test_autopar_needs_no_framework": (
        "a new interpreter must import autopar"
    ),
    "tests/rules/test_rule_oracle.py::test_rule[autopar.attention_dropout.default]": (
        "every strategy of attention with dropout, both ways: nothing else by day asks that"
    ),
    "tests/runtime/test_growth.py::test_nothing_grows": (
        "fifteen steps: the one check by day for tensors, threads and files that leak"
    ),
    "tests/runtime/test_runtime_launch.py::test_a_rank_that_raises_ends_all": (
        "processes that start and end: the one proof by day that a failing rank ends the others"
    ),
    "tests/unit/house/test_docs.py::test_the_readme_snippet_runs_as_it_is_pasted": (
        "the first thing that a reader runs"
    ),
}

_CALL = "CPU seconds of the call"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--first-tier", action="store_true", help="fail where tests take too long")
    parser.addoption("--shard", metavar="I/N", help="the I-th of N parts of the tests")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Tier(config))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deal the tests by a hash of their names: a new test moves no other to another shard."""
    if (shard := config.getoption("--shard")) is None:
        return
    match = re.fullmatch(r"(\d+)/(\d+)", shard)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise pytest.UsageError(f"--shard={shard}: give I/N with 1 <= I <= N, such as 1/4")
    number, n_shards = int(match[1]), int(match[2])
    shard_of = {item: crc32(item.nodeid.encode()) % n_shards + 1 for item in items}
    config.hook.pytest_deselected(items=[item for item in items if shard_of[item] != number])
    items[:] = [item for item in items if shard_of[item] == number]


class _Tier:
    """Each of pytest's workers measures; the process that controls them adds up and judges."""

    def __init__(self, config: pytest.Config) -> None:
        self.limited = bool(config.getoption("--first-tier"))
        self.call_s: dict[str, float] = {}
        self.sum_s = 0.0
        self.slowness: list[float] = []
        self._n_calls, self._loops_s = 0, [_loop_s()]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, Any, Any]:
        if self._n_calls % N_TESTS_A_LOOP == 0:
            self._loops_s.append(_loop_s())
        self._n_calls += 1
        start_s = _cpu_s()
        try:
            return (yield)
        finally:
            item.user_properties[:] = [(_CALL, _cpu_s() - start_s)]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        """As pytest's own, and once more where the call took too long."""
        hook = item.ihook
        hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        reports = runtestprotocol(item, log=False, nextitem=nextitem)
        is_over = self.limited and _call_s(item) > LIMIT_S and not _is_listed(item.nodeid)
        if is_over and all(report.passed for report in reports):
            first_s = _call_s(item)
            item._initrequest()  # type: ignore[attr-defined]  # new fixtures
            reports = runtestprotocol(item, log=False, nextitem=nextitem)
            item.user_properties[:] = [(_CALL, min(first_s, _call_s(item)) / self._slowness())]
        for report in reports:
            report.user_properties = list(item.user_properties)
            hook.pytest_runtest_logreport(report=report)
        hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            self.call_s[report.nodeid] = _call_s(report)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        measured = {"cpu_s": _cpu_s(), "slowness": self._slowness()}
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput |= measured
            return
        if not self.slowness:  # no workers: xdist is off
            self._add(measured)
        if self._faults() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self._add(getattr(node, "workeroutput", {}))

    def _slowness(self) -> float:
        """How much slower this machine is than that where the limits were set; at least 1."""
        return max(1.0, statistics.fmean(self._loops_s) / LOOP_S)

    def _add(self, measured: dict[str, float]) -> None:
        """What one process took in all, with the processes that it started."""
        if "cpu_s" in measured:
            self.sum_s += measured["cpu_s"]
            self.slowness.append(measured["slowness"])

    def _faults(self) -> list[str]:
        """What is above its limit, a line each."""
        if not self.limited:
            return []
        limit_s = SUM_S * max(self.slowness)
        over = [f"all tests: {self.sum_s:.0f} CPU s, more than {limit_s:.0f}"]
        return over[: self.sum_s > limit_s] + [
            f"{test}: {call_s:.1f} CPU s; make it cheaper, or nightly, or list it"
            for test, call_s in self.call_s.items()
            if call_s > LIMIT_S and not _is_listed(test)
        ]

    def pytest_terminal_summary(self, terminalreporter: TerminalReporter) -> None:
        dearest = sorted(self.call_s.items(), key=lambda row: -row[1])[:N_SHOWN]
        terminalreporter.section(f"CPU seconds: {self.sum_s:.0f}")
        for test, call_s in dearest:
            terminalreporter.line(f"{call_s:7.1f}  {test}")
        for fault in self._faults():
            terminalreporter.line(f"ABOVE ITS LIMIT  {fault}", red=True)


def _is_listed(test: str) -> bool:
    return test in LISTED or test.partition("[")[0] in LISTED


def _call_s(test: pytest.Item | pytest.TestReport) -> float:
    properties: dict[str, Any] = dict(test.user_properties)
    return float(properties.get(_CALL, 0.0))


def _cpu_s() -> float:
    """CPU seconds of this process and of those that it started, ended ones included."""
    total_s = sum(os.times()[:4])
    for process in multiprocessing.active_children():
        try:
            total_s += sum(psutil.Process(process.pid).cpu_times()[:4])
        except psutil.NoSuchProcess:  # it has just ended; this process has its seconds now
            continue
    return total_s


def _loop_s() -> float:
    """CPU seconds to make rows, sort them and put them into a table: objects, as planning has."""
    start_s = time.process_time()
    rows = sorted((str(i), i) for i in range(20_000))
    _ = {text: (text, i) for text, i in rows}
    return time.process_time() - start_s
