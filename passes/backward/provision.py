"""What the lines of backward need: views made again, what is saved, where values end.

Backward reads variables of forward. Of these

    views of parameters gathered again       are made again, before the first line that reads them
    what lines that run again make           is there, and so are the parameters
    all others                               are saved

Kernels that nobody reads are dropped; collectives never are, because every rank runs them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from autopar.program.lines import (
    CallLine,
    FreeLine,
    FunctionBackward,
    GatherLine,
    JointLine,
    JointProgram,
    KernelLine,
    MoveLine,
    ReadyLine,
    StageProgram,
    WaitLine,
    WeightGradients,
    communications,
    taken_parameters,
)


def finished(
    stage: StageProgram,
    forward: Sequence[JointLine],
    backward: Sequence[JointLine],
    cotangents: tuple[str | None, ...],
    gradients: Sequence[str | None],
    moved: Collection[str] = (),
) -> JointProgram:
    """The program of these lines, with what they need; `gradients` are those of `taken`. Sums in
    `moved` have other strides than their first term."""
    read = {name for name in gradients if name is not None}
    given = {name for name in cotangents if name is not None}
    n_late = len(taken_parameters(stage)) if stage.splits_backward else 0
    needed = _with_handovers(_without_unread(backward, read), gradients, given, n_late)
    complete = _with_views(forward, _with_sums_in_place(needed, given, moved))
    saved = _undefined(complete, given, _variables(stage, forward))
    kept = {*stage.returned, *saved}
    return JointProgram(
        stage,
        with_frees(_without_unread(forward, kept), kept),
        saved,
        cotangents,
        with_frees(complete, (), (*saved, *given), len(taken_parameters(stage))),
    )


def _with_handovers(
    lines: Sequence[JointLine],
    gradients: Sequence[str | None],
    given: Collection[str],
    n_late: int,
) -> list[JointLine]:
    """The lines of backward; a gradient is handed over after the line that completes it.

    The first `n_late` gradients, those of parameters, wait for the second part of backward: so
    those of different microbatches arrive in order, however the parts interleave. A gradient is
    shared if its memory is read later, except a view, which whoever gets it copies anyway.
    """
    waiting: dict[str, list[int]] = {}
    for position, name in enumerate(gradients):
        if name is not None:
            waiting.setdefault(name, []).append(position)
    storages, _ = _storages(lines, given)
    last_read = _last_reads(lines, {}) | _last_reads(lines, storages)
    for line in lines:
        if isinstance(line, KernelLine) and line.is_view:
            storages |= {name: name for name in line.writes}
    found: list[JointLine] = []

    def hand_over(name: str, i: int) -> None:
        positions = waiting.pop(name, [])
        late = [position for position in positions if position < n_late]
        is_read_later = bool(late) or last_read.get(storages.get(name, name), -1) > i
        for position in positions[len(late) :]:
            is_shared = position != positions[-1] or is_read_later
            found.append(ReadyLine(position, name, is_shared))
        if late:
            waiting[name] = late

    made = {name for line in lines for name in line.writes}
    complete = [name for name in waiting if name not in made]
    for name in complete:
        hand_over(name, -1)  # what backward is given is a gradient as it is
    for i, line in enumerate(lines):
        found.append(line)
        complete += line.writes
        if isinstance(line, WeightGradients):
            n_late = 0
        for name in complete if isinstance(line, WeightGradients) else line.writes:
            hand_over(name, i)
    return found


def _with_sums_in_place(
    lines: Sequence[JointLine], given: Collection[str], moved: Collection[str]
) -> list[JointLine]:
    """A sum of gradients takes the first one's memory if nobody reads that again, as autograd's.

    Not where the second one lies in that memory too, elements of the first share memory, a part of
    it was handed over, or the sum would have other strides: kernels that read it need those that
    they were recorded with.
    """
    storages, repeated = _storages(lines, given)
    last_read = _last_reads(lines, storages)
    handed_over = {
        storages.get(line.source)
        for line in lines
        if isinstance(line, ReadyLine) and not line.is_shared
    }
    found: list[JointLine] = []
    for i, line in enumerate(lines):
        if isinstance(line, KernelLine) and not line.key and line.target == "aten.add.Tensor":
            first, second = (ref.name for ref in line.args)
            storage = storages.get(first)
            others = {*handed_over, storages.get(second)}
            is_own = storage not in others and first not in repeated
            is_own = is_own and line.writes[0] not in moved
            if storage is not None and is_own and last_read[storage] == i:
                line = replace(line, target="aten.add_.Tensor")
        found.append(line)
    return found


def _storages(
    lines: Sequence[JointLine], given: Collection[str]
) -> tuple[dict[str, str], set[str]]:
    """What lies in memory that backward has to itself: name -> who made that; and repeated views.

    What a function's backward returns may be what it is given, or one tensor twice.
    """
    storages, repeated = {name: name for name in given}, set[str]()
    for line in lines:
        if isinstance(line, KernelLine) and line.is_view:
            source = line.reads[0]
            if source in storages:
                storages |= dict.fromkeys(line.writes, storages[source])
            if source in repeated or line.target.startswith("aten.expand"):
                repeated.update(line.writes)
        elif isinstance(line, FunctionBackward):
            alike = [name for name in line.gradients if name is not None] + [*line.writes]
            same = {storages.get(name, name) for name in alike}
            storages |= dict.fromkeys(alike, alike[0])
            storages |= {name: alike[0] for name, of in storages.items() if of in same}
        elif not isinstance(line, KernelLine) or not line.is_forward:
            storages |= {name: name for name in line.writes}
    return storages, repeated


def _last_reads(lines: Sequence[JointLine], storages: Mapping[str, str]) -> dict[str, int]:
    """Storage -> the last line that reads anything in it."""
    return {
        storages.get(name, name): i
        for i, line in enumerate(lines)
        for name in (*line.reads, *_under_way(line))
    }


def _under_way(line: JointLine) -> tuple[str, ...]:
    """What a communication reads until this line, its wait."""
    return line.move.reads if isinstance(line, WaitLine) else ()


def _variables(stage: StageProgram, forward: Sequence[JointLine]) -> Iterable[str]:
    """The variables of forward, in order."""
    yield from taken_parameters(stage)
    yield from (item.local.name for item in stage.delivered)
    yield from (boundary.local.name for boundary in stage.received)
    for line in forward:
        yield from line.writes


def _without_unread(lines: Sequence[JointLine], read: Collection[str]) -> list[JointLine]:
    """The lines without kernels whose results nobody reads."""
    alive, found = set(read), []
    for line in reversed(lines):
        made = line.writes
        if isinstance(line, KernelLine) and alive.isdisjoint(made):
            continue
        alive.difference_update(made)
        alive.update(line.reads)
        found.append(line)
    return found[::-1]


def _with_views(forward: Sequence[JointLine], backward: Sequence[JointLine]) -> list[JointLine]:
    """Backward, where views of parameters that it gathers are made again before they are read."""
    calls = (call for line in backward for call in communications(line))
    gathered = {call.out.name for call in calls if isinstance(call, GatherLine)}
    views: dict[str, JointLine] = {}
    for line in forward if gathered else ():
        if isinstance(line, CallLine):
            for out, shared in zip(line.outs, line.shares, strict=False):
                if shared in gathered or shared in views:
                    views[out.name] = line
        elif (
            isinstance(line, MoveLine)
            and line.move.forward == "identity"
            and (line.source in gathered or line.source in views)
        ):
            views[line.out.name] = line
    there: set[str] = set()
    found: list[JointLine] = []

    def provide(name: str) -> None:
        line = views.get(name)
        if line is None or name in there:
            return
        for read in line.reads:
            provide(read)
        found.append(line)
        there.update(line.writes)

    for line in backward:
        for name in line.reads:
            provide(name)
        found.append(line)
        there.update(line.writes)
    return found


def _undefined(
    lines: Sequence[JointLine],
    given: Collection[str],
    known: Iterable[str],
) -> tuple[str, ...]:
    """The variables of forward, `known`, that lines read before they define them."""
    there, needed = set(given), set[str]()
    for line in lines:
        needed.update(name for name in line.reads if name not in there)
        there.update(line.writes)
    return tuple(name for name in dict.fromkeys(known) if name in needed)


def with_frees(
    lines: Sequence[JointLine],
    kept: Collection[str],
    given: Sequence[str] = (),
    n_parameters: int = 0,
) -> tuple[JointLine, ...]:
    """The lines, with a `FreeLine` after the last read of everything but `kept`.

    They free what they define themselves, and `given`. What an operator's backward reads is freed
    after all of its kernels, as autograd does, so that peaks are those that are predicted.
    """
    own = {*given, *(name for line in lines for name in line.writes)}
    alive, found = set(kept), list[JointLine]()
    for kernels in reversed(_by_operator(lines, n_parameters)):
        made = {name for line in kernels for name in line.writes}
        read = dict.fromkeys(name for line in kernels for name in line.reads)
        taken = [name for name in read if name in own and name not in made]
        _free([name for name in taken if name not in alive], found)
        alive.update(taken)
        for line in reversed(kernels):
            names = dict.fromkeys((*line.reads, *line.writes))
            _free([n for n in names if n in made and n not in alive], found)
            found.append(line)
            alive.difference_update(line.writes)
            alive.update(line.reads)
    return tuple(found[::-1])


def _by_operator(lines: Sequence[JointLine], n_parameters: int) -> list[list[JointLine]]:
    """The lines, those of one operator's backward together.

    Sums and handovers of parameters' gradients, the first `n_parameters`, belong to it.
    """
    found: list[list[JointLine]] = []
    key: str | None = None
    for line in lines:
        if isinstance(line, KernelLine) and not line.is_forward:
            own = line.key or key
        else:
            is_own = isinstance(line, ReadyLine) and line.position < n_parameters
            own = key if is_own else None
        if own is not None and own == key:
            found[-1].append(line)
        else:
            found.append([line])
        key = own
    return found


def _free(names: Sequence[str], lines: list[JointLine]) -> None:
    """Add a free to `lines`, which are in reverse; to that of the line before, if there is one."""
    if not names:
        return
    before = lines[-1] if lines else None
    if isinstance(before, FreeLine):
        lines[-1] = FreeLine((*names, *before.names))
    else:
        lines.append(FreeLine(tuple(names)))
