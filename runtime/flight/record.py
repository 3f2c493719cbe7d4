"""What one rank did last: a ring of notes, which outlives the rank.

A rank notes a step, an action of its schedule, a collective or a message before it begins. If the
environment variable `AUTOPAR_FLIGHT_DIR` names a folder, the notes are also in a file there:
`rank-3.ring`, `N_NOTES` slots of `SLOT_BYTES`, mapped into memory. So they can be read while the
rank hangs, and after it was killed.

    slot n mod N_NOTES    note n as JSON, then spaces

A note is a dict:

    n, time_s         which note it is; seconds since 1970
    step, calls       steps begun so far; collectives and messages of this one
    stage, action     where in the step: None outside of one, "meet" where ranks compare batches,
                      "together" in a call of all ranks besides a step, such as a save
    call, line        the call that begins, and where in a generated file
    raised            the type of an error that left the action or call; None
    host, pid         the process
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from autopar.errors import OptionError
from autopar.runtime.flight.pace import Pace

FOLDER = "AUTOPAR_FLIGHT_DIR"
TOGETHER = "together"  # the action of a call of all ranks besides a step
N_NOTES, SLOT_BYTES = 64, 512
_MOST_CHARACTERS = 120  # of an action and of a call, so that a note fits its slot
HOST = socket.gethostname()[:40]
_N_FRAMES = 8  # between a collective and the generated line that calls it

Note = dict[str, Any]


class FlightRecord:
    """The notes of one rank, and its pace. `path` is the file that the notes also go to."""

    def __init__(self, path: Path | None = None) -> None:
        self.notes: deque[Note] = deque(maxlen=N_NOTES)
        self._n = self._step = self._calls = 0
        self._where: tuple[int | None, str | None] = (None, None)
        self._together = ""  # the call of all ranks that this rank is in
        self._thread = 0  # that made it; others only count what they do
        self._n_beside = self._n_beside_noted = 0
        self._ring = None if path is None else _mapped(path)
        self.pace = Pace()

    @classmethod
    def of_process(cls) -> FlightRecord:
        """The record of this process, with a file if the environment names a folder.

        Raises `OptionError` if the folder cannot be written.
        """
        folder = os.environ.get(FOLDER)
        if not folder:
            return cls()
        try:
            Path(folder).mkdir(mode=0o700, parents=True, exist_ok=True)
            return cls(Path(folder) / f"rank-{int(os.environ.get('RANK', 0))}.ring")
        except OSError as error:
            raise OptionError(
                f"{FOLDER}={folder!r} cannot be written: {error}",
                hint="name a folder of this machine, or unset the variable",
            ) from error

    def begin_step(self, stage: int) -> None:
        """A step, or an evaluation, of a stage begins."""
        self._step, self._calls = self._step + 1, 0
        self.pace.drop()  # of a step that failed
        self.act("begin", stage)

    def act(self, action: str, stage: int) -> None:
        """An action of the schedule begins, or several messages."""
        self._where = stage, action[:_MOST_CHARACTERS]
        self.pace.begin(action[:_MOST_CHARACTERS])
        self._note(None)

    def call(self, what: str) -> None:
        """A collective or a message begins."""
        self._calls += 1
        self._note(what[:_MOST_CHARACTERS])

    def end_step(self) -> None:
        self.pace.end()
        self._where = self._where[0], None
        self._note(None)

    @contextmanager
    def meeting(self, what: str) -> Iterator[None]:
        """All ranks meet before a step, as to compare their batches."""
        before = self._where
        self._where = before[0], "meet"
        self.call(what)
        try:
            yield
        except BaseException as error:
            self.failed(error)
            raise
        self._where = before
        self._note(None)

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """All ranks make a call besides a step, which may take long: a save.

        Inside another one, or beside it in another thread, it notes nothing.
        """
        if self._together:
            yield
            return
        before = self._where
        self._where, self._together = (before[0], TOGETHER), what
        self._thread = threading.get_ident()
        self._note(what[:_MOST_CHARACTERS])
        try:
            yield
        except BaseException as error:
            self.failed(error)
            raise
        finally:
            self._where, self._together, self._thread = before, "", 0
        self._note(None)

    def progress(self, what: str) -> None:
        """Inside `together`, this rank is not stuck: it goes on with `what`."""
        if threading.get_ident() == self._thread:
            self._note(f"{self._together}: {what}"[:_MOST_CHARACTERS])
        else:
            self._n_beside += 1

    def progress_beside(self, what: str) -> None:
        """Inside `together`, this rank waits for another thread: is that one not stuck?"""
        if self._n_beside > self._n_beside_noted:
            self._n_beside_noted = self._n_beside
            self.progress(what)

    def failed(self, error: BaseException) -> None:
        """An error leaves the step, or the call of all ranks: note it where the rank was."""
        last = self.last
        if last is not None and last["action"] is not None and last["raised"] is None:
            self._write({**last, "n": self._n, "raised": type(error).__name__[:_MOST_CHARACTERS]})
        self._where = self._where[0], None

    @property
    def last(self) -> Note | None:
        """The last note; other threads may ask."""
        return self.notes[-1] if self.notes else None

    def _note(self, call: str | None) -> None:
        stage, action = self._where
        note: Note = {
            "n": self._n, "time_s": time.time(), "step": self._step, "stage": stage,
            "action": action, "calls": self._calls, "call": call,
            "line": None if call is None else _generated_line(),
            "raised": None, "host": HOST, "pid": os.getpid(),
        }  # fmt: skip
        self._write(note)

    def _write(self, note: Note) -> None:
        self.notes.append(note)
        if self._ring is not None:
            text = json.dumps(note).encode()
            at = self._n % N_NOTES * SLOT_BYTES
            self._ring[at : at + SLOT_BYTES] = text.ljust(SLOT_BYTES - 1) + b"\n"
        self._n += 1


def _mapped(path: Path) -> mmap.mmap:
    """The file as memory that all processes see; made anew."""
    path.unlink(missing_ok=True)
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.ftruncate(handle, N_NOTES * SLOT_BYTES)
        return mmap.mmap(handle, N_NOTES * SLOT_BYTES)
    finally:
        os.close(handle)


def _generated_line() -> str | None:
    """`stage_1.py:214`, if a generated program makes the call."""
    frame = sys._getframe(3)
    for _ in range(_N_FRAMES):
        if str(frame.f_globals.get("__name__")).startswith("autopar_generated_"):
            return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
        if frame.f_back is None:
            break
        frame = frame.f_back
    return None
