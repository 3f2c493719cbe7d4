"""The live bytes of a rank over a step, moment by moment, and what is held at the peak.

The step is that of `peak_memory` (`liveness.py`), played on a ledger that remembers every mark. The
largest mark is the peak.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain, repeat

from autopar.cost.memory.ledger import Ledger
from autopar.cost.memory.live_microbatch import ACTIVATIONS
from autopar.cost.memory.liveness import phases_of
from autopar.program.lines import CallLine, GatherLine, Line, MoveLine, StageProgram


@dataclass(frozen=True)
class LiveBytes:
    """Bytes by kind at a moment, and the number of its work in the order of its phase."""

    at: str
    parts: Mapping[str, float]
    work: int

    @property
    def size_bytes(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True)
class Phase:
    """Moments of a phase; `left` is held between its end and the next phase."""

    name: str
    moments: tuple[LiveBytes, ...]
    left: Mapping[str, float]


@dataclass(frozen=True)
class MemoryCourse:
    """The phases of `phases_of`, and (kind, what) -> bytes held at the peak.

    What is held is named by its operator, parameter or input.
    """

    phases: tuple[Phase, ...]
    peak_phase: int
    peak: LiveBytes
    held: Mapping[tuple[str, str], float]


def memory_course(
    program: StageProgram, optimizer: str, n_in_flight: int = 1, n_under_way: int = 0
) -> MemoryCourse:
    """The moments of `peak_memory` with the same arguments."""
    ledger = _Recorder(program)
    phases: list[Phase] = []
    for name, works in phases_of(program, optimizer, n_in_flight, n_under_way, ledger):
        numbers = chain(works, repeat(works[-1] if works else 0))  # what follows has the last one
        numbered = zip(ledger.marks, numbers, strict=False)
        moments = tuple(LiveBytes(at, parts, number) for (at, parts), number in numbered)
        phases.append(Phase(name, moments, dict(ledger.totals)))
        ledger.marks = []
        if ledger.peak_bytes > ledger.best_bytes:
            ledger.best_bytes, peak_phase = ledger.peak_bytes, len(phases) - 1
    held: dict[tuple[str, str], float] = {}
    for kind, owner, size_bytes in ledger.changes[: ledger.n_at_peak]:
        key = kind, _what(owner, program)
        held[key] = held.get(key, 0.0) + size_bytes
    held["workspace", ledger.at] = ledger.parts_at_peak["workspace"]
    peak = LiveBytes(ledger.at, ledger.parts_at_peak, 0)
    return MemoryCourse(
        tuple(phases), peak_phase, peak, {key: size for key, size in held.items() if size}
    )


class _Recorder(Ledger):
    """A ledger that remembers bytes by kind at every mark, and every change.

    Gathered parameters, which live as activations do, are a kind of their own.
    """

    def __init__(self, program: StageProgram) -> None:
        super().__init__()
        self.program = program
        self.totals: dict[str, float] = {}
        self.marks: list[tuple[str, dict[str, float]]] = []
        self.changes: list[tuple[str, str, float]] = []
        self.n_at_peak, self.parts_at_peak = 0, dict[str, float]()
        self.best_bytes = 0.0  # of the phases so far

    def add(self, kind: str, owner: str, size_bytes: float) -> None:
        super().add(kind, owner, size_bytes)
        self._change(kind, owner, size_bytes)

    def drop(self, kind: str, owner: str) -> float:
        size_bytes = super().drop(kind, owner)
        self._change(kind, owner, -size_bytes)
        return size_bytes

    def mark(self, at: str, workspace_bytes: float = 0.0) -> None:
        before_bytes = self.peak_bytes
        super().mark(at, workspace_bytes)
        self.marks.append((at, {**self.totals, "workspace": workspace_bytes}))
        if self.peak_bytes > before_bytes:
            self.n_at_peak, self.parts_at_peak = len(self.changes), self.marks[-1][1]

    def _change(self, kind: str, owner: str, size_bytes: float) -> None:
        if kind == ACTIVATIONS and isinstance(_line(owner, self.program), GatherLine):
            kind = "gathered"
        self.totals[kind] = self.totals.get(kind, 0.0) + size_bytes
        self.changes.append((kind, owner, size_bytes))


def _line(owner: str, program: StageProgram) -> Line | None:
    """The line that made a storage: `x@12` is of line 12 (`live_microbatch.py`)."""
    match = re.search(r"@(\d+)", owner)
    return program.body[int(match[1])] if match else None


def _what(owner: str, program: StageProgram) -> str:
    match _line(owner, program):
        case CallLine(key=key):
            return key
        case GatherLine(parameter=name) | MoveLine(value=name):
            return name
        case _:
            return owner.partition("@")[0]
