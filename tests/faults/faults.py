"""One fault of one rank, at a moment of its own: how it is armed, and what fires.

A rank notes every action, collective and part of a save (`runtime/flight`). A fault fires right
after the n-th note, so that the rank's last note says where it was; or, if it comes from outside,
some time after training began, wherever the rank is then.
"""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from autopar.runtime.flight import FlightRecord

KINDS = ("SIGKILL", "SIGSTOP", "raise", "exit")
FIRED = "fired.json"
_over = threading.Event()


class InjectedError(RuntimeError):
    """What a rank raises."""


@dataclass(frozen=True)
class Fault:
    """`after_note`: fires after that many notes; None: `after_s` seconds after training began."""

    kind: str
    rank: int
    after_note: int | None
    after_s: float = 0.0


def drawn(generator: random.Random, n_ranks: int, most_notes: int, most_s: float) -> Fault:
    """A random fault. Only signals can come from outside."""
    kind = generator.choice(KINDS)
    rank = generator.randrange(n_ranks)
    if kind in ("SIGKILL", "SIGSTOP") and generator.random() < 0.5:
        return Fault(kind, rank, None, generator.uniform(0.0, most_s))
    return Fault(kind, rank, generator.randrange(1, most_notes))


def arm(fault: Fault | None, folder: Path) -> None:
    """Let the fault fire in this process, if it is this rank's and has not fired before."""
    mine = fault is not None and int(os.environ["RANK"]) == fault.rank
    if fault is None or not mine or (folder / FIRED).exists():
        return
    if fault.after_note is None:
        thread = threading.Thread(target=_later, args=(fault, folder), daemon=True)
        thread.start()
        return
    noted, left = FlightRecord._note, [fault.after_note]

    def counted(self: FlightRecord, call: str | None) -> None:
        noted(self, call)
        left[0] -= 1
        if left[0] == 0:
            _fire(fault, folder, self.last)

    FlightRecord._note = counted  # type: ignore[method-assign]


def disarm() -> None:
    """No fault fires from now on: other ranks will not need this one, so nobody would notice."""
    _over.set()


def _later(fault: Fault, folder: Path) -> None:
    time.sleep(fault.after_s)
    _fire(fault, folder, None)


def _fire(fault: Fault, folder: Path, note: dict[str, Any] | None) -> None:
    if _over.is_set():
        return
    text = json.dumps({"fault": asdict(fault), "time_s": time.time(), "note": note})
    (folder / FIRED).write_text(text)
    if fault.kind == "raise":
        raise InjectedError("injected")
    if fault.kind == "exit":
        os._exit(3)
    os.kill(os.getpid(), signal.Signals[fault.kind])
