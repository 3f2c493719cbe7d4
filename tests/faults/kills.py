"""Random faults in random moments of small runs: `make faults`, or fewer of them

    python -m tests.faults.kills --runs 50 --seed 7

Each run trains on two ranks, on one stage or two, under `autopar.launch` or torchrun's agent. A
rank is killed, stopped, raises or exits. Then

    ended        every process has ended within `MOST_S` of the fault; of a stop, of the timeout
    orphans      none of them is left
    named        the diagnosis names the rank, and where it was
    kept         the newest checkpoint loads, and the run ends with the bits of one without a fault

The process that runs this has imported everything, and forks its runs, so that a run takes a second
or two. It is the reaper of all that it starts, so an orphan becomes its child.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import autopar
from autopar.errors import LaunchError
from autopar.runtime.flight import FOLDER, TIMEOUT, diagnosis, read_notes
from autopar.runtime.launch import processes
from tests.faults.faults import FIRED, Fault, drawn
from tests.faults.jobs import LAYOUTS, N_RANKS, Model, batch, train
from tests.helpers.jobs import machine

MOST_S, TIMEOUT_S, GRACE_S = 10.0, 3.0, 5.0
MOST_NOTES, MOST_DELAY_S = 150, 0.4
STUCK_S = 90.0  # a run that takes longer has failed
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Run:
    launcher: str
    layout: str
    fault: Fault


@dataclass
class Found:
    """What came of a run. `fired`: the fault came before training was over."""

    run: Run
    fired: bool = False
    ended_s: float = 0.0
    n_orphans: int = 0
    named: bool = False
    kept: bool = False
    said: str = ""

    @property
    def in_time(self) -> bool:
        stopped = self.run.fault.kind == "SIGSTOP"
        return self.ended_s <= (TIMEOUT_S + GRACE_S if stopped else MOST_S)

    @property
    def is_good(self) -> bool:
        return self.kept and (
            not self.fired or (self.in_time and self.named and self.n_orphans == 0)
        )


def random_run(generator: random.Random) -> Run:
    launcher = generator.choice(("launch", "torchrun"))
    layout = generator.choice(tuple(LAYOUTS))
    return Run(launcher, layout, drawn(generator, N_RANKS, MOST_NOTES, MOST_DELAY_S))


def become_reaper() -> None:
    """Orphans of this process become its children (prctl(2), Linux)."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def tried(run: Run, reference: str) -> Found:
    """Run, fail, and run again; `reference` is the digest without a fault."""
    folder = Path(tempfile.mkdtemp(prefix="autopar-kills-"))
    found = Found(run)
    try:
        found.said = _in_own_process(run.launcher, folder, run.layout, run.fault)
        ended_s = time.time()
        found.n_orphans = _end_orphans()
        if (folder / FIRED).exists():
            fired = json.loads((folder / FIRED).read_text())
            found.fired = fired["time_s"] < ended_s and reference not in found.said
            found.ended_s = ended_s - fired["time_s"]
            found.named = _is_named(found.said, run.fault, fired["note"])
        again = _in_own_process("launch", folder, run.layout, None)
        found.kept = again == reference
        if not found.kept:
            found.said += f"\n--- resumed:\n{again}"
    finally:
        _end_orphans()
        shutil.rmtree(folder, ignore_errors=True)
    return found


def _is_named(said: str, fault: Fault, note: dict[str, Any] | None) -> bool:
    """Does the text name the rank, how it failed, and its last action?"""
    r = fault.rank
    lines = [line.strip() for line in said.splitlines()]
    own = [line for line in lines if line.startswith(f"rank {r}: ")]
    known = [line for line in own if "step" in line]
    if note is not None:  # its last note
        alone = diagnosis({r: [note]}, r + 1, note["time_s"], processes=False)
        place = alone.splitlines()[-1].partition(f"rank {r}: ")[2].rpartition(", since")[0]
        known = [line for line in own if place in line]
    how = {
        "SIGKILL": (rf"rank {r} of 2 was ended by SIGKILL", rf"rank +: {r} .*\n +exitcode +: -9"),
        "exit": (rf"rank {r} of 2 exited with code 3", rf"rank +: {r} .*\n +exitcode +: 3"),
        "raise": (
            rf"rank {r} of 2 raised(.|\n)*InjectedError",
            rf"rank +: {r} .*\n +exitcode +: 1",
        ),
        "SIGSTOP": (rf"rank {r}: .*its process is stopped", rf"rank {r} is behind"),
    }[fault.kind]
    return bool(known) and any(re.search(text, said) for text in how)


def _in_own_process(launcher: str, folder: Path, layout: str, fault: Fault | None) -> str:
    """The digest of a run, or all that it said when it failed."""
    answer = folder / f"answer-{time.monotonic_ns()}"
    job = _by_launch if launcher == "launch" else _by_torchrun

    def body() -> None:
        os.setsid()
        answer.write_text(job(folder, layout, fault))

    process = multiprocessing.get_context("fork").Process(target=body)
    process.start()
    process.join(STUCK_S)
    if process.is_alive():
        assert process.pid is not None
        os.killpg(process.pid, signal.SIGKILL)
        process.join()
    return answer.read_text() if answer.exists() else "no answer: the run hung or died"


def _by_launch(folder: Path, layout: str, fault: Fault | None) -> str:
    fork = multiprocessing.get_context("fork")
    setattr(processes, "get_context", lambda _: fork)  # noqa: B010
    pool = processes.WorkerPool(N_RANKS, step_timeout_s=TIMEOUT_S)
    try:
        return str(pool.run(train, str(folder), layout, fault)[0])
    except LaunchError as error:
        return "\n".join([str(error), *getattr(error, "__notes__", ())])
    finally:
        pool._abandon()  # forked workers hold each other's pipes open, so they would not end


def _by_torchrun(folder: Path, layout: str, fault: Fault | None) -> str:
    """Under torchrun's own agent; what the ranks print is part of what is said."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ |= {
        FOLDER: str(folder / "flight"), TIMEOUT: str(TIMEOUT_S), "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    logs = folder / "logs"
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=N_RANKS, run_id="kills", rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0", max_restarts=0, start_method="fork", monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(log_dir=str(logs), redirects=Std.ALL),
    )  # fmt: skip
    try:
        return str(elastic_launch(config, train)(str(folder), layout, fault)[0])
    except ChildFailedError as error:
        texts = [path.read_text() for path in sorted(logs.rglob("*.log"))]
        notes = diagnosis(read_notes(folder / "flight"), N_RANKS, time.time())  # `autopar diagnose`
        return "\n".join([str(error), *texts, notes])


def _end_orphans() -> int:
    """Kill and collect what was left behind; how many there were that still ran."""
    n = 0
    own = os.getpid()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError, ProcessLookupError):
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[1]) == own:
                n += fields[0] != "Z"
                os.kill(int(stat.parent.name), signal.SIGKILL)
                os.waitpid(int(stat.parent.name), 0)
    return n


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="a line of JSON for each run")
    given = parser.parse_args()
    become_reaper()
    folder = Path(tempfile.mkdtemp(prefix="autopar-kills-"))
    for manual in LAYOUTS.values():  # so that the forked runs need not warm up
        made = autopar.plan(Model(), machine((1, N_RANKS)), batch(0), manual=manual)
        made.code()
    references = {}
    for layout in LAYOUTS:
        references[layout] = _in_own_process("launch", folder / layout, layout, None)
    generator = random.Random(given.seed)
    counts: Counter[str] = Counter()
    for n in range(given.runs):
        run = random_run(generator)
        found = tried(run, references[run.layout])
        counts["runs"] += 1
        counts["fired"] += found.fired
        counts["ended in time"] += found.fired and found.in_time
        counts["named"] += found.fired and found.named
        counts["orphans"] += found.n_orphans
        counts["kept and resumed bitwise"] += found.kept
        counts["good"] += found.is_good
        if given.out:
            with given.out.open("a") as file:
                file.write(json.dumps(asdict(found)) + "\n")
        if not found.is_good or n % 50 == 49:
            what = "" if found.is_good else f"  {run} {found}"
            print(n + 1, dict(counts), what, flush=True)  # noqa: T201
    shutil.rmtree(folder, ignore_errors=True)
    sys.exit(counts["good"] < counts["runs"])


if __name__ == "__main__":
    main()
