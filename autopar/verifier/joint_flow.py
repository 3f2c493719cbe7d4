"""Verifies the variables of one function of a joint program, forward or backward (`check_flow`).

    names       a variable is defined once, before it is read, and freed once, after its last read.
                One that is saved may be defined again by a line that runs again, once it is freed
    ends        a function frees all that it defines, but for what it hands on
    handles     a collective that is begun is waited for once, in the same function
    storages    a kernel that writes in place writes to a storage that the function made itself.
                Nobody reads that storage under another name later, and nobody else has it: no
                collective under way, and nobody to whom a gradient was handed over
    again       a line of backward that runs again is one of forward, and reads what it read there

A view has the storage of its source. So has the result of a kernel that writes in place, and that
of an identity. All other lines make new storages. That is true of the runtime: moves but the
identity copy, and so do the backwards of lowered functions. A handle holds the tensors of its call
(`runtime/groups/pending.py`), so a line may free them while the call is under way.

A gradient that is a view is copied by whoever it is handed to (`runtime/execute/conversions.py`),
so what it views may be read later, but not written.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

import torch

from autopar.errors import VerificationError
from autopar.program.lines import (
    UNUSED,
    CallLine,
    Communication,
    DetachLine,
    FreeLine,
    FunctionBackward,
    FunctionLine,
    GatherLine,
    JointLine,
    JointProgram,
    KernelLine,
    LossAtEnd,
    MoveLine,
    ReadyLine,
    StartLine,
    WaitLine,
    WeightGradients,
    communications,
)
from autopar.verifier.stage import describe

HINT = "this is a bug of autopar, or the program was edited; plan again"


class Fault(Exception):
    """Why a line may not run; whoever walks the lines says which line it is."""


@dataclass
class Flow:
    """The variables of one function while its lines run.

    given      what the function takes
    held       those that its caller holds, too: it may not free them, and must free the others
    foreign    those that others read: it may not write to them, nor hand them over
    words      names that are not variables: groups and the device
    """

    given: Collection[str]
    held: frozenset[str]
    foreign: frozenset[str]
    words: Collection[str]
    is_backward: bool = False
    # Variable -> the one that made its storage; and variables by what they view.
    there: dict[str, str] = field(default_factory=dict)
    views: dict[str, list[str]] = field(default_factory=dict)
    # Variables that are views, also of a storage that was written since.
    viewing: set[str] = field(default_factory=set)
    gone: dict[str, str] = field(default_factory=dict)
    # Storages that nobody may write to, and why; variables that nobody may read, and why.
    locked: dict[str, str] = field(default_factory=dict)
    stale: dict[str, str] = field(default_factory=dict)
    under_way: dict[str, tuple[Communication, frozenset[str]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.there = {name: name for name in self.given}
        self.locked = dict.fromkeys(self.foreign, "others read it, too")

    def run(self, line: JointLine) -> None:
        """Raise `Fault` unless the line may run now."""
        if isinstance(line, FreeLine):
            for name in line.names:
                self._free(name)
            return
        there, words = self.there, self.words
        for name in line.reads:
            if name not in there:
                if name in words:
                    continue
                raise Fault(f"{name} is read {self._missing(name)}")
            if name in self.stale:
                raise Fault(f"{name} is read after {self.stale[name]}")
        made = line.writes
        for name in made:
            if (name in there and not _renames(line)) or name in words:
                raise Fault(f"{name} is defined twice")
            if name in self.gone:
                self._define_again(name, line)
        match line:
            case KernelLine():
                self._kernel(line, made)
            case CallLine():
                self._call(line)
            case FunctionLine():
                self._call(line.call)
                there[line.kept] = line.kept
            case MoveLine() | DetachLine():
                copies = isinstance(line, MoveLine) and line.move.forward != "identity"
                self._define(line.out.name, None if copies else line.source)
            case GatherLine():
                copies = any(move.move.forward != "identity" for move in line.moves)
                self._define(line.out.name, None if copies else line.source)
            case StartLine():
                there[line.pending] = line.pending
                read = frozenset(there[name] for name in line.reads)
                self.under_way[line.pending] = line.move, read
            case WaitLine():
                self._wait(line)
            case ReadyLine():
                self._hand_over(line)
            case _:
                there.update(zip(made, made, strict=True))

    def finish(self, kept: Iterable[str]) -> None:
        """Raise `Fault` unless the function may end, and hand on `kept`."""
        if self.under_way:
            raise Fault(f"{next(iter(self.under_way))} is never waited for")
        kept = set(kept)
        for name in kept:
            if name not in self.there:
                raise Fault(f"{name} is handed on {self._missing(name)}")
            if name in self.stale:
                raise Fault(f"{name} is handed on after {self.stale[name]}")
        left = self.there.keys() - kept - self.held
        if left:
            raise Fault(f"{', '.join(sorted(left))}: neither freed nor handed on")

    def _missing(self, name: str) -> str:
        return self.gone.get(name, "before it is defined")

    def _define_again(self, name: str, line: JointLine) -> None:
        """A variable of forward that was saved and freed may be made again: it is the same."""
        if not (self.is_backward and runs_again(line)):
            raise Fault(f"{name} is defined twice")
        del self.gone[name]
        self.stale.pop(name, None)
        self.viewing.discard(name)

    def _define(self, name: str, source: str | None = None) -> None:
        """A new variable, with the storage of `source`, or with one of its own."""
        if name == UNUSED:
            return
        self.there[name] = name if source is None else self._share(name, source)

    def _share(self, name: str, source: str) -> str:
        owner = self.there[source]
        self.views.setdefault(owner, []).append(name)
        return owner

    def _free(self, name: str) -> None:
        if name not in self.there:
            raise Fault(f"{name} is freed {self._missing(name)}")
        if name in self.held:
            raise Fault(f"{name} is freed, and belongs to the caller")
        if name in self.under_way:
            raise Fault(f"{name} is freed and was not waited for")
        del self.there[name]
        self.gone[name] = "after it was freed"

    def _kernel(self, line: KernelLine, made: Sequence[str]) -> None:
        if line.is_view:
            source = line.reads[0]
            for name in made:
                self._define(name, source)
            self.viewing.update(made)
            why = self.locked.get(source)
            if line.target.startswith("aten.expand"):
                why = "its elements share memory"
            if why is not None:
                self.locked |= dict.fromkeys(made, why)
        elif _writes_in_place(line.target):
            first, *others = line.reads
            if any(n != first and self.there[n] == self.there[first] for n in others):
                raise Fault(f"{first} is written while another name of its storage is read")
            self._write(first, made)
        else:
            self.there.update(zip(made, made, strict=True))

    def _write(self, name: str, made: Sequence[str]) -> None:
        """The storage of `name` is written; `made` is what the written tensor is called now."""
        owner = self.there[name]
        why = self.locked.get(owner) or self.locked.get(name)
        if why is not None:
            raise Fault(f"{name} is written, but {why}")
        if any(owner in storages for _, storages in self.under_way.values()):
            raise Fault(f"{name} is written while a collective of it is under way")
        others = (owner, *self.views.get(owner, ()))
        self.stale |= dict.fromkeys(others, f"{name}, of the same storage, was written")
        for new in made:
            self._define(new, name)
            if name in self.viewing:
                self.viewing.add(new)

    def _call(self, line: CallLine) -> None:
        shares = line.shares or (None,) * len(line.outs)
        for out, shared in zip(line.outs, shares, strict=True):
            self._define(out.name, shared)
            if shared is not None:
                self.viewing.add(out.name)

    def _wait(self, line: WaitLine) -> None:
        begun = self.under_way.pop(line.pending, None)
        if begun is None:
            raise Fault(f"{line.pending} was waited for, or never begun")
        if begun[0] != line.move:
            names = [", ".join(move.writes) for move in (begun[0], line.move)]
            raise Fault(f"{line.pending} is of {names[0]}, not {names[1]}")
        for name in line.writes:
            self._define(name)
        # It stays a name until it is freed, but nobody can wait for it again.

    def _hand_over(self, line: ReadyLine) -> None:
        if line.is_shared:
            return
        name, owner = line.source, self.there[line.source]
        if owner in self.foreign:
            raise Fault(f"{name} is handed over, but the function does not own it")
        if any(owner in storages for _, storages in self.under_way.values()):
            raise Fault(f"{name} is handed over while a collective of it is under way")
        self.locked[owner] = f"{name} was handed over"
        if name not in self.viewing:
            others = (owner, *self.views.get(owner, ()))
            self.stale |= dict.fromkeys(others, f"{name} was handed over")


def check_flow(name: str, flow: Flow, lines: Sequence[JointLine], kept: Iterable[str]) -> None:
    """Raise `VerificationError` unless the lines of the function `name` may run in this order."""
    number = -1
    try:
        for number, line in enumerate(lines):  # noqa: B007
            flow.run(line)
    except Fault as fault:
        raise error(str(fault), place(name, number, lines[number])) from None
    try:
        flow.finish(kept)
    except Fault as fault:
        raise error(str(fault), f"the end of {name}") from None


def place(function: str, number: int, line: JointLine) -> str:
    return f"{function}, line {number}: {described(line)}"


def error(reason: str, where: str) -> VerificationError:
    return VerificationError(reason, where=where, hint=HINT)


def described(line: JointLine) -> str:
    """A line in short, for error messages."""
    match line:
        case WeightGradients():
            return "the gradients of weights"
        case LossAtEnd():
            return "the loss, when the step ends"
        case FunctionBackward():
            return f"{', '.join(line.writes)} = backward({', '.join(line.reads)})"
        case MoveLine() | CallLine() | DetachLine() | GatherLine():
            return describe(line)
        case FreeLine():
            return f"del {', '.join(line.names)}"
        case ReadyLine():
            return f"ready({line.position}, {line.source})"
        case _:
            made = ", ".join(line.writes) or UNUSED
            return f"{made} = {_what(line)}({', '.join(line.reads)})"


def _what(line: JointLine) -> str:
    match line:
        case KernelLine():
            return line.target
        case FunctionLine():
            return line.call.lowered or line.call.target
        case StartLine():
            return f"{_what(line.move)}.start"
        case WaitLine():
            return "wait"
        case MoveLine():
            return line.move.name
        case _:
            first = communications(line)[0]
            return "gather" if isinstance(first, GatherLine) else first.move.move.transposed.name


def _renames(line: JointLine) -> bool:
    """Is it a later move of a reshard? All moves of a reshard assign one variable."""
    return isinstance(line, MoveLine) and line.out.name == line.source


@cache
def _writes_in_place(target: str) -> bool:
    found: object = torch.ops
    for word in target.split("."):
        found = getattr(found, word)
    return bool(found._schema.is_mutable)  # type: ignore[attr-defined]


def runs_again(line: JointLine) -> bool:
    """Is it a line of forward?"""
    if isinstance(line, KernelLine):
        return line.is_forward
    gathers = (isinstance(x, GatherLine) for x in communications(line))
    return any(gathers) or isinstance(line, MoveLine | CallLine | DetachLine | FunctionLine)


def check_reruns(joint: JointProgram) -> None:
    """Raise `VerificationError` unless lines that run again make what they made in forward.

    They are lines of forward, and read the same names. Names are unique, but for those of
    reshards: every move of one assigns the same variable. So where such a variable is read, it
    must have as many moves behind it as in forward; in lines of backward alone, all.
    """
    known = {id(line) for line in joint.forward}
    others = [line for line in joint.backward if id(line) not in known and runs_again(line)]
    makers: dict[str, JointLine] = {}
    for line in joint.forward if others else ():
        makers |= dict.fromkeys(line.writes, line)
        makers |= {x.out.name: x for x in communications(line)}
    strange = {id(line) for line in others if not _is_of_forward(line, makers)}
    n_moves: dict[str, int] = {}
    before: dict[int, int] = {}
    for line in joint.forward:
        if isinstance(line, MoveLine) and _renames(line):
            before[id(line)] = n_moves.get(line.source, 0)
            n_moves[line.source] = before[id(line)] + 1
    now = {name: n_moves[name] for name in joint.saved if name in n_moves}
    for number, line in enumerate(joint.backward):
        if isinstance(line, FreeLine):
            continue
        if id(line) in strange:
            raise error("it is no line of forward", place("backward", number, line))
        if not n_moves:
            continue
        for name in line.reads:
            if name in n_moves and now.get(name, 0) != before.get(id(line), n_moves[name]):
                where = place("backward", number, line)
                raise error(f"{name} is not resharded as in forward", where)
        for name in line.writes:
            if name in n_moves:
                now[name] = now.get(name, -1) + 1


def _is_of_forward(line: JointLine, makers: Mapping[str, JointLine]) -> bool:
    """Is it equal to a line of forward, or a kernel there whose results only backward reads?"""
    if gathers := communications(line):
        return all(makers.get(x.out.name) == x for x in gathers)
    found = [makers[name] for name in line.writes if name in makers]
    return line in found or (isinstance(line, KernelLine) and not found)
