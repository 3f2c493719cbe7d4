"""What a function reads from outside itself, by its bytecode: globals, closure cells, attributes.

A *chain* is a variable with the attributes that follow it: `cfg.loss.ALPHA` is
`("cfg", "loss", "ALPHA")`. Code of torch, of the standard library and of installed packages is
*library code*: its globals are not the user's.
"""

from __future__ import annotations

import dis
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import CodeType

import torch

Chain = tuple[str, ...]

_LIBRARIES = tuple(
    f"{Path(path).resolve()}/"
    for path in (
        Path(torch.__file__).parent,
        Path(__file__).parents[2],  # autopar
        sysconfig.get_path("stdlib"),
        sysconfig.get_path("purelib"),
        sysconfig.get_path("platlib"),
    )
)
_INSTALLED = ("/site-packages/", "/dist-packages/")
_GLOBALS = frozenset({"LOAD_GLOBAL", "LOAD_NAME"})
_CELLS = frozenset({"LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_CLOSURE"})
_ATTRIBUTES = frozenset({"LOAD_ATTR", "LOAD_METHOD"})


@dataclass(frozen=True)
class Reads:
    """The chains that start at globals and at closure cells, and all names of attributes."""

    globals: tuple[Chain, ...]
    cells: tuple[Chain, ...]
    attributes: frozenset[str]


@lru_cache(4096)
def reads_of(code: CodeType) -> Reads:
    """What `code` and the functions inside it read."""
    chains: dict[bool, dict[Chain, None]] = {True: {}, False: {}}
    attributes: set[str] = set()
    for one in _nested(code):
        attributes |= {*one.co_names, *(c for c in one.co_consts if isinstance(c, str))}
        chain: list[str] | None = None
        of_globals = False
        for instruction in (*dis.get_instructions(one), None):
            if chain and instruction is not None and instruction.opname in _ATTRIBUTES:
                chain.append(str(instruction.argval))
                continue
            if chain is not None:
                chains[of_globals][tuple(chain)] = None
                chain = None
            if instruction is not None and instruction.opname in _GLOBALS | _CELLS:
                of_globals = instruction.opname in _GLOBALS
                chain = [str(instruction.argval)]
    return Reads(tuple(chains[True]), tuple(chains[False]), frozenset(attributes))


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)


@lru_cache(4096)
def is_library(file: str | None) -> bool:
    """Is this file part of torch, of the standard library or of an installed package?"""
    if file is None or file.startswith("<frozen"):
        return True
    path = file if file.startswith("<") else str(Path(file).resolve())
    return path.startswith(_LIBRARIES) or any(part in path for part in _INSTALLED)


@lru_cache(4096)
def is_library_module(name: str | None) -> bool:
    """Is the module of this name a library's? A builtin module is."""
    import sys

    module = sys.modules.get(name or "")
    if module is None or name == "builtins":
        return name != "__main__"
    file = getattr(module, "__file__", None)
    return name != "__main__" and is_library(file)
