"""Passes and facts: how a compilation runs, for any list of passes.

A *fact* is an object that its type identifies: `Program`, `Analysis`, `PlanData`, `Pipeline`. A
*pass* is a frozen dataclass that makes facts from facts; its fields are its options. A
`Compilation` holds the facts, and runs passes when a fact is read:

    compilation = Compilation(PASSES, source, target)
    compilation[PlanData]          # runs the passes that it needs, each once
    compilation[Sources]           # goes on from there

A fact is made once. Given facts are never made. So a saved plan, which gives `PlanData`, runs the
same list without the search.

`AUTOPAR_PRINT_AFTER=NAME` prints the facts of a pass.
"""

from __future__ import annotations

import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import singledispatch
from typing import Any, ClassVar, TypeVar

from autopar.errors import OptionError

T = TypeVar("T")

PRINT_AFTER = "AUTOPAR_PRINT_AFTER"


class Pass(ABC):
    """One step of the compilation.

    requires       facts it reads
    provides       facts it makes
    may_read       facts it reads if they are known
    may_provide    facts of later passes that it may make; those passes are then skipped
    """

    requires: ClassVar[tuple[type, ...]] = ()
    provides: ClassVar[tuple[type, ...]]
    may_read: ClassVar[tuple[type, ...]] = ()
    may_provide: ClassVar[tuple[type, ...]] = ()

    @abstractmethod
    def run(self, facts: Compilation) -> Iterable[object]:
        """Make the facts it provides, from `facts`; it may read only those it declares."""

    @classmethod
    def name(cls) -> str:
        """The class name in words: `KeepWhole` is `keep-whole`."""
        text = "".join(f"-{c.lower()}" if c.isupper() else c for c in cls.__name__)
        return text.removeprefix("-")

    @classmethod
    def purpose(cls) -> str:
        """The first line of its docstring."""
        return (cls.__doc__ or "").strip().splitlines()[0]


@dataclass(frozen=True)
class Ran:
    """A pass that ran: its wall time without that of the passes before it, and its facts."""

    name: str
    seconds: float
    made: tuple[object, ...]


def check(passes: Sequence[Pass]) -> None:
    """Assert that no fact is made twice, or read before it is made.

    Facts that no pass makes must be given.
    """
    makers: dict[type, Pass] = {}
    for one in passes:
        for kind in one.provides:
            assert kind not in makers, f"{kind.__name__} is made twice, again by {one.name()}"
            makers[kind] = one
    assert len({one.name() for one in passes}) == len(passes), "two passes have one name"
    done = set[type]()
    for one in passes:
        for kind in one.requires:
            assert kind in done or kind not in makers, (
                f"{one.name()} reads {kind.__name__}, which {makers[kind].name()} makes later"
            )
        done |= set(one.provides)
        for kind in one.may_provide:
            assert kind in makers and kind not in done, (
                f"{one.name()} may make {kind.__name__}, which no later pass would"
            )


class Compilation:
    """The facts of one program on one machine, and the passes that make missing ones."""

    def __init__(self, passes: Sequence[Pass], *given: object) -> None:
        check(passes)
        self._makers = {kind: one for one in passes for kind in one.provides}
        self._facts: dict[type, Any] = {type(fact): fact for fact in given}
        self._running: Pass | None = None
        self.ran: list[Ran] = []

    def __getitem__(self, kind: type[T]) -> T:
        """The fact of this type; runs the passes that it needs."""
        if self._running is not None:
            declared = {*self._running.requires, *self._running.may_read}
            assert kind in declared, f"{self._running.name()} reads {kind.__name__} undeclared"
        elif kind not in self._facts:
            self._run(kind)
        found: T = self._facts[kind]
        return found

    def __contains__(self, kind: type) -> bool:
        """Is the fact known? Runs no pass."""
        return kind in self._facts

    def give(self, fact: object) -> None:
        """Add a fact that another process made."""
        assert type(fact) not in self._facts, f"{type(fact).__name__} is known already"
        self._facts[type(fact)] = fact

    def forget(self, kind: type) -> None:
        """Drop a given fact that no remaining pass needs."""
        del self._facts[kind]

    def _run(self, kind: type) -> None:
        """Run the pass that makes a fact, after the passes that it requires."""
        assert kind in self._makers, f"{kind.__name__} is not given, and no pass makes it"
        one = self._makers[kind]
        for required in one.requires:
            _ = self[required]
        if kind in self._facts:
            return  # a required pass made it (`may_provide`)
        printed_after, began_s = _printed_pass(), time.perf_counter()
        self._running = one
        try:
            made = tuple(one.run(self))
        finally:
            self._running = None
        kinds, allowed = {type(fact) for fact in made}, {*one.provides, *one.may_provide}
        assert set(one.provides) <= kinds <= allowed, f"{one.name()} made {kinds}"
        self._facts |= {type(fact): fact for fact in made}
        self.ran.append(Ran(one.name(), time.perf_counter() - began_s, made))
        if one.name() == printed_after:
            for fact in made:
                print(f"# {type(fact).__name__} after {one.name()}", file=sys.stderr)  # noqa: T201
                print(text_of(fact), file=sys.stderr)  # noqa: T201


def _printed_pass() -> str | None:
    """The pass that `AUTOPAR_PRINT_AFTER` names; raises `OptionError` for an unknown name."""
    wanted = os.environ.get(PRINT_AFTER) or None
    names = [kind.name() for kind in Pass.__subclasses__()]
    if wanted is not None and wanted not in names:
        raise OptionError(
            f"{PRINT_AFTER}={wanted!r} is no pass", hint=f"it is one of {', '.join(names)}"
        )
    return wanted


@singledispatch
def text_of(fact: object) -> str:
    """A whole fact as text: what `AUTOPAR_PRINT_AFTER` prints."""
    return str(fact)


@singledispatch
def size_of(fact: object) -> str:
    """The size of a fact in a few words: what `autopar passes` prints."""
    return type(fact).__name__
