"""Buffers of collectives besides their results: of moves, gathers of parameters, reductions."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.placement import PrimitiveKind
from autopar.program.lines import GatherLine, MoveLine


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


def gather_bytes(line: GatherLine) -> float:
    """Buffers of a gather, and the tensors between its moves."""
    needed = 0.0
    for n, move in enumerate(line.moves):
        between = float(move.out.size_bytes) if n + 1 < len(line.moves) else 0.0
        own = primitive_bytes(move, move.move.forward, move.forward_bytes)
        needed = max(needed, own + between)
    return needed


def reduction_bytes(lines: Sequence[GatherLine]) -> tuple[float, bool]:
    """What the beginning of a reduction of gradients needs besides its buffers: casts, and cuts.

    Also whether its buffer is the gradient itself, as of one that needs neither.
    """
    casts = sum(
        line.moves[0].backward_bytes
        for line in lines
        if line.out.gradient_dtype not in (None, line.out.dtype)
    )
    cuts = sum(
        primitive_bytes(line.moves[0], "reduce_scatter", line.moves[0].backward_bytes)
        for line in lines
    )
    is_fused = len(lines) > 1
    return casts + (cuts if is_fused else 0.0), not is_fused and not cuts and not casts
