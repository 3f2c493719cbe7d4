"""Live bytes where operators run in compiled regions (`autopar/codegen/regions.py`).

    what a region is given             lives until the region returns
    what only operators touch that     is in no memory, nor are temporaries of these operators
    a region fuses
    what they make of its arguments    is there from the beginning: a compiler fuses what reads the
    alone                              same, and so makes it early
    anything else                      lives as without regions: it is freed after its last use

Beside torch.compile on CPUs: `tests/runtime/test_compiled_memory.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.cost.memory.ledger import Moment, StorageId
from autopar.program.communication import Backward, Forward, Work
from autopar.program.lines import (
    CallLine,
    Line,
    MoveLine,
    RegionNumbers,
    StageProgram,
    is_compilable,
    is_fused,
)


class LiveRegions:
    """The regions of a stage's moments; none if the stage is not compiled.

    While moments are written, `enter` says of which work they are, `touch` which storages they make
    or need; `fuses` is whether the work is fused with its neighbours. `settle` then changes where
    storages are made and end.
    """

    def __init__(self, program: StageProgram) -> None:
        self._program = program
        self._regions: list[range] = []  # of moments
        self._numbers = RegionNumbers()
        self._is_passed = self._is_late = self.fuses = False
        # Storage -> the only region that touches it, by fused operators alone; else None.
        self._only: dict[StorageId, int | None] = {}
        # What fused operators make of the arguments of their region alone; what else it makes.
        self._early: set[StorageId] = set()
        self._late: set[StorageId] = set()

    def enter(self, work: Work | None, moment: int) -> None:
        """The moments from this one on are of this work; None: of none."""
        if not self._program.is_compiled:
            return
        if self._numbers.open is not None:
            self._regions[-1] = range(self._regions[-1].start, moment)
        line = self._program.body[work.position] if isinstance(work, Forward | Backward) else None
        self._is_passed = line is not None and _is_view(line)
        if self._is_passed:
            return
        call = line if isinstance(line, CallLine) and is_compilable(line) else None
        number = self._numbers.next(call is not None, call.block if call else None)
        if number == len(self._regions):
            self._regions.append(range(moment, moment))
            self._late.clear()
        self.fuses = call is not None and is_fused(call.target)
        self._is_late = False

    def touch(self, storage: StorageId) -> None:
        """The moment makes or needs a storage."""
        if not self._program.is_compiled or self._is_passed:
            return
        if storage in self._only:
            self._is_late |= storage in self._late
        elif self._numbers.open is not None:
            is_late = self._is_late or not self.fuses
            (self._late if is_late else self._early).add(storage)
        here = len(self._regions) if self.fuses else None
        self._only[storage] = here if self._only.get(storage, here) == here else None

    def settle(self, moments: Sequence[Moment]) -> None:
        """Change the moments to those of the regions."""
        ended = {storage for moment in moments for storage in moment.ended}
        nowhere = {storage for storage in ended if self._only.get(storage) is not None}
        made: dict[StorageId, int] = {}
        for m, moment in enumerate(moments if self._regions else ()):
            moment.made = [item for item in moment.made if item[0] not in nowhere]
            moment.made_after = [item for item in moment.made_after if item[0] not in nowhere]
            moment.ended = [storage for storage in moment.ended if storage not in nowhere]
            made |= {storage: m for storage, _ in (*moment.made, *moment.made_after)}
        for region in self._regions:
            for m in region[1:]:
                early = [item for item in moments[m].made if item[0] in self._early]
                moments[m].made = [item for item in moments[m].made if item not in early]
                moments[region[0]].made += early
            for m in region[:-1]:
                given = [s for s in moments[m].ended if made.get(s, region[0]) < region[0]]
                moments[m].ended = [s for s in moments[m].ended if s not in given]
                moments[region[-1]].ended += given


def _is_view(line: Line) -> bool:
    """Does a line run nothing, either way?"""
    if isinstance(line, MoveLine):
        return line.move.forward == line.move.backward == "identity"
    return isinstance(line, CallLine) and bool(line.shares) and None not in line.shares
