"""Operator notation: which dims of an operator's tensors are the same, in one line.

    b s h, f h -> b s f      a name may be sharded on any mesh axis
    h, on inputs only        is summed over: sharding it leaves the output Partial
    h!                       frozen: never sharded by this operator
    (k g) d                  a dim that is the product of two names, outermost first
    (g=4 c) -> (c g)         a size that does not follow from the sizes of the dims
    1                        a dim of size 1
    ...                      any number of leading dims, the same in every term

The inputs are the operator's tensor arguments, in order. A name that only outputs have is a dim
that the operator makes (expand). `Notation.parse(str(n)) == n`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NoReturn

from autopar.errors import NotationError

Dim = tuple[str, ...]  # names whose product is the dim; () for a dim of size 1
Term = tuple[Dim, ...]  # one tensor
ELLIPSIS: Dim = ("...",)

_TOKEN = re.compile(r"\s*(->|\.\.\.|[A-Za-z_][A-Za-z_0-9]*(?:=[0-9]+)?!?|1|[(),])")


@dataclass(frozen=True)
class Notation:
    """Parsed notation: input and output terms, frozen names, and the sizes written out."""

    inputs: tuple[Term, ...]
    outputs: tuple[Term, ...]
    frozen: frozenset[str] = frozenset()
    sizes: frozenset[tuple[str, int]] = frozenset()

    @staticmethod
    def parse(text: str) -> Notation:
        """Parse notation; raises `NotationError` with a caret under the fault."""
        return _Parser(text).parse()

    @property
    def names(self) -> tuple[str, ...]:
        """All names in order of first appearance."""
        seen: dict[str, None] = {}
        for term in (*self.inputs, *self.outputs):
            for dim in term:
                for name in dim:
                    seen.setdefault(name)
        return tuple(seen)

    def __str__(self) -> str:
        seen: set[str] = set()
        sizes = {name: f"={size}" for name, size in self.sizes}

        def show_name(name: str) -> str:
            if name in seen:
                return name
            seen.add(name)
            return f"{name}{sizes.get(name, '')}{'!' if name in self.frozen else ''}"

        def show_dim(dim: Dim) -> str:
            if not dim:
                return "1"
            words = [show_name(n) for n in dim]
            return words[0] if len(words) == 1 else f"({' '.join(words)})"

        def show(terms: tuple[Term, ...]) -> str:
            return ", ".join(" ".join(show_dim(d) for d in term) for term in terms)

        inputs = show(self.inputs)
        return f"{inputs} -> {show(self.outputs)}".strip()

    def expanded(self, n_leading: int) -> Notation:
        """This notation with `...` written out as `n_leading` names."""
        names: tuple[Dim, ...] = tuple((f"_{i}",) for i in range(n_leading))

        def write_out(term: Term) -> Term:
            return tuple(d for dim in term for d in (names if dim == ELLIPSIS else (dim,)))

        return Notation(
            tuple(write_out(t) for t in self.inputs),
            tuple(write_out(t) for t in self.outputs),
            self.frozen,
            self.sizes,
        )


class _Parser:
    def __init__(self, text: str) -> None:
        self.text = text
        self.frozen: set[str] = set()
        self.sizes: dict[str, int] = {}
        self.tokens: list[tuple[str, int]] = []
        position = 0
        while position < len(text.rstrip()):
            match = _TOKEN.match(text, position)
            if match is None:
                while text[position].isspace():
                    position += 1
                self.fail(position, f"unexpected {text[position]!r}")
            self.tokens.append((match[1], match.start(1)))
            position = match.end()
        self.at = 0

    def fail(self, position: int, why: str) -> NoReturn:
        raise NotationError(
            f"notation: {why}\n  {self.text}\n  {' ' * position}^",
            hint='write for example "b s h, f h -> b s f"',
        )

    def peek(self) -> str:
        return self.tokens[self.at][0] if self.at < len(self.tokens) else ""

    def position(self) -> int:
        return self.tokens[self.at][1] if self.at < len(self.tokens) else len(self.text)

    def parse(self) -> Notation:
        inputs = self.terms()
        if self.peek() != "->":
            self.fail(self.position(), "expected '->' between inputs and outputs")
        self.at += 1
        outputs = self.terms()
        if self.at < len(self.tokens):
            self.fail(self.position(), f"unexpected {self.peek()!r} after the outputs")
        return Notation(inputs, outputs, frozenset(self.frozen), frozenset(self.sizes.items()))

    def terms(self) -> tuple[Term, ...]:
        out = [self.term()]
        while self.peek() == ",":
            self.at += 1
            out.append(self.term())
        return tuple(out)

    def term(self) -> Term:
        dims: list[Dim] = []
        seen: set[str] = set()
        while self.peek() not in ("", ",", "->", ")"):
            dims.append(self.dim(seen))
        return tuple(dims)

    def dim(self, seen: set[str]) -> Dim:
        token = self.peek()
        if token == "(":
            opened = self.position()
            self.at += 1
            names: list[str] = []
            while self.peek() not in (")", ""):
                if self.peek() == "...":
                    self.fail(self.position(), "'...' stands for whole dims, not for factors")
                names.append(self.name(seen))
            if not self.peek():
                self.fail(opened, "this parenthesis is never closed")
            self.at += 1
            return tuple(names)
        if token == "1":
            self.at += 1
            return ()
        return (self.name(seen),)

    def name(self, seen: set[str]) -> str:
        token, where = self.peek(), self.position()
        name, _, size = token.rstrip("!").partition("=")
        if not (name.isidentifier() or name == "..."):
            self.fail(where, f"expected a name, found {token!r}")
        if name in seen:
            self.fail(where, f"{name!r} is written twice in one tensor")
        seen.add(name)
        if token.endswith("!"):
            self.frozen.add(name)
        if size and self.sizes.setdefault(name, int(size)) != int(size):
            self.fail(where, f"{name!r} has two sizes")
        self.at += 1
        return name
