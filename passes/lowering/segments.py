"""Which lines run again in backward: turns the operators that a strategy recomputes into segments.

A segment begins with the reshards and gathers for its first operator. It ends with the last line
whose backward needs something that the segment does not keep: a result of the segment, or bytes
that only that operator saves. The lines after it (the last matmul's reduction, a sum, a dropout)
keep nothing, so running them again would be useless. They stay outside and run once.

Of its lines those run again that a backward needs (`autopar/program/communication/reruns.py`).
torch.utils.checkpoint too stops as soon as it has all that autograd saved: the last matmul of a
block does not run twice, nor a view of a sum over ranks whose result is kept.

A reshard of a tensor from before the segment does not run again if its result is no larger and
nothing else needs the tensor: then the result is kept instead.

In mode "gathers", moves that make a shard larger run again, and nothing else does.

In mode "selective", the results of lines with matmul FLOPs and of reshards that communicate are
kept. Parameters are gathered again all the same: only the activations of a block are kept. A
matmul's result that only a kept reshard reads (a partial sum, as large as the whole) is not kept.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace

from autopar.manual import Recompute
from autopar.placement import COLLECTIVES
from autopar.program.communication import line_needs
from autopar.program.graph import Program
from autopar.program.lines import (
    CallLine,
    GatherLine,
    Line,
    MoveLine,
    Recomputed,
    Segment,
    StageProgram,
    free_name,
    identifier,
    reserved_names,
    storage_owners,
)

# A range of lines, as [start, stop).
_Span = tuple[int, int]


def with_segments(
    program: StageProgram, wanted: Sequence[Recomputed], captured: Program
) -> StageProgram:
    """`program` with the segments of what a strategy recomputes.

    Operators whose backward needs nothing make no segment.
    """
    found: list[Segment] = []
    taken = {*program.arguments, *(name for line in program.body for name in line.writes)}
    taken |= reserved_names(program.axis_names)
    owners = _owners(program.body) if wanted else []
    uses = _uses(program, owners)
    places = {line.key: i for i, line in enumerate(program.body) if isinstance(line, CallLine)}
    calls = [*places.values()]
    for item in wanted:
        keys = [captured.keys[name] for name in item.operators]
        span = _span(calls, [places[key] for key in keys if key in places])
        last = _last_needed(program, span, owners) if span else None
        if span is None or last is None:
            continue
        name = _name(keys, taken)
        taken.add(name)
        span = span[0], last + 1
        reshards = {i for i in range(*span) if _stands_for_source(program, i, span, owners, uses)}
        segment = _segment(program, span, item.mode, name, reshards)
        if any(not isinstance(program.body[i], GatherLine) for i in segment.again):
            found.append(segment)  # else only parameters are gathered, as without it
    return replace(program, segments=tuple(found))


def _span(calls: Sequence[int], inside: Sequence[int]) -> _Span | None:
    """The lines from the first reshard or gather for some of the operators to the last one."""
    if not inside:
        return None
    first = calls.index(min(inside))
    return (calls[first - 1] + 1 if first else 0), max(inside) + 1


def _owners(body: Sequence[Line]) -> list[Mapping[str, str]]:
    """Per line, the storage owners of the variables that it reads or writes."""
    return [
        {n: owner[n] for n in (*line.reads, *line.writes) if n in owner}
        for line, owner in zip(body, storage_owners(body), strict=True)
    ]


def _uses(program: StageProgram, owners: Sequence[Mapping[str, str]]) -> Counter[str]:
    """Storage owner -> how often it is read, kept by an operator, or returned."""
    uses: Counter[str] = Counter()
    last: dict[str, str] = {}
    for line, owner in zip(program.body if owners else (), owners, strict=True):
        kept = line.keeps if isinstance(line, CallLine) else ()
        uses.update(owner[name] for name in (*dict.fromkeys(line.reads), *kept) if name in owner)
        last |= owner
    uses.update(last[name] for name in program.returned if name in last)
    return uses


def _stands_for_source(
    program: StageProgram,
    i: int,
    span: _Span,
    owners: Sequence[Mapping[str, str]],
    uses: Mapping[str, int],
) -> bool:
    """Is a line a reshard whose result can be kept instead of what it reads, made before `span`?"""
    line = program.body[i]
    if not isinstance(line, MoveLine):
        return False
    owner = owners[i].get(line.source)
    if owner is None or uses[owner] > 1 or _made_in(owner, span):
        return False
    return line.out.size_bytes <= program.variables[line.source].size_bytes


def _last_needed(
    program: StageProgram, span: _Span, owners: Sequence[Mapping[str, str]]
) -> int | None:
    """The last line of the span whose backward needs what the span makes."""
    made = {owner for i in range(*span) for owner in owners[i].values() if _made_in(owner, span)}
    for i in range(span[1] - 1, span[0] - 1, -1):
        line = program.body[i]
        if i in program.differentiated and isinstance(line, CallLine) and line.has_grad:
            kept = {owners[i].get(name, name) for name in line.keeps}
            if line.saved_bytes or kept & made:
                return i
    return None


def _made_in(owner: str, span: _Span) -> bool:
    """Is the owner made within the span? `storage_owners` writes `variable@line`."""
    _, at, line = owner.rpartition("@")
    return bool(at) and span[0] <= int(line) < span[1]


def _segment(
    program: StageProgram, span: _Span, mode: Recompute, name: str, reshards: Set[int]
) -> Segment:
    """Of the lines that are not kept, those that the backward of some line needs run again."""
    body, (*lines, end) = program.body, range(*span)
    kept = {i for i in (*lines, end) if _is_kept(program, i, mode, end)} | reshards
    needs, may_run = line_needs(body, *span), {*lines, end} - kept
    again = {
        k
        for i in program.differentiated.intersection(range(*span))
        for k in needs.reruns(i, may_run)
    }
    return Segment(name, mode, *span, tuple(sorted(again)))


def _is_kept(program: StageProgram, i: int, mode: Recompute, end: int) -> bool:
    """Is the result of a line kept? In "selective", that of the last line is not."""
    line = program.body[i]
    if mode == "gathers":
        return not (isinstance(line, GatherLine) or _grows(program, line))
    if mode != "selective" or i == end:
        return False
    if isinstance(line, MoveLine):
        return line.move.forward in COLLECTIVES
    return isinstance(line, CallLine) and line.flops > 0 and line.lowered is None


def _grows(program: StageProgram, line: Line) -> bool:
    """Is it a move that makes more of a shard of an activation?"""
    if not isinstance(line, MoveLine) or line.move.forward != "all_gather":
        return False
    return line.out.size_bytes > program.variables[line.source].size_bytes


def _name(keys: Sequence[str], taken: Set[str]) -> str:
    """The innermost module that holds all the operators, as an unused name of the program."""
    modules = [key.rpartition("/")[0].split(".") for key in keys]
    shared = itertools.takewhile(lambda words: len(set(words)) == 1, zip(*modules, strict=False))
    return free_name(identifier(".".join(words[0] for words in shared) or "block"), taken)
