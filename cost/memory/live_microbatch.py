"""Live bytes of one microbatch, moment by moment, in the order in which a rank works.

A storage lives from the moment that makes it to the last one that needs it. The order
(`autopar/program/communication/order.py`) is walked once; then the moments are played on a ledger
(`microbatch.py`).

A line needs what it reads. The backward of an operator needs what the operator keeps
(`CallLine.keeps`, `saved_bytes`), and lines that run again what they read.
What runs again, or is gathered again, makes new storages; the backwards after it need those.

Gradients: the first consumer's backward makes the gradient of a variable, and the backwards of
other consumers add to it. The producer's backward is the last that needs it. A gradient that is
passed on (`Workspace.passed`) is no new storage. A parameter's gradient stays; one that the first
part of a split backward makes is kept for the second, which adds it to those of other microbatches.

Communication: a call that is under way holds its buffers. A fused call has a flat buffer, out of
which results are copied (`runtime/collectives/fused.py`).

Compiled regions (`regions.py`): what a region is given lives until it returns, and values between
operators that it fuses are in no memory.

Between stages: sent tensors, which may be under way, and gradients to be sent back live until the
backward of their microbatch is over, or its first part.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from autopar.cost.memory.buffers import gather_bytes, primitive_bytes, reduction_bytes
from autopar.cost.memory.ledger import Moment, StorageId
from autopar.cost.memory.regions import LiveRegions
from autopar.program.communication import (
    Backward,
    Forward,
    Gather,
    Reduction,
    Start,
    Wait,
    Work,
    backward_parts,
    forward_order,
    gathers_at,
    positions_of,
)
from autopar.program.lines import (
    UNUSED,
    CallLine,
    DetachLine,
    GatherLine,
    Line,
    Local,
    MoveLine,
    StageProgram,
)

ACTIVATIONS, GRADIENTS = "activations", "activation gradients"
GATHERS, REDUCTIONS = "gathers under way", "reductions under way"
# Gradients of parameters stay when the microbatch is over: of stored tensors, and of uses.
LASTING = ("gradients", "gradients of uses")


class MicrobatchWalk:
    """Writes the moments of a program; `repeats` has those at which equal blocks begin and end."""

    def __init__(self, program: StageProgram) -> None:
        self.program = program
        self.moments: list[Moment] = []
        self.repeats: dict[int, list[tuple[bool, int]]] = {}
        self._last: dict[StorageId, int] = {}  # the last moment that needs a storage
        self._bytes: dict[StorageId, float] = {}
        self._owners: dict[str, str] = {}  # variable -> owner of its storage
        self._known: dict[str, Local] = {}
        self._inputs: dict[int, dict[str, Local]] = {}
        self._gradient_of: dict[str, str] = {}
        # Position of a reshard under way -> its result, and what it holds.
        self._moved: dict[int, tuple[str, list[StorageId]]] = {}
        self._leaves = _leaves(program)
        # Does what is made now wait for the second part of backward? What does, and its repeat.
        self._holds = program.splits_backward
        self._held: dict[str, int | None] = {}
        self._place: int | None = None
        self.regions = LiveRegions(program)
        self._segments = {i: s for s in program.segments for i in range(s.start, s.stop)}

    def forward(self) -> None:
        program = self.program
        self._known = dict(program.given_variables)
        self._moment()
        received = [(ACTIVATIONS, b.local.name) for b in program.received]
        for storage, boundary in zip(received, program.received, strict=True):
            self._make(storage, boundary.local.size_bytes)
        order = forward_order(program)
        self._works(order, [_place(program, work) for work in order])
        self.regions.enter(None, len(self.moments))
        for storage in (*received, *map(self._storage, program.returned)):
            self._need(storage)

    def backward(self) -> int:
        """The backward in order; then what is left is freed with the graph.

        Returns the number of moments up to the end of its first part.
        """
        program, (order, second) = self.program, backward_parts(self.program)
        self._moment()
        if program.loss is not None and order:
            self._give(program.loss, "seed", program.variables[program.loss].size_bytes)
        sent = [b.local for b in program.sent if b.local.has_grad]
        for local in sent:
            self._give(local.name, f"{local.name}@received", local.size_bytes)
        self._backward_works(order)
        lasting = [local.name for local in sent] + ([program.loss] if program.loss else [])
        for name in lasting:
            self._need(self._storage(name))
        for boundary in program.received:
            if (owner := self._gradient_of.pop(boundary.local.name, None)) is not None:
                self._need((GRADIENTS, owner))
        n_first = len(self.moments)
        if program.splits_backward:
            self._hand_over(len(order))
            self._backward_works(second, len(order))
        for owner in self._gradient_of.values():
            self._need((GRADIENTS, owner))
        for storage, m in self._last.items():
            self.moments[m].ended.append(storage)
        return n_first

    def _hand_over(self, n_before: int) -> None:
        """The second part begins: it takes the gradients of parameters, repeat by repeat."""
        self._holds = False
        held: dict[int | None, list[str]] = {}
        for name, place in self._held.items():
            held.setdefault(place, []).append(name)
        for place, names in held.items():
            first = len(self.moments)
            self._moment()
            for name in names:
                self._arrive(name, self._gradient_of.pop(name))
            for moment in self.moments[first:]:
                moment.work = n_before
            if place is not None:
                count = self.program.repeats[place].count
                self.repeats.setdefault(first, []).append((True, count))
                self.repeats.setdefault(len(self.moments) - 1, []).append((False, count))

    def _backward_works(self, order: Sequence[Work], n_before: int = 0) -> None:
        """Write the moments of a part of backward."""
        places, place = list[int | None](), None
        for work in reversed(order):  # what runs for the backward of a line belongs to it
            place = _place(self.program, work) if _is_own(work) else place
            places.append(place)
        self._works(order, places[::-1], n_before)
        self.regions.enter(None, len(self.moments))

    def _works(
        self, order: Sequence[Work], places: Sequence[int | None], n_before: int = 0
    ) -> None:
        """Write the moments of an order; `places` has the repeat of the program that each is in.
        `n_before` works were before, in the same direction."""
        ends = {place: k for k, place in enumerate(places) if place is not None}
        begun = set[int]()
        for k, (work, place) in enumerate(zip(order, places, strict=True)):
            first, self._place = len(self.moments), place
            self.regions.enter(work, first)
            self._work(work)
            for moment in self.moments[first:]:
                moment.work = n_before + k
                if self.regions.fuses:
                    moment.workspace_bytes = 0.0
            if place is None:
                continue
            count = self.program.repeats[place].count
            if place not in begun and len(self.moments) > first:
                begun.add(place)
                self.repeats.setdefault(first, []).append((True, count))
            if ends[place] == k:
                last = len(self.moments) - 1
                self.repeats.setdefault(last, []).append((False, count))

    def _work(self, work: Work) -> None:
        match work:
            case Forward(i, again) | Start(Forward(i, again)):
                self._line(i, self.program.body[i], again)
            case Backward(i) | Start(Backward(i)) | Wait(Backward(i)):
                line = self.program.body[i]
                if isinstance(work, Backward) and isinstance(line, CallLine):
                    self._call_backward(work, line)
                elif isinstance(line, MoveLine):
                    if not isinstance(work, Wait):
                        self._begin_move_backward(i, line, isinstance(work, Start))
                    if not isinstance(work, Start):
                        self._end_move_backward(i, line)
            case Gather(positions, again) | Wait(Gather(positions, again)):
                self._end_gather(positions, again)
            case Start(Gather(positions, again)):
                self._begin_gather(positions, again)
            case Reduction(positions):
                for line in self._with_gradient(positions):
                    self._reduce_at_once(line)
            case Start(Reduction(positions)):
                self._begin_reduction(self._with_gradient(positions))
            case Wait(Reduction(positions)):
                self._end_reduction(gathers_at(self.program, positions))

    # Storages: made at the last moment so far, and needed there.

    def _moment(self, text: str = "", workspace_bytes: float = 0.0) -> None:
        self.moments.append(Moment(text, workspace_bytes))

    def _make(self, storage: StorageId, size_bytes: float, after: bool = False) -> None:
        assert storage not in self._bytes or storage[0] in LASTING, f"{storage} is made twice"
        moment = self.moments[-1]
        (moment.made_after if after else moment.made).append((storage, size_bytes))
        self._bytes[storage] = size_bytes
        self.regions.touch(storage)
        if storage[0] not in LASTING:
            self._need(storage)

    def _need(self, storage: StorageId, ago: int = 0) -> None:
        if storage in self._bytes:
            m = len(self.moments) - 1 - ago
            self._last[storage] = max(m, self._last.get(storage, 0))
            self.regions.touch(storage)

    # Forward.

    def _line(self, i: int, line: Line, again: bool) -> None:
        segment = self._segments.get(i)
        saved_bytes = workspace_bytes = 0.0
        is_saved = again or segment is None
        if isinstance(line, CallLine):
            saved_bytes = line.saved_bytes if line.has_grad else 0.0
            workspace_bytes = saved_bytes + line.workspace.forward_bytes
            is_saved |= segment is not None and i not in segment.again and line.saves_more
        elif isinstance(line, MoveLine):
            workspace_bytes = primitive_bytes(line, line.move.forward, line.forward_bytes)
        self._moment(f"{_text(line)} again" if again else _text(line), workspace_bytes)
        for name in line.reads:
            self._need(self._storage(name))
        if not again:
            self._inputs[i] = {n: self._known[n] for n in line.reads if n in self._known}
        self._write(i, line, again)
        if saved_bytes and is_saved:
            self._make((ACTIVATIONS, f"saved@{i}"), saved_bytes, after=True)

    def _write(self, i: int, line: Line, again: bool) -> None:
        shares: Sequence[str | None] = (None,) * len(line.outs)
        if isinstance(line, CallLine):
            shares = line.shares or shares
        elif isinstance(line, DetachLine) or (
            isinstance(line, MoveLine) and line.move.forward == "identity"
        ):
            shares = (line.source,)
        for position, (out, shared) in enumerate(zip(line.outs, shares, strict=True)):
            if shared is not None:
                self._owners[out.name] = self._owners.get(shared, shared)
            else:
                name = f"{UNUSED}{position}" if out.name == UNUSED else out.name
                owner = f"{name}@{i}"
                if again:
                    before, owner = owner, f"{owner} again"
                    if isinstance(line, GatherLine):  # its views are made again, too
                        self._owners |= {n: owner for n, of in self._owners.items() if of == before}
                self._make((ACTIVATIONS, owner), out.size_bytes)
                self._owners[out.name] = owner
            self._known[out.name] = out

    def _storage(self, name: str) -> StorageId:
        """The storage of a variable of forward; of one that was made again, the new one."""
        return ACTIVATIONS, self._owners.get(name, name)

    # Communication of parameters.

    def _begin_gather(self, positions: tuple[int, ...], again: bool) -> None:
        """Buffers of a call that begins: its results, and if it is fused the flat ones."""
        self._moment("gathering")
        lines = gathers_at(self.program, positions)
        whole = float(sum(line.out.size_bytes for line in lines))
        shards = whole / self._n_ranks(lines) if len(lines) > 1 else 0.0
        self._make(_handle(lines, again), whole + shards)

    def _end_gather(self, positions: tuple[int, ...], again: bool) -> None:
        lines = gathers_at(self.program, positions)
        self._need(_handle(lines, again), ago=1)
        fused = float(sum(line.out.size_bytes for line in lines))
        needed = fused if len(lines) > 1 else gather_bytes(lines[0])
        self._moment(f"gathering {_parameters(lines)}", needed)
        for i, line in zip(positions, lines, strict=True):
            self._inputs[i] = {line.source: self._known[line.source]}
            self._write(i, line, again)

    def _with_gradient(self, positions: tuple[int, ...]) -> list[GatherLine]:
        lines = gathers_at(self.program, positions)
        return [line for line in lines if line.out.name in self._gradient_of]

    def _begin_reduction(self, lines: Sequence[GatherLine]) -> None:
        """Gradients go into the buffers of a call that begins."""
        if not lines:
            return
        if len(lines[0].moves) > 1:  # all but the last of its moves run at once
            self._reduce_at_once(lines[0])
            return
        whole = float(sum(line.moves[0].backward_bytes for line in lines))
        under_way = whole + whole / self._n_ranks(lines)
        needed, is_view = reduction_bytes(lines)
        self._moment(f"reducing {_parameters(lines)}", under_way + needed - whole * is_view)
        for line in lines:
            self._need((GRADIENTS, self._gradient_of.pop(line.out.name)))
        self._make((REDUCTIONS, lines[0].out.name), under_way, after=True)

    def _end_reduction(self, lines: Sequence[GatherLine]) -> None:
        """Results of a call that ended; those of a fused one are views, so they are copied."""
        handle = REDUCTIONS, lines[0].out.name
        if handle not in self._bytes:
            return
        self._need(handle)
        sizes = [self._leaves[line.source][2] for line in lines]
        is_fused = len(lines) > 1
        self._moment()
        buffer = GRADIENTS, f"{handle[1]} reduced"
        is_buffer = is_fused and not self._holds
        if is_buffer:
            self._make(buffer, sum(sizes))
        for line, size_bytes in zip(lines, sizes, strict=True):
            owner = f"{line.out.name}@reduced"
            self._make((GRADIENTS, owner), 0.0 if is_buffer else size_bytes)
            self._arrive(line.source, owner)
        self._moment("copying reduced gradients")
        self._need(buffer)

    def _reduce_at_once(self, line: GatherLine) -> None:
        owner = f"{line.out.name}@reduced"
        needed = max(primitive_bytes(m, m.move.backward, m.backward_bytes) for m in line.moves)
        self._moment(f"backward of {_text(line)}", needed)
        self._need((GRADIENTS, self._gradient_of.pop(line.out.name)))
        self._make((GRADIENTS, owner), self._leaves[line.source][2])
        self._arrive(line.source, owner)

    def _n_ranks(self, lines: Sequence[GatherLine]) -> int:
        return math.prod(self.program.axis_sizes[axis] for axis in lines[0].moves[0].move.axes)

    # Gradients.

    def _give(self, name: str, owner: str, size_bytes: float) -> None:
        """Make the gradient of `name` that backward begins with."""
        self._make((GRADIENTS, owner), size_bytes)
        self._gradient_of[name] = owner

    def _call_backward(self, work: Backward, line: CallLine) -> None:
        i, gradients = work.position, self._gradient_of
        segment = self._segments.get(i)
        outs = [out.name for out in line.outs if out.name in gradients]
        taken = [gradients[name] if work.part == "input" else gradients.pop(name) for name in outs]
        self._moment(f"backward of {_text(line)}", line.workspace.backward_bytes)
        saved = ACTIVATIONS, f"saved@{i}"
        kept = line.keeps
        if saved not in self._bytes and line.saved_bytes and segment is not None:
            self._make(saved, line.saved_bytes)  # copies of what it reads, made again
            kept = (*kept, *line.reads)
        if self.program.splits_backward:
            kept = tuple(name for name in kept if work.reads(name))
        for storage in (saved, *map(self._storage, kept)):
            self._need(storage)
        for owner in taken:
            self._need((GRADIENTS, owner))
        made: list[tuple[str, str]] = []
        for name, local in self._inputs[i].items():
            if not (local.has_grad and work.makes(name)):
                continue
            owner = f"{name}@{i}"
            if name in line.workspace.passed and taken and name not in self._leaves:
                owner = taken[0]
            else:
                self._make((GRADIENTS, owner), local.size_bytes)
            made.append((name, owner))
        for k, (name, owner) in enumerate(made):
            self._arrive(name, owner, [other for _, other in made[k:]])

    def _begin_move_backward(self, i: int, line: MoveLine, is_early: bool) -> None:
        """What a call under way needs: its buffers, or what it reads if that is its buffer."""
        taken = self._gradient_of.pop(line.out.name)
        needed = primitive_bytes(line, line.move.backward, line.backward_bytes)
        self._moment(f"backward of {_text(line)}", needed)
        self._need((GRADIENTS, taken))
        owner = taken
        if line.move.backward != "identity":
            owner = f"{line.source}@{i}"
            self._make((GRADIENTS, owner), self._inputs[i][line.source].size_bytes)
        held = []
        if is_early and needed:
            self._make((REDUCTIONS, owner), needed, after=True)
            held.append((REDUCTIONS, owner))
        elif is_early and line.move.backward != "all_reduce":
            held.append((GRADIENTS, taken))
        self._moved[i] = owner, held

    def _end_move_backward(self, i: int, line: MoveLine) -> None:
        owner, held = self._moved.pop(i)
        for storage in held:
            self._need(storage)
        self._arrive(line.source, owner)

    def _arrive(self, name: str, owner: str, others: Sequence[str] = ()) -> None:
        """Keep the first gradient of `name`; add later ones to it.

        `others` are the gradients that arrive with it or after it.
        """
        size_bytes = self._bytes[GRADIENTS, owner]
        if name in self._leaves and self._holds:
            self._held[name] = self._place
        elif name in self._leaves:
            kind, kept_as, kept_bytes = self._leaves[name]
            is_same = size_bytes == kept_bytes
            # The first one is kept as it is; one of another dtype is cast.
            self._moment("" if is_same else f"casting the gradient of {name}")
            self._make((kind, kept_as), kept_bytes)
            self._need((GRADIENTS, owner), ago=1 if is_same else 0)
            return
        before = self._gradient_of.get(name)
        if before is None:
            self._gradient_of[name] = owner
            return
        # A gradient that is also that of another tensor stays as it is: the sum is a new one.
        holders = [*self._gradient_of.values(), *others]
        if holders.count(before) > 1:
            total = f"{name}+"
            while (GRADIENTS, total) in self._bytes:
                total += "+"
            self._moment(f"adding gradients of {name}")
            self._make((GRADIENTS, total), size_bytes)
            self._need((GRADIENTS, before))
            self._gradient_of[name] = total
        self._need((GRADIENTS, owner))


def _leaves(program: StageProgram) -> dict[str, tuple[str, str, float]]:
    """Variable of a parameter -> its gradient's kind and owner in the ledger, and its bytes."""
    leaves: dict[str, tuple[str, str, float]] = {}
    for p in program.parameters:
        leaves[p.shard.name] = ("gradients", p.name, float(p.stored.size_bytes))
        for use in p.uses:
            if use.moves:
                name, size_bytes = use.local.name, float(use.local.gradient_bytes)
                leaves[name] = ("gradients of uses", name, size_bytes)
    return leaves


def _is_own(work: Work) -> bool:
    """Is it backward itself, rather than something that a backward after it needs?"""
    call = work.call if isinstance(work, Start | Wait) else work
    return isinstance(call, Backward) or (
        isinstance(call, Reduction) and not isinstance(work, Wait)
    )


def _place(program: StageProgram, work: Work) -> int | None:
    """The number of the repeat that work belongs to; a gather that begins ahead is in none."""
    if isinstance(work, Start) and isinstance(work.call, Gather):
        return None
    i = positions_of(work)[0]
    return next((k for k, r in enumerate(program.repeats) if r.start <= i < r.stop), None)


def _handle(lines: Sequence[GatherLine], again: bool) -> StorageId:
    return GATHERS, f"{lines[0].out.name} again" if again else lines[0].out.name


def _parameters(lines: Sequence[GatherLine]) -> str:
    return ", ".join(line.parameter for line in lines)


def _text(line: Line) -> str:
    match line:
        case CallLine():
            return line.key
        case GatherLine():
            return f"gathering {line.parameter}"
        case MoveLine():
            return f"{line.move.name} of {line.value}"
        case _:
            return ", ".join(out.name for out in line.outs)
