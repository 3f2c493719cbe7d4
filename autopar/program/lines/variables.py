"""The variables that the lines of a program read (`reads`) and define (`writes`), by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

# The variable of unused results.
UNUSED = "_"


@dataclass(frozen=True)
class Ref:
    """A variable of the generated program, as an argument."""

    name: str

    def __repr__(self) -> str:
        return self.name


# The device of the rank, as an argument.
DEVICE = Ref("env.device")


class Assignment:
    """A line that makes `out` of `source`."""

    source: str
    out: Any

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.source,)

    @property
    def writes(self) -> tuple[str, ...]:
        return (self.out.name,)

    @property
    def outs(self) -> tuple[Any, ...]:
        return (self.out,)


class Results:
    """A line that makes `outs`; unused ones are called `_`."""

    outs: tuple[Any, ...]

    @cached_property
    def writes(self) -> tuple[str, ...]:
        return tuple(out.name for out in self.outs if out.name != UNUSED)


class Operation(Results):
    """A line that makes `outs` of the variables among its arguments.

    Names of groups and of the device are among those that it reads.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @cached_property
    def reads(self) -> tuple[str, ...]:
        """The variables among the arguments, in order."""
        return (*names_in(self.args), *names_in(list(self.kwargs.values())))


def names_in(value: Any) -> list[str]:
    """The variables in an argument, in order."""
    if isinstance(value, Ref):
        return [value.name]
    if isinstance(value, (list, tuple)):
        return [n for v in value for n in names_in(v)]
    return []
