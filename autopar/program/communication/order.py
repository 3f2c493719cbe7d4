"""The order in which a rank works through the lines of a stage: what runs when, both ways.

    forward     the lines of the body, in order
    backward    of every line that has one, last line first; before it, what it needs
                    parameters that it reads, gathered again     (`regathers.py`)
                    the lines of a recomputed segment            (`reruns.py`)

Parameters of ZeRO-3 are gathered and their gradients reduced run by run (`gathers.py`), beside
compute. A run is a block's parameters, so its communication takes as long as its neighbour's
compute:

    gathers       run 1 begins with forward, or with backward; run 2 when run 1 is there
    reductions    those of run 2 are waited for when those of run 1 begin, or at the end

So at most two runs are whole at once. A parameter that needs several moves to be whole is not
gathered ahead; of the moves that reduce its gradient only the last one may run beside compute.

A matmul of two tensors has two gradients, which are matmuls themselves. If the gradient of one is
communicated next, as the sum over ranks of an input's gradient, that one comes first:

    before    both gradients, all_reduce
    after     the input's gradient, start, the weight's gradient, wait

What the weight's gradient reads is alive there anyway. No call changes places with another.

If a program splits backward, all of it is in two parts, each in this order (`backwards.py`):

    first     gradients of activations
    second    gradients that only parameters need, and the reductions of those

What runs again, or is gathered again, does so before the first backward that needs it.

Time, bytes, collectives and the lines of backward are all read off this order: `cost/price`,
`cost/memory`, `collective.py`, `passes/backward`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.caching import once
from autopar.placement import COLLECTIVES
from autopar.program.communication.backwards import MATMULS, Backward, backwards
from autopar.program.communication.gathers import fused_gathers, gathers_at, reduced_runs, runs_of
from autopar.program.communication.loss_at_end import lines_at_end
from autopar.program.communication.regathers import kept_gathers, repeated_gathers
from autopar.program.communication.reruns import reruns
from autopar.program.lines import CallLine, GatherLine, MoveLine, StageProgram


@dataclass(frozen=True)
class Forward:
    """The line at `position` runs; `again` if that is in backward."""

    position: int
    again: bool = False


@dataclass(frozen=True)
class Gather:
    """The gathers at `positions` run as one call; `again` if that is in backward."""

    positions: tuple[int, ...]
    again: bool = False


@dataclass(frozen=True)
class Reduction:
    """The gradients of the gathers at `positions` are reduced, as one call."""

    positions: tuple[int, ...]


@dataclass(frozen=True)
class Start:
    """A call begins; of several moves the last one, after the others."""

    call: Gather | Reduction | Backward | Forward


@dataclass(frozen=True)
class Wait:
    """A call that was begun ends; that of the loss, with all after it, when the step ends."""

    call: Gather | Reduction | Backward | Forward


Work = Forward | Backward | Gather | Reduction | Start | Wait


@once
def forward_order(program: StageProgram) -> tuple[Work, ...]:
    """What a rank does in forward, in order; then, when the step ends, the loss."""
    order = _begin_gathers_early(program, _lines(program, range(len(program.body))))
    end = [Forward(i) for i in lines_at_end(program)]
    if not end:
        return order
    ahead = (Start(work) if work == end[0] else work for work in order if work not in end[1:])
    return (*ahead, Wait(end[0]), *end[1:])


def backward_order(program: StageProgram) -> tuple[Work, ...]:
    """What a rank does in backward, in order."""
    first, second = backward_parts(program)
    return (*first, *second)


@once
def backward_parts(program: StageProgram) -> tuple[tuple[Work, ...], tuple[Work, ...]]:
    """What a rank does in the two parts of backward; all is in the first if it is not split."""
    anew, reduced, again = repeated_gathers(program), reduced_runs(program), reruns(program)
    parts: list[tuple[Work, ...]] = []
    for backward in backwards(program, range(len(program.body))):
        order: list[Work] = []
        for work in backward:
            i = work.position
            for run in anew.get(i, ()) if work.part != "weight" else ():
                order += (Gather(call, True) for call in fused_gathers(program, run))
            order += _lines(program, again.get(work, ()), True)
            if not isinstance(program.body[i], GatherLine):
                order.append(work)
            elif i in reduced:
                calls = fused_gathers(program, reduced[i][::-1], backward=True)
                order += map(Reduction, calls)
        ahead = _begin_gathers_early(program, _delay_reductions(program, order))
        parts.append(tuple(_begin_sums_early(program, ahead)))
    first, second = parts
    return first, second


def _lines(program: StageProgram, positions: Sequence[int], again: bool = False) -> list[Work]:
    """The lines at some positions, the gathers of a run together."""
    runs, order = runs_of(program), list[Work]()
    wanted, gathered = frozenset(positions), set[int]()
    for i in positions:
        if i not in runs:
            order.append(Forward(i, again))
        elif i not in gathered:
            run = tuple(k for k in runs[i] if k in wanted)
            order += (Gather(call, again) for call in fused_gathers(program, run))
            gathered.update(run)
    return order


def _begin_gathers_early(program: StageProgram, order: Sequence[Work]) -> tuple[Work, ...]:
    """`order`, where the gathers of each run begin when those before it are there."""
    runs, ahead = runs_of(program), list[Work]()
    at = 0  # where the run before has arrived
    k = 0
    while k < len(order):
        work = order[k]
        k += 1
        if not isinstance(work, Gather):
            ahead.append(work)
            continue
        calls, run = [work], runs[work.positions[0]]
        while k < len(order) and isinstance(call := order[k], Gather):
            if runs[call.positions[0]] != run:
                break
            calls.append(call)
            k += 1
        early = [call for call in calls if at < len(ahead) and _begins_early(program, call)]
        ahead[at:at] = map(Start, early)
        ahead += (Wait(call) if call in early else call for call in calls)
        at = len(ahead)
    return tuple(ahead)


def _delay_reductions(program: StageProgram, order: Sequence[Work]) -> list[Work]:
    """`order`, where the reductions of each run are waited for at those of the next."""
    behind: list[Work] = []
    under_way: list[Work] = []
    before: Work | None = None
    for work in order:
        if not isinstance(work, Reduction):
            behind.append(work)
        else:
            if not isinstance(before, Reduction):
                behind += under_way
                under_way = []
            if _begins_early(program, work):
                behind.append(Start(work))
                under_way.append(Wait(work))
            else:
                behind.append(work)
        before = work
    return behind + under_way


def _begin_sums_early(program: StageProgram, order: Sequence[Work]) -> list[Work]:
    """`order`, where a matmul's gradient that is communicated next comes before the other one."""
    early: list[Work] = []
    for work in order:
        found = _matmul_before(program, early, work) if isinstance(work, Backward) else None
        if not isinstance(work, Backward) or found is None:
            early.append(work)
            continue
        k, apart = found
        position = positions_of(early[k])[0]
        first, second = (Backward(position, part, apart) for part in ("input", "weight"))
        early[k:] = first, *early[k + 1 :], Start(work), second, Wait(work)
    return early


def _matmul_before(
    program: StageProgram, order: Sequence[Work], move: Backward
) -> tuple[int, str] | None:
    """Where in `order` the matmul is of whose two gradients `move` communicates one, and of which
    variable that is; None if there is no such matmul. Views may be between the two."""
    line = program.body[move.position]
    if not isinstance(line, MoveLine) or line.move.backward not in COLLECTIVES:
        return None
    name = line.out.name
    for k in range(len(order) - 1, -1, -1):
        work = order[k]
        call = program.body[positions_of(work)[0]]
        is_whole = isinstance(work, Backward) and work.part == "whole"
        if not (is_whole and isinstance(call, CallLine) and name in call.reads):
            return None
        if call.target in MATMULS:
            read = {*call.reads}
            both = len(read) == 2 and all(program.variables[n].has_grad for n in read)
            return (k, name) if both else None
        (source, *_), (out, *more) = call.reads, call.outs
        is_view = None not in (call.shares or (None,)) and not more
        if not is_view or out.size_bytes != program.variables[source].size_bytes:
            return None
        name = out.name
    return None


def _begins_early(program: StageProgram, call: Gather | Reduction) -> bool:
    """May compute run between the beginning of a call, or of its last move, and its end?"""
    line = program.body[call.positions[0]]
    assert isinstance(line, GatherLine)
    if isinstance(call, Reduction):
        return line.moves[0].move.backward in COLLECTIVES
    return len(line.moves) == 1 and line.moves[0].move.forward in COLLECTIVES


def calls_beside(program: StageProgram, order: Sequence[Work]) -> frozenset[int]:
    """The places in `order` of the calls that begin there, and that compute hides in predictions.

    Too little compute runs before the first block's parameters are there, and after the last
    gradients: those are waited for. In backward that is not so of gathers if the block that it
    begins with stays gathered. Sums of activations' gradients and the loss are priced as if they
    were waited for, because bounds of the search take them so.
    """
    begun = [work.call if isinstance(work, Start) else work for work in order]
    gathers = [k for k, call in enumerate(begun) if isinstance(call, Gather)]
    reductions = [k for k, call in enumerate(begun) if isinstance(call, Reduction)]
    is_backward = any(isinstance(work, Backward) for work in order)
    stays = is_backward and bool(kept_gathers(program))
    waited = {*_first_block(program, begun, () if stays else gathers)}
    waited |= _first_block(program, begun, reductions[::-1])
    begins = {k for k in (*gathers, *reductions) if isinstance(order[k], Start)}
    return frozenset(begins - waited)


def _first_block(program: StageProgram, begun: Sequence[Work], places: Sequence[int]) -> set[int]:
    """The first of the calls at some places: those of one block, each parameter once."""
    first, seen, block = set[int](), set[str](), ""
    for k in places:
        lines = gathers_at(program, positions_of(begun[k]))
        parameter = lines[0].parameter
        own = lines[0].block or parameter
        if parameter in seen or own != (block or own):
            break
        block = own
        seen.update(line.parameter for line in lines)
        first.add(k)
    return first


def positions_of(work: Work) -> tuple[int, ...]:
    """The positions of the lines that work is about."""
    if isinstance(work, Start | Wait):
        return positions_of(work.call)
    return (work.position,) if isinstance(work, Forward | Backward) else work.positions
