"""Microbatches of packed documents: each has its own work in attention.

    load    the pairs that its documents show, over the mean        (`autopar/lengths.py`)

Attention to documents takes `load` times as long as the mean, with all its seconds. Ranks that have
other rows have other loads. A step ends with the rank that has most of it, so that one is
simulated. If ranks wait for each other in every microbatch (ZeRO-3 gathers there), each microbatch
takes as long as on the rank that has most of it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

from autopar.cost.laws import CostModel
from autopar.lengths import row_loads
from autopar.operators import ATTENTION_RANGES
from autopar.program.lines import CallLine, GatherLine, Line, Local, StageProgram


def document_lines(program: StageProgram) -> Collection[int]:
    """Positions of attention to documents whose lengths are those of the batch."""
    return {
        i
        for i, line in enumerate(program.body)
        if isinstance(line, CallLine)
        and line.target == str(ATTENTION_RANGES)
        and line.args[8:] == (True,)
    }


def share_of_pairs(programs: Iterable[StageProgram], cost: CostModel) -> float | None:
    """What documents show of the pairs of a row, on average; None if nothing depends on that."""
    calls = (program.body[i] for program in programs for i in document_lines(program))
    line = next(calls, None) if cost.lengths else None
    return None if line is None else cost.shown(_row_tokens(_attended(line)))


def document_loads(program: StageProgram, cost: CostModel) -> tuple[float, ...]:
    """Of each microbatch of a stage; none if `lengths` are not given, or nothing reads them."""
    lines = document_lines(program)
    if not cost.lengths or not lines:
        return ()
    out = _attended(program.body[min(lines)])
    n_tokens, n_rows, n_ranks = _row_tokens(out), 1, 1
    if len(out.dims) > 3:
        n_rows = math.prod(out.dims[0])
        n_ranks = math.prod(
            size
            for size, placement in zip(cost.mesh.sizes, out.spec.placements, strict=True)
            if placement.is_shard and placement.cell[0] == 0
        )
    n = program.n_microbatches
    rows = row_loads(cost.lengths, n_tokens, n * n_rows).reshape(n_ranks, n, -1)
    loads = rows.mean(axis=-1)
    if any(isinstance(line, GatherLine) for line in program.body):
        return tuple(loads.max(axis=0).tolist())
    return tuple(loads[loads.sum(axis=1).argmax()].tolist())


def _attended(line: Line) -> Local:
    """The result of attention: [rows, heads, tokens, features]."""
    assert isinstance(line, CallLine)
    return line.outs[0]


def _row_tokens(out: Local) -> int:
    return math.prod(out.dims[-2])
