"""What ranks did last: notes outlive a rank, and say which ranks the others wait for."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import autopar
from autopar import AsyncSaver, Device, Link, Manual
from autopar.errors import OptionError, StepError, StepTimeoutError, VerificationError
from autopar.mesh import LogicalMesh
from autopar.runtime.flight import (
    FOLDER,
    TIMEOUT,
    FlightRecord,
    diagnosis,
    longest_step_s,
    read_notes,
    watch,
)
from autopar.runtime.flight.record import N_NOTES, SLOT_BYTES
from autopar.runtime.groups import DistGroup, make_edges, make_groups
from autopar.runtime.storage import data_files
from tests.helpers.harness import model_case
from tests.helpers.jobs import MlpWithLoss, machine
from tests.helpers.nightly import nightly
from tests.helpers.pipeline_harness import Layout, ends_before, random_pipeline
from tests.helpers.pools import Pool
from tests.helpers.ranks import Rank, named_inputs, random_parameters, run_ranks

STEP_TIMEOUT_S = 4.0
# Ranks start up to some seconds apart on a busy machine, which must not be taken for a stop.
SLOW_TIMEOUT_S = 10.0
PIECE_S = SLOW_TIMEOUT_S / 8


def batch() -> dict[str, Any]:
    torch.manual_seed(1)
    return {"x": torch.randn(16, 32), "y": torch.randn(16, 32)}


def parallel(manual: Manual) -> autopar.ParallelModule:
    torch.manual_seed(0)
    return autopar.parallelize(MlpWithLoss(), machine((1, 2)), batch(), manual=manual)


def test_notes_are_read_back_from_a_file_that_is_written_on(tmp_path: Path) -> None:
    record = FlightRecord(tmp_path / "rank-3.ring")
    for _ in range(N_NOTES + 5):
        record.begin_step(1)
        record.call("all_reduce over dp of 64 B (grad_sync)")
    (found,) = read_notes(tmp_path).values()
    assert found == list(record.notes) and len(found) == N_NOTES
    assert found[-1]["step"] == N_NOTES + 5 and found[-1]["calls"] == 1
    assert oct((tmp_path / "rank-3.ring").stat().st_mode)[-3:] == "600"


def test_a_note_of_any_length_fits_its_slot(tmp_path: Path) -> None:
    record = FlightRecord(tmp_path / "rank-0.ring")
    record.act(" ".join(f"1SF{i}>2" for i in range(1000)), 1)
    record.call("x" * 10_000)
    (found,) = read_notes(tmp_path).values()
    assert found == list(record.notes) and len(found) == 2


def test_a_note_that_was_being_written_is_left_out(tmp_path: Path) -> None:
    record = FlightRecord(tmp_path / "rank-0.ring")
    record.begin_step(0)
    record.call("all_reduce")
    data = bytearray((tmp_path / "rank-0.ring").read_bytes())
    data[SLOT_BYTES + 20 : SLOT_BYTES + 200] = b"\xff" * 180
    (tmp_path / "rank-0.ring").write_bytes(bytes(data))
    (tmp_path / "rank-1.ring").write_bytes(json.dumps({"n": "x"}).encode())
    (tmp_path / "rank-2.txt").write_text("not a record")
    assert [note["n"] for note in read_notes(tmp_path)[0]] == [0]
    assert read_notes(tmp_path)[1] == [] and 2 not in read_notes(tmp_path)


def test_the_rank_that_made_fewer_calls_is_behind() -> None:
    records = [FlightRecord() for _ in range(3)]
    for record in records:
        record.begin_step(0)
    for record in records[:2]:
        record.call("all_gather over dp of 8 B (forward)")
    notes = {rank: list(record.notes) for rank, record in enumerate(records)}
    now_s = notes[2][-1]["time_s"] + 60.0
    first, *lines = diagnosis(notes, 4, now_s).splitlines()
    assert first == "rank 2 is behind the others"
    assert "rank 0: step 1, stage 0, action begin, all_gather over dp of 8 B (forward)" in lines[0]
    assert lines[2].endswith("since 60.0 s") and "noted nothing" in lines[3]
    assert longest_step_s(notes, now_s) == pytest.approx(60.0)
    records[2].call("all_gather over dp of 8 B (forward)")
    notes[2] = list(records[2].notes)
    same = "all ranks are in the same call: one has died in it, or a link is down"
    assert diagnosis(notes, 3, now_s).splitlines()[0] == same
    assert "same call" not in diagnosis(notes, 4, now_s)
    for record in records:
        record.end_step()
    assert "same call" not in diagnosis({r: list(x.notes) for r, x in enumerate(records)}, 3, now_s)
    assert longest_step_s({0: list(records[0].notes)}, time.time() + 60.0) == 0.0


def sleep_after(n_steps: int) -> None:
    pm = parallel(Manual(dp=2))
    for _ in range(n_steps):
        pm.step(**batch())
    if os.environ["RANK"] == "1":
        time.sleep(600.0)
    pm.step(**batch())


@nightly
@pytest.mark.parametrize(
    ("n_steps", "where"),
    [
        (1, "after 1 steps, comparing ranks before pm.step(...)"),
        (4, "step 5, stage 0, action 0B0, all_reduce over dp"),
    ],
)
def test_a_rank_that_sleeps_is_named_after_the_timeout(n_steps: int, where: str) -> None:
    with pytest.raises(StepTimeoutError, match="longer than 4 s") as raised:
        autopar.launch(sleep_after, 2, n_steps, timeout_s=STEP_TIMEOUT_S)
    (notes,) = raised.value.__notes__
    assert notes.splitlines()[0] == "rank 1 is behind the others"
    assert f"rank 0: {where}" in notes and f"rank 1: after {n_steps} steps, since" in notes


def test_a_pipeline_that_failed_half_way_takes_no_step() -> None:
    """The last stage fails in its second microbatch, then another step is tried."""
    case, told = model_case("mlp"), list[list[str]]()
    program = case.analysis.program
    layout, ends = Layout(((1, 1), (1, 1)), 2), ends_before(program, "net.2")
    pipeline = random_pipeline(case.analysis, ends, layout, random.Random(0))

    def work(rank: Rank) -> None:
        executor, n_left = rank.executor, [1]
        (stage,) = executor.stages.values()
        inputs, code = named_inputs(program, case.batch(0)), stage.code

        def forward(*args: Any) -> Any:
            if n_left.pop() == 0:
                raise RuntimeError("no more memory")
            n_left.append(0)
            return code.forward(*args)

        if stage.stage == 0:
            executor.step(rank.stored, inputs)  # waits for gradients in vain
        stage.code = replace(code, forward=forward)
        for _ in range(2):
            with pytest.raises((RuntimeError, StepError)) as raised:
                executor.step(rank.stored, inputs)
            told.append([f"{type(raised.value).__name__}: {raised.value}"])
            told[-1] += getattr(raised.value, "__notes__", [])

    with pytest.raises(VerificationError, match="1 of 2 ranks have returned"):
        run_ranks(program, pipeline, random_parameters(program, 0), work)
    (first, where, *_), (second, *_) = told
    assert first == "RuntimeError: no more memory"
    assert where.startswith("rank 1, stage 1, in action 1F1")
    assert second.startswith("StepError: an earlier step failed half-way: RuntimeError")


def addresses() -> list[str]:
    """At which addresses of this machine somebody listens at the port of the ranks' store."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    listening = [row[1].split(":") for row in rows if row[3] == "0A"]  # TCP_LISTEN
    return [ip for ip, port in listening if int(port, 16) == int(os.environ["MASTER_PORT"])]


def test_the_store_of_local_ranks_is_on_the_loopback_address(workers: Pool) -> None:
    assert workers(2).run(addresses) == [["0100007F"]] * 2


WATCHED = """
import sys, time
from autopar.runtime.flight import FlightRecord, watch
record = FlightRecord.of_process()
record.begin_step(0)
record.call("all_reduce over dp of 8 B (backward)")
watch(record, 1, 2)
time.sleep(60)
"""


def test_the_watchdog_ends_a_rank_that_hangs(tmp_path: Path) -> None:
    FlightRecord(tmp_path / "rank-0.ring").begin_step(0)
    env = os.environ | {FOLDER: str(tmp_path), TIMEOUT: "0.05", "RANK": "1"}
    ended = subprocess.run(
        [sys.executable, "-c", WATCHED], env=env, text=True, capture_output=True, check=False
    )
    assert ended.returncode == 124
    assert "rank 1 was in one action or call for more than 0.05 s" in ended.stderr
    assert "rank 0 is behind the others" in ended.stderr


@pytest.mark.parametrize("text", ["soon", "0", "-1", "nan"])
def test_the_watchdog_refuses_what_is_no_time(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TIMEOUT, text)
    with pytest.raises(OptionError, match=f"AUTOPAR_STEP_TIMEOUT_S={text!r} is not a number"):
        watch(FlightRecord(), 0, 1)


def test_a_folder_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(FOLDER, str(tmp_path / "file"))
    with pytest.raises(OptionError, match="cannot be written"):
        FlightRecord.of_process()


def timeouts_of_groups() -> set[float]:
    """Of this rank's groups, after the world's was set to 77 s."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.PrefixStore("again", dist.TCPStore(address, port, is_master=False))
    rank, timeout = dist.get_rank(), timedelta(seconds=77)
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=4, timeout=timeout)
    mesh = LogicalMesh((2, 2), ("dp", "tp"), (Link(1.0, 1.0),) * 2, Device(1.0, 1.0, 1.0, 0.0))
    groups = [*make_groups(mesh).values(), *make_edges([(0, 1), (1, 0)]).values()]
    found = set()
    for group in groups:
        own = group.process_group if isinstance(group, DistGroup) else group
        if isinstance(own, dist.ProcessGroup) and dist.get_rank(own) >= 0:
            found.add(own._get_backend(torch.device("cpu")).options._timeout.total_seconds())
    return found


@nightly
def test_groups_have_the_users_timeout() -> None:
    assert autopar.launch(timeouts_of_groups, 4) == [{77.0}] * 4


def stop_before_a_save(folder: str) -> None:
    pm = parallel(Manual(dp=2))
    pm.step(**batch())
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGSTOP)
    autopar.save(pm, None, folder, step=1)


@nightly
def test_a_rank_that_stops_before_a_save_is_named(tmp_path: Path) -> None:
    with pytest.raises(StepTimeoutError) as raised:
        autopar.launch(stop_before_a_save, 2, str(tmp_path / "c"), timeout_s=STEP_TIMEOUT_S)
    (notes,) = raised.value.__notes__
    assert "rank 0: after 1 steps, autopar.save(...)" in notes
    assert "rank 1: after 1 steps, since" in notes


def test_a_save_is_stuck_only_if_nobody_goes_on() -> None:
    records = [FlightRecord() for _ in range(2)]
    for record in records:
        with record.together("autopar.save(...)"):
            pass
    notes = {rank: list(record.notes)[:1] for rank, record in enumerate(records)}
    notes[1][-1] |= {"time_s": notes[0][-1]["time_s"] + 50.0}
    assert longest_step_s(notes, notes[0][-1]["time_s"] + 60.0) == pytest.approx(10.0)
    notes[0][-1] |= {"action": "0B0"}  # in a step, it waits for the other
    assert longest_step_s(notes, notes[0][-1]["time_s"] + 60.0) == pytest.approx(60.0)


def test_only_the_thread_that_saves_notes_its_progress() -> None:
    record = FlightRecord()
    with record.together("autopar.save(...)"):
        record.progress("writing `a`")
        thread = threading.Thread(target=record.progress, args=("writing `b`",))
        thread.start()
        thread.join()
        record.progress_beside("the save before")
        record.progress_beside("the save before")
    calls = [note["call"] for note in record.notes]
    assert calls == [
        "autopar.save(...)", "autopar.save(...): writing `a`", "autopar.save(...): the save before",
        None,
    ]  # fmt: skip


def slow_writes(patch: pytest.MonkeyPatch) -> None:
    """Each piece takes `PIECE_S` longer, and so does the disk's end: no slow file system can be
    mounted everywhere."""
    bytes_of = data_files.bytes_of

    def slowly(value: torch.Tensor) -> Any:
        time.sleep(PIECE_S)
        return bytes_of(value)

    patch.setattr(data_files, "bytes_of", slowly)
    patch.setattr(os, "fsync", lambda _: time.sleep(PIECE_S))


def saves_slowly(folder: str) -> tuple[float, int, int]:
    """(seconds that a save took, the step that loads, the step that a saver beside it wrote)."""
    pm = parallel(Manual(dp=2, zero=3))
    optimizer = torch.optim.AdamW(pm.parameters(), lr=1e-3)
    pm.step(**batch())
    optimizer.step()
    with pytest.MonkeyPatch.context() as patch:
        slow_writes(patch)
        begun = time.monotonic()
        autopar.save(pm, optimizer, f"{folder}/alone", step=1)
        took_s = time.monotonic() - begun
        with AsyncSaver(f"{folder}/beside") as saver:
            saver.save(pm, optimizer, step=2)
            pm.step(**batch())
    alone, _ = autopar.load(pm, optimizer, f"{folder}/alone")
    return took_s, alone, autopar.load(pm, optimizer, f"{folder}/beside")[0]


@nightly
def test_a_slow_disk_is_waited_for(tmp_path: Path) -> None:
    for took_s, alone, beside in autopar.launch(
        saves_slowly, 2, str(tmp_path), timeout_s=SLOW_TIMEOUT_S
    ):
        assert took_s > 1.5 * SLOW_TIMEOUT_S
        assert (alone, beside) == (1, 2)
