"""Puts the gathers of a block's parameters (ZeRO-3) side by side, at the block's beginning.

There they run as few calls (`program/communication/gathers.py`), of whose seconds each has its
share, by bytes. `program/graph/blocks.py` says what a block is. Operators outside of blocks gather
what they read themselves. A block that reads a parameter twice gathers twice, as two runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopar.cost.laws import CostModel
from autopar.program.communication import fused_gathers, gathers_at, runs_of
from autopar.program.lines import CallLine, GatherLine, Line, MoveLine, StageProgram


def with_gathers_first(body: Sequence[Line]) -> list[Line]:
    """The lines, with the gathers of every block before its first line."""
    if not any(isinstance(line, GatherLine) for line in body):
        return list(body)
    found: list[Line] = []
    waiting: list[Line] = []
    block, at, gathered = None, 0, set[str]()
    for line in body:
        waiting.append(line)
        if not isinstance(line, CallLine):
            continue
        own = line.block
        gathers = [x for x in waiting if isinstance(x, GatherLine)]
        place = len(found)
        if own is not None:
            names = {x.parameter for x in gathers}
            if own != block or not names.isdisjoint(gathered):
                block, at, gathered = own, len(found), set()
            gathered |= names
            place, at = at, at + len(gathers)
        found[place:place] = gathers
        found += [x for x in waiting if not isinstance(x, GatherLine)]
        waiting = []
    return found + waiting


def with_shared_prices(program: StageProgram, cost: CostModel) -> StageProgram:
    """`program` with the seconds of fused gathers, and of the reductions of their gradients."""
    priced: dict[int, GatherLine] = {}
    for run in dict.fromkeys(runs_of(program).values()):
        priced |= zip(run, gathers_at(program, run), strict=True)
        for is_backward in (False, True):
            for call in fused_gathers(program, run[::-1] if is_backward else run, is_backward):
                if len(call) > 1:
                    members = [priced[i] for i in call]
                    priced |= zip(call, _shared(members, cost, is_backward), strict=True)
    if not priced:
        return program
    body = tuple(priced.get(i, line) for i, line in enumerate(program.body))
    return replace(program, body=body)


def _shared(members: Sequence[GatherLine], cost: CostModel, is_backward: bool) -> list[GatherLine]:
    moves: list[MoveLine] = [line.moves[0] for line in members]
    first = moves[0].move
    kind = first.backward if is_backward else first.forward
    sizes = [move.backward_bytes if is_backward else move.forward_bytes for move in moves]
    each_s = cost.primitive_time_s(kind, sum(sizes), first.axes) / max(sum(sizes), 1)
    found = []
    for line, move, size_bytes in zip(members, moves, sizes, strict=True):
        time_s = each_s * size_bytes
        shared = (
            replace(move, backward_s=time_s) if is_backward else replace(move, forward_s=time_s)
        )
        found.append(replace(line, moves=(shared,)))
    return found
