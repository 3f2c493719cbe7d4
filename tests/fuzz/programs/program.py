"""A program as data: statements of modules, printed as Python text that a user can run.

A value is named `v3`, a list of values `s3`, a term of the loss `l3`, a module, parameter or buffer
`m3`; so what a statement reads is found in its text.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

BATCH, LENGTH, CLASSES = 8, 4, 8
# Inputs by name: how the batch is made.
INPUTS = {
    "x": f"torch.randn({BATCH}, {LENGTH}, 4, dtype=torch.float64)",
    "y": f"torch.randn({BATCH}, {LENGTH}, 8, dtype=torch.float64)",
    "image": f"torch.randn({BATCH}, 4, 6, 4, dtype=torch.float64)",
    "video": f"torch.randn({BATCH}, 2, 4, 4, 4, dtype=torch.float64)",
    "ids": f"torch.randint({CLASSES}, ({BATCH}, {LENGTH}))",
    "mask": f"torch.rand({BATCH}, {LENGTH}) < 0.6",
    "labels": f"torch.randint({CLASSES}, ({BATCH}, {LENGTH}))",
}
NAMES = re.compile(r"\b(?:[vsl]\d+|h|c|" + "|".join(INPUTS) + r")\b")
PARTS = re.compile(r"\bm\d+\b")
CLASS = re.compile(r"\bBlock\d+\b")
IMPORTS = """\
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import autopar
from autopar import Manual
"""
_CHECKPOINT = "from torch.utils.checkpoint import checkpoint"
_PLAIN = "checkpoint = lambda function, *args, use_reentrant: function(*args)"
# Text that a program begins with if it has the name.
HELPERS = {
    "Twice": '''\
class Twice(torch.autograd.Function):
    """A sum whose backward returns one tensor for both terms."""

    @staticmethod
    def forward(ctx, a, b):
        return a + b

    @staticmethod
    def backward(ctx, grad):
        return grad, grad
''',
    "Cubed": """\
class Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a):
        ctx.save_for_backward(a)
        return a**3

    @staticmethod
    def backward(ctx, grad):
        (a,) = ctx.saved_tensors
        return 3 * a**2 * grad
""",
}


@dataclass(frozen=True)
class Line:
    """A statement; `writes` are the names that it gives values, `shape` a comment."""

    text: str
    writes: tuple[str, ...] = ()
    shape: str = ""

    @property
    def names(self) -> set[str]:
        return set(NAMES.findall(self.text))

    def printed(self, indent: str) -> str:
        first, *rest = self.text.splitlines()
        comment = f"  # {self.shape}" if self.shape else ""
        return "".join(
            f"{indent}{line}\n" for line in (f"{first}{comment if not rest else ''}", *rest)
        )


@dataclass(frozen=True)
class Scope:
    """A module: `init` makes its parts, `forward` runs `lines` and returns `results`.

    Those of the whole model are the terms of its loss; `beside` is what it returns beside them.
    """

    name: str
    inputs: tuple[str, ...]
    init: tuple[str, ...]
    lines: tuple[Line, ...]
    results: tuple[str, ...]
    beside: str = ""

    @property
    def returned(self) -> str:
        total = " + ".join(self.results)
        return self.beside.replace("$loss", total) if self.beside else total

    @property
    def read(self) -> set[str]:
        """Names that its statements and results read or write."""
        return set(NAMES.findall(self.returned)).union(*(line.names for line in self.lines))

    def pruned(self) -> Scope:
        """Without parts that no statement names, and for the model without unused inputs."""
        used = set(PARTS.findall(" ".join(line.text for line in self.lines)))
        ties = [line for line in self.init if len(set(PARTS.findall(line))) > 1]
        for line in ties:  # a tie keeps what it is tied to
            target, *sources = PARTS.findall(line)
            used |= set(sources) if target in used else set()
        init = tuple(s for s in self.init if PARTS.findall(s)[0] in used)
        inputs = self.inputs
        if self.name == "Net":
            inputs = tuple(name for name in inputs if name in self.read)
        return Scope(self.name, inputs, init, self.lines, self.results, self.beside)

    def text(self) -> str:
        init = "".join(f"        {line}\n" for line in self.init)
        lines = "".join(line.printed(" " * 8) for line in self.lines)
        return (
            f"class {self.name}(nn.Module):\n"
            f"    def __init__(self):\n        super().__init__()\n{init}\n"
            f"    def forward(self, {', '.join(self.inputs)}):\n{lines}"
            f"        return {self.returned}\n"
        )


@dataclass(frozen=True)
class Program:
    """Blocks, then the model `Net`. Weights and batch are drawn from `seed`."""

    scopes: tuple[Scope, ...]
    seed: int

    @property
    def net(self) -> Scope:
        return self.scopes[-1]

    @property
    def n_lines(self) -> int:
        return sum(len(scope.lines) for scope in self.scopes)

    @property
    def has_blocks(self) -> bool:
        return len(self.scopes) > 1

    def pruned(self) -> Program:
        """Without what nothing needs."""
        kept = [self.net.pruned()]
        for scope in reversed(self.scopes[:-1]):
            if any(scope.name in line for other in kept for line in other.init):
                kept.insert(0, scope.pruned())
        return Program(tuple(kept), self.seed)

    def text(self) -> str:
        """The classes."""
        scopes = "\n\n".join(scope.text() for scope in self.scopes)
        helpers = [text for name, text in HELPERS.items() if name in scopes]
        return "\n\n".join((IMPORTS, *helpers, scopes))

    def setup(self) -> str:
        """Lines that make the model and its batch."""
        batch = "".join(f"    {name!r}: {INPUTS[name]},\n" for name in self.net.inputs)
        return f"torch.manual_seed({self.seed})\nnet = Net().double()\nbatch = {{\n{batch}}}\n"

    def build(self, keeps_checkpoints: bool = True) -> tuple[nn.Module, dict[str, Tensor]]:
        """The model and its batch."""
        text = f"{self.text()}\n\n{self.setup()}"
        if not keeps_checkpoints:
            text = text.replace(_CHECKPOINT, _PLAIN)
        with torch.random.fork_rng(devices=()):
            made = run_text(text, f"<program {self.seed}>")
        return made["net"], made["batch"]


def run_text(text: str, file: str, names: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The names that a text defines; tracebacks show its lines."""
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    space: dict[str, Any] = {"__name__": "program", **(names or {})}
    exec(compile(text, file, "exec"), space)
    return space


def renamed(text: str, name: str, other: str) -> str:
    return re.sub(rf"\b{name}\b", other, text)
