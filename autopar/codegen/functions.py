"""Prints the function of equal pieces, by the names of the first block without its number."""

from __future__ import annotations

import keyword
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.codegen.blocks import (
    WORD,
    Statement,
    Template,
    affine,
    is_comment,
    starred_name,
    without_frees,
)
from autopar.codegen.flow import BlockFunction, Slice
from autopar.codegen.regions import marked
from autopar.codegen.words import (
    LINE_LENGTH,
    commented,
    listed,
    reads_word,
    saved_text,
    taken_from,
    unpacked,
)
from autopar.program.lines import UNUSED, Local, Variable


@dataclass(frozen=True)
class FunctionPrinter:
    """Prints block functions of one part.

    parameters   those of the stage, in order, with where each comes from
    variables    the tensors of forward, for what is saved
    groups       rows that look up the groups that some rows read
    """

    statements: Sequence[Statement]
    parameters: Sequence[tuple[Local, str]]
    variables: Mapping[str, Local | Variable]
    groups: Callable[[Sequence[str]], list[str]]

    def rows(self, f: BlockFunction) -> list[str]:
        """The function without its name and its docstring: its arguments, then its body."""
        first = f.template.first
        parameters = {local.name for local, _ in self.parameters}
        own = [without_frees(s, parameters) for s in self.statements[first.start : first.stop]]
        rows = marked(own)
        words = _Words.of(f.template, rows)
        names = [words.name(name) for name in first.names]
        head: list[str] = []
        for channel in f.inputs:
            head += taken_from(channel.variable, [names[k] for k in channel.taken])
        for name, part in _named(f.slices):
            head += unpacked(name, self._of_block(f, part, words))
        body = [words.row(row) for row in rows]
        while not head and body and not body[0]:
            body = body[1:]
        lists: list[tuple[str, list[str]]] = []
        for channel in f.outputs:
            made = [names[k] for k in channel.made]
            if channel.is_saved:
                known = [self.variables.get(first.names[k]) for k in channel.made]
                rows = [
                    commented(f"        {name},", saved_text(variable))
                    for name, variable in zip(made, known, strict=True)
                ]
                body += [f"    {channel.variable} = [", *rows, "    ]"]
                lists.append((channel.variable, []))
            else:
                lists.append(("", made))
        body += _returned(lists)
        arguments = ["i", *(c.variable for c in f.inputs), *map(words.name, self.arguments(f))]
        return [f"({', '.join(arguments)}):", *self.groups(body), *head, *body]

    def arguments(self, f: BlockFunction, at: Callable[[int, int], str] | None = None) -> list[str]:
        """Its arguments besides the lists; with `at`, those of a call."""
        first = f.template.first
        rows = [row for s in self.statements[first.start : first.stop] for row in s.rows]
        out: list[str] = []
        for name, (start, stop, stride, _) in _named(f.slices):
            out.append(f"parameters[{at(start, stride)} : {at(stop, stride)}]" if at else name)
        out += f.shared_names
        out += ["ready"] if reads_word("ready", rows) else []
        return [*out, "env"]

    def _of_block(self, f: BlockFunction, part: Slice, words: _Words) -> list[tuple[Local, str]]:
        """A slice of the parameters of the first block; `_` for one that it does not read."""
        ahead = part.stride * f.template.first.number
        read = {f.template.first.names[k] for k in part.of}
        found = []
        for local, origin in self.parameters[part.start + ahead : part.stop + ahead]:
            name = words.name(local.name) if local.name in read else UNUSED
            found.append((replace(local, name=name), words.starred(origin)))
        return found


def _named(slices: Sequence[Slice]) -> list[tuple[str, Slice]]:
    """Slices of parameters as the arguments `parameters`, `parameters_2`, ..."""
    names = ["parameters", *(f"parameters_{n}" for n in range(2, len(slices) + 1))]
    return list(zip(names, slices, strict=False))


def _returned(lists: Sequence[tuple[str, Sequence[str]]]) -> list[str]:
    """Returns lists: variables, or of names."""
    if not lists:
        return []
    if len(lists) == 1 and not lists[0][0]:
        return listed("    return [", lists[0][1], "]")
    results = [variable or f"[{', '.join(names)}]" for variable, names in lists]
    if len(row := f"    return {', '.join(results)}") <= LINE_LENGTH:
        return [row]
    rows: list[str] = []
    for variable, names in lists:
        rows += [f"        {variable},"] if variable else listed("        [", names, "],")
    return ["    return (", *rows, "    )"]


@dataclass(frozen=True)
class _Words:
    """The words of a block's function: `layers_0_mlp_weight` is `mlp_weight`, and numbers that grow
    with the block are formulas of `i`."""

    block: str
    names: Mapping[str, str]
    numbers: Iterator[tuple[int, int]]

    @classmethod
    def of(cls, template: Template, rows: Sequence[str]) -> _Words:
        """For the rows of the first block; a name keeps its number if they have the short one."""
        block = template.first.block
        start = block.replace(".", "_") + "_"
        known = {match.group() for row in rows for match in WORD.finditer(row)}
        known.update(template.first.names)
        names: dict[str, str] = {}
        for name in sorted(known):
            grad = "grad_" if name.startswith(f"grad_{start}") else ""
            if name.startswith(grad + start):
                new = grad + name.removeprefix(grad + start)
                if new.isidentifier() and not keyword.iskeyword(new) and new not in known:
                    names[name] = new
                    known.add(new)
        return cls(block, names, iter(template.numbers))

    def name(self, name: str) -> str:
        return self.names.get(name, name)

    def row(self, row: str) -> str:
        """The next row, its comment in place."""
        if is_comment(row):
            return row.replace(self.block, starred_name(self.block))
        code, mark, comment = row.partition("  # ")
        text = WORD.sub(lambda match: self._word(match.group()), code)
        if not mark:
            return text
        return commented(text.rstrip(), WORD.sub(lambda match: self.name(match.group()), comment))

    def _word(self, word: str) -> str:
        if not word[0].isdigit():
            return self.name(word)
        base, step = next(self.numbers)
        return affine(base, step) if step else word

    def starred(self, origin: str) -> str:
        return origin.replace(f"{self.block}.", f"{starred_name(self.block)}.")
