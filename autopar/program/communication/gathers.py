"""Which gathers of ZeRO-3 run as one call, and which reductions of their gradients.

Gathers that stand side by side in a body are a *run*: those of a block, because lowering puts them
at its beginning (`passes/lowering/gathers.py`). The gathers of a run that are one all_gather each,
over the same axes and in the same dtype, are fused into calls of at most `BUCKET_BYTES`; so are the
reduce_scatters of their gradients. All others are calls of their own. `order.py` says
when they run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from autopar.caching import once
from autopar.program.communication.bucketing import BUCKET_BYTES, buckets
from autopar.program.lines import GatherLine, StageProgram

_FUSED = ("all_gather", "reduce_scatter")


@once
def runs_of(program: StageProgram) -> dict[int, tuple[int, ...]]:
    """Position of a gather -> the positions of its run."""
    found: dict[int, tuple[int, ...]] = {}
    run: list[int] = []
    for i, line in enumerate((*program.body, None)):
        if isinstance(line, GatherLine):
            run.append(i)
            continue
        found |= dict.fromkeys(run, tuple(run))
        run = []
    return found


def reduced_runs(program: StageProgram) -> dict[int, tuple[int, ...]]:
    """Last position of a run, of gathers with a gradient -> the positions of all of these."""
    trained = program.differentiated
    runs = ([k for k in run if k in trained] for run in dict.fromkeys(runs_of(program).values()))
    return {run[-1]: tuple(run) for run in runs if run}


def gathers_at(program: StageProgram, positions: Iterable[int]) -> list[GatherLine]:
    """The gathers at some positions of the body."""
    lines = (program.body[i] for i in positions)
    return [line for line in lines if isinstance(line, GatherLine)]


def fused_gathers(
    program: StageProgram, run: Sequence[int], backward: bool = False
) -> list[tuple[int, ...]]:
    """The positions of one run by call, in order: of gathers, or of reductions of gradients."""
    keyed = []
    for position, line in zip(run, gathers_at(program, run), strict=True):
        move = line.moves[0]
        kind = move.move.backward if backward else move.move.forward
        is_fused = len(line.moves) == 1 and kind in _FUSED
        size_bytes = move.backward_bytes if backward else move.forward_bytes
        dtype: torch.dtype | None = line.out.dtype
        if backward:
            dtype = line.out.gradient_dtype or dtype
        keyed.append([((kind, move.move.axes, dtype) if is_fused else position, size_bytes)])
    return [tuple(run[i] for i in b.members) for b in buckets(keyed, BUCKET_BYTES)]
