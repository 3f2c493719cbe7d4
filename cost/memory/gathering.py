"""Live bytes of ZeRO-3: parameters gathered one run ahead, gradients reduced one run behind.

    gathers       when a run is there, the buffers of the next one are made   `Gathering.arrive`
    reductions    of a run's gradients, held until those of the next begin    `Gathering.reduce`

A fused call has a flat buffer, out of which results are copied (`runtime/collectives/fused.py`).
`passes/backward/gathers.py` has the order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from autopar.cost.memory.ledger import Ledger
from autopar.placement import COLLECTIVES, PrimitiveKind
from autopar.program import GatherLine, MoveLine, StageProgram, fused_gathers

GATHERS, REDUCTIONS = "gathers under way", "reductions under way"
Call = tuple[GatherLine, ...]


class Gathering:
    """The calls under way on a ledger."""

    def __init__(self, program: StageProgram, ledger: Ledger) -> None:
        self.sizes, self.ledger = program.axis_sizes, ledger
        self._reducing: list[Call] = []

    def arrive(
        self, run: Sequence[GatherLine], make: Callable[[GatherLine], None],
        following: Sequence[GatherLine] = (),
    ) -> None:  # fmt: skip
        """A run is there: `make` its tensors. Then the calls of the `following` run begin."""
        for call in fused_gathers(run):
            self.ledger.drop(GATHERS, _handle(call))
            for line in call:
                make(line)
            fused = float(sum(line.out.size_bytes for line in call))
            needed = fused if len(call) > 1 else gather_bytes(call[0])
            self.ledger.mark(f"gathering {_handle(call)}", needed)
        for call in fused_gathers(following):
            if _is_one_call(call, backward=False):
                whole = float(sum(line.out.size_bytes for line in call))
                shards = whole / self._n_ranks(call) if len(call) > 1 else 0.0
                self.ledger.add(GATHERS, _handle(call), whole + shards)
        self.ledger.mark("gathering")

    def reduce(
        self, run: Sequence[GatherLine], release: Callable[[GatherLine], None],
        arrive: Callable[[GatherLine], None], arrived: Callable[[Call], None],
    ) -> None:  # fmt: skip
        """Begin to reduce a run's gradients, when those before it are there.

        release   frees the gradient of a gathered parameter
        arrive    reduces one that is not begun early, and keeps it
        arrived   keeps the results of a call that was waited for
        """
        self.wait(arrived)
        for call in fused_gathers(run, backward=True):
            if not _is_one_call(call, backward=True):
                arrive(call[0])
                continue
            whole = float(sum(line.moves[0].backward_bytes for line in call))
            under_way = whole + whole / self._n_ranks(call)
            casts = sum(
                line.moves[0].backward_bytes
                for line in call
                if line.out.gradient_dtype not in (None, line.out.dtype)
            )
            cuts = sum(
                primitive_bytes(x.moves[0], "reduce_scatter", x.moves[0].backward_bytes)
                for x in call
            )
            needed = under_way + casts + (cuts if len(call) > 1 else 0.0)
            is_view = len(call) == 1 and not cuts and not casts
            self.ledger.mark(f"reducing {_handle(call)}", needed - whole * is_view)
            for line in call:
                release(line)
            self.ledger.add(REDUCTIONS, _handle(call), under_way)
            self._reducing.append(call)

    def wait(self, arrived: Callable[[Call], None]) -> None:
        """Wait for the reductions under way."""
        for call in self._reducing:
            self.ledger.drop(REDUCTIONS, _handle(call))
            arrived(call)
        self._reducing.clear()

    def forget(self) -> None:
        self._reducing.clear()
        for kind in (GATHERS, REDUCTIONS):
            self.ledger.clear(kind)

    def _n_ranks(self, call: Call) -> int:
        return math.prod(self.sizes[axis] for axis in call[0].moves[0].move.axes)


def gather_bytes(line: GatherLine) -> float:
    """Buffers of a gather, and the tensors between its moves."""
    needed = 0.0
    for n, move in enumerate(line.moves):
        between = float(move.out.size_bytes) if n + 1 < len(line.moves) else 0.0
        own = primitive_bytes(move, move.move.forward, move.forward_bytes)
        needed = max(needed, own + between)
    return needed


def primitive_bytes(line: MoveLine, kind: PrimitiveKind, size_bytes: int) -> float:
    """Buffers of a primitive besides its result; cutting and joining rows needs no copy."""
    rows = all(s.dim == 0 and s.outer == 1 for s in line.move.splits)
    match kind:
        case "all_gather" | "reduce_scatter":
            return 0.0 if rows else float(size_bytes)
        case "all_to_all":
            return 2.0 * size_bytes
        case _:
            return 0.0


def _is_one_call(call: Call, backward: bool) -> bool:
    moves = [move.move.backward if backward else move.move.forward for move in call[0].moves]
    return len(moves) == 1 and moves[0] in COLLECTIVES


def _handle(call: Call) -> str:
    return ", ".join(line.parameter for line in call)
