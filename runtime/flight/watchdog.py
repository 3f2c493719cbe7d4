"""Ends a rank that stays in one action or call of a step for too long: under torchrun.

`AUTOPAR_STEP_TIMEOUT_S` sets the seconds. A thread looks at the rank's own notes. In time it prints
what every rank did last, as far as their notes are in `AUTOPAR_FLIGHT_DIR`, and ends the process:
a collective that waits for a dead rank cannot be interrupted. torchrun then ends the other ranks,
or starts all again (`--max-restarts`). Under `autopar.launch(..., timeout_s=)` the caller does it.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from autopar.runtime.flight.environment import seconds_in
from autopar.runtime.flight.ranks import diagnosis, longest_step_s, read_notes
from autopar.runtime.flight.record import FOLDER, HOST, TOGETHER, FlightRecord, Note

TIMEOUT = "AUTOPAR_STEP_TIMEOUT_S"
EXIT_CODE = 124  # as of `timeout`
_POLL_S = 0.5


def watch(record: FlightRecord, rank: int, n_ranks: int) -> None:
    """Start the thread, if the environment asks for it.

    Raises `OptionError` if the variable is no number of seconds.
    """
    timeout_s = seconds_in(TIMEOUT)
    if timeout_s is None:
        return
    thread = threading.Thread(
        target=_watch, args=(record, rank, n_ranks, timeout_s), name="autopar watchdog", daemon=True
    )
    thread.start()


def _watch(
    record: FlightRecord, rank: int, n_ranks: int, timeout_s: float,
    end: Callable[[int], object] = os._exit,
) -> None:  # fmt: skip
    """Wait until the rank is stuck; then say so, and end."""
    known = _known(record, rank, n_ranks)
    while longest_step_s(known, time.time()) <= timeout_s:
        time.sleep(min(_POLL_S, timeout_s / 4))
        known = _known(record, rank, n_ranks)
    known |= _notes_of_all()
    said = diagnosis(known, n_ranks, time.time())
    stuck = f"autopar: rank {rank} was in one action or call for more than {timeout_s:g} s"
    sys.stderr.write(f"{stuck}\n{said}\n")
    sys.stderr.flush()
    _wake(known, rank)
    end(EXIT_CODE)


def _known(record: FlightRecord, rank: int, n_ranks: int) -> dict[int, list[Note]]:
    """What says whether this rank is stuck: its own notes; in a save, those of all ranks.

    A rank that waits there for others of which nothing can be read is left to the timeout of the
    process group.
    """
    last = record.last
    if last is None:
        return {}
    if last["action"] != TOGETHER:
        return {rank: [last]}
    notes = _notes_of_all() | {rank: [last]}
    return notes if len(notes) == n_ranks else {}


def _notes_of_all() -> dict[int, list[Note]]:
    folder = os.environ.get(FOLDER)
    return read_notes(Path(folder)) if folder else {}


def _wake(notes: Mapping[int, Sequence[Note]], rank: int) -> None:
    """Continue ranks of this host that were stopped: a stopped process takes no SIGTERM, with which
    torchrun ends them. Others do not notice.
    """
    last = [of[-1] for other, of in notes.items() if of and other != rank]
    own = [note["pid"] for note in last if note.get("host") == HOST]
    for pid in own:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(int(pid), signal.SIGCONT)
