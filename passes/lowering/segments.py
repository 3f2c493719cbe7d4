"""Which lines run again in backward: from operators that a strategy recomputes to segments.

A segment begins with what is done for its first operator (reshards, gathers), and ends with the
last line of which backward needs something that a segment does not keep: a result of its own, or
what only that operator knows. What comes after (the last product's reduction, a sum, a dropout)
keeps nothing, so running it again would be for nothing; it runs outside, once.

torch.utils.checkpoint stops running again when it has all that autograd saved. Where the last
line saves only what it reads, that is before it runs (`Segment.stops_early`): the last product
of a block is not done twice.

In mode "selective" the results of lines with products and of reshards that communicate are kept.
A parameter is gathered again all the same: what is kept of a block is its activations. A product
of which only such a reshard reads (a partial sum, as large as the whole) is not kept besides: of
it nothing is needed again (`Segment.handed_on`).
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import replace

from autopar.options import Recompute
from autopar.passes.analysis import identifier, reserved_names
from autopar.placement import COLLECTIVES
from autopar.program import (
    CallLine,
    Line,
    MoveLine,
    Program,
    Recomputed,
    Segment,
    StageProgram,
    reads,
    storage_owners,
    writes,
)

# A span of lines, as [start, stop).
_Span = tuple[int, int]


def with_segments(
    program: StageProgram, wanted: Sequence[Recomputed], captured: Program
) -> StageProgram:
    """`program`, before it has frees, with the segments of what a strategy recomputes.

    Operators of which backward needs nothing make none.
    """
    found: list[Segment] = []
    taken = {*program.given, *(name for line in program.body for name in writes(line))}
    taken |= reserved_names(program.axis_names)
    owners = _owners(program.body) if wanted else []
    for item in wanted:
        keys = [captured.keys[name] for name in item.operators]
        span = _span(program.body, frozenset(keys))
        last = _last_needed(program, span, owners) if span else None
        if span is None or last is None:
            continue
        name = _name(keys, taken)
        taken.add(name)
        found.append(_segment(program, (span[0], last + 1), item.mode, name))
    return replace(program, segments=tuple(found))


def _span(body: Sequence[Line], keys: Collection[str]) -> _Span | None:
    """From what is done for the first operator to the last one."""
    calls = [(i, line.key) for i, line in enumerate(body) if isinstance(line, CallLine)]
    inside = [n for n, (_, key) in enumerate(calls) if key in keys]
    if not inside:
        return None
    first, last = inside[0], inside[-1]
    return (calls[first - 1][0] + 1 if first else 0), calls[last][0] + 1


def _owners(body: Sequence[Line]) -> list[Mapping[str, str]]:
    """Per line, the owners of what it touches."""
    return [
        {n: owner[n] for n in (*reads(line), *writes(line)) if n in owner}
        for line, owner in zip(body, storage_owners(body), strict=True)
    ]


def _last_needed(
    program: StageProgram, span: _Span, owners: Sequence[Mapping[str, str]]
) -> int | None:
    """The last line whose backward needs what is made between the ends of the span."""
    made = {owner for i in range(*span) for owner in owners[i].values() if _made_in(owner, span)}
    for i in range(span[1] - 1, span[0] - 1, -1):
        line = program.body[i]
        if i in program.differentiated and isinstance(line, CallLine) and line.has_grad:
            kept = {owners[i].get(name, name) for name in line.keeps}
            if line.saved_bytes or kept & made:
                return i
    return None


def _made_in(owner: str, span: _Span) -> bool:
    """`storage_owners` writes `variable@line`."""
    _, at, line = owner.rpartition("@")
    return bool(at) and span[0] <= int(line) < span[1]


def _segment(program: StageProgram, span: _Span, mode: Recompute, name: str) -> Segment:
    body, lines = program.body, range(*span)
    made = dict.fromkeys(n for i in lines for n in writes(body[i]))
    before = {n for line in body[: span[0]] for n in writes(line)} | program.given
    after = {n for line in body[span[1] :] for n in reads(line)} | program.taken
    last = body[span[1] - 1]
    assert isinstance(last, CallLine)
    kept = {i for i in lines[:-1] if mode == "selective" and _is_kept(body[i])}
    handed_on = {i for i in kept if _is_handed_on(body, lines, kept, i)}
    return Segment(
        name,
        mode,
        span[0],
        span[1],
        span[1] - 1,
        tuple(dict.fromkeys(n for i in lines for n in reads(body[i]) if n in before)),
        tuple(n for n in made if n in after),
        frozenset(kept - handed_on),
        frozenset(handed_on),
        _saves_before_it_runs(last),
    )


def _is_kept(line: Line) -> bool:
    if isinstance(line, MoveLine):
        return line.move.forward in COLLECTIVES
    return isinstance(line, CallLine) and line.flops > 0 and line.lowered is None


def _is_handed_on(body: Sequence[Line], lines: range, kept: Set[int], i: int) -> bool:
    """Do only reshards that are kept read what a product made?"""
    made = set(writes(body[i]))
    readers = [k for k in lines if k != i and not made.isdisjoint(reads(body[k]))]
    line = body[i]
    return (
        isinstance(line, CallLine)
        and made.isdisjoint(line.keeps)
        and bool(readers)
        and all(k in kept and isinstance(body[k], MoveLine) for k in readers)
    )


def _saves_before_it_runs(line: CallLine) -> bool:
    """ATen's operators save inputs before their kernels run, products also the copies that they
    make of them; what else is saved there is made by the kernel. Functions of Python save when
    they have run."""
    is_product = line.flops > 0 and not line.is_attention
    return (
        line.lowered is None
        and line.target.startswith("aten.")
        and (is_product or not line.saved_bytes)
        and {out.name for out in line.outs}.isdisjoint(line.keeps)
    )


def _name(keys: Sequence[str], taken: Set[str]) -> str:
    """The module that holds all the operators, as a name of the generated program."""
    modules = [key.rpartition("/")[0].split(".") for key in keys]
    shared = itertools.takewhile(lambda words: len(set(words)) == 1, zip(*modules, strict=False))
    wanted = identifier(".".join(words[0] for words in shared) or "block")
    name, n = wanted, 2
    while name in taken:
        name, n = f"{wanted}_{n}", n + 1
    return name
