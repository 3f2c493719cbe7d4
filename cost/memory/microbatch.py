"""Plays the moments of a microbatch on a ledger: its forward, then one part of backward or both."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from autopar.cost.memory.ledger import Ledger, LedgerState, StorageId
from autopar.cost.memory.live_microbatch import (
    ACTIVATIONS,
    GATHERS,
    GRADIENTS,
    LASTING,
    REDUCTIONS,
    MicrobatchWalk,
)
from autopar.program.lines import StageProgram


class MicrobatchMemory:
    """The moments of a microbatch of a program, to be played on a ledger any number of times."""

    def __init__(self, program: StageProgram, ledger: Ledger) -> None:
        self.ledger, self.is_split = ledger, program.splits_backward
        walk = MicrobatchWalk(program)
        walk.forward()
        self._n_forward = len(walk.moments)
        self._n_first = walk.backward()
        walk.regions.settle(walk.moments)
        self._moments, self._repeats = walk.moments, walk.repeats
        self._before: LedgerState | None = None

    def works(self) -> list[list[int]]:
        """The number of the work of each marked moment, of forward and both parts of backward."""
        ends = [0, self._n_forward, self._n_first, len(self._moments)]
        parts = (self._moments[start:stop] for start, stop in itertools.pairwise(ends))
        return [[m.work for m in part if m.text] for part in parts]

    def forward(self) -> None:
        """Afterwards what backward needs, the loss and sent tensors are held."""
        self._play(0, self._n_forward)

    def backward_input(self) -> None:
        """All of backward, or its first part. Afterwards what the second part needs is held."""
        self._play(self._n_forward, self._n_first)

    def backward_weight(self) -> None:
        """The second part, or nothing. Afterwards only the gradients of parameters are held."""
        self._play(self._n_first, len(self._moments))
        self.forget()

    def forget(self) -> None:
        """Free everything of the microbatch but the gradients of parameters."""
        for kind in (ACTIVATIONS, GRADIENTS, GATHERS, REDUCTIONS):
            self.ledger.clear(kind)

    def _play(self, start: int, stop: int) -> None:
        ledger = self.ledger
        for m in range(start, stop):
            moment, repeats = self._moments[m], self._repeats.get(m, ())
            if any(is_first for is_first, _ in repeats):
                self._before = ledger.before_block()
            self._make(moment.made)
            if moment.text:
                ledger.mark(moment.text, moment.workspace_bytes)
            self._make(moment.made_after)
            for kind, owner in moment.ended:
                ledger.drop(kind, owner)
            for is_first, count in repeats:
                if not is_first and self._before is not None:
                    ledger.repeat(self._before, count, LASTING)
                    self._before = None

    def _make(self, storages: Sequence[tuple[StorageId, float]]) -> None:
        for (kind, owner), size_bytes in storages:
            if kind not in LASTING or not self.ledger.has(kind, owner):
                self.ledger.add(kind, owner, size_bytes)
