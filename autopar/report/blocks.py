"""Names of equal layers as ranges: `blocks 0 to 39 of 80 (model.layers.*)`, never 80 names.

A block is the outermost numbered module around an operator (`Block`). The blocks of a list are
those that any stage runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from autopar.program.lines import CallLine, Line, Pipeline, StageProgram, starred

# Prefix of a list of modules -> the indices of its blocks.
Blocks = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Block:
    """One of a list of modules, as `transformer.h` and `0` of `transformer.h.0.attn`."""

    prefix: str = ""
    index: str = ""

    @property
    def path(self) -> str:
        return f"{self.prefix}.{self.index}" if self.prefix else self.index

    def relative(self, name: str) -> str:
        """`name` as seen from the block; the block itself is `""`."""
        return name[len(self.path) :].removeprefix(".") if self.contains(name) else name

    def contains(self, name: str) -> bool:
        return bool(self.path) and (name == self.path or name.startswith(f"{self.path}."))

    @staticmethod
    def of(module: str) -> Block:
        """The outermost repeated block that contains a module path; the empty block if none."""
        parts = module.split(".")
        for i, part in enumerate(parts):
            if part.isdigit():
                return Block(".".join(parts[:i]), part)
        return Block()


@dataclass(frozen=True)
class BlockSet:
    """Some modules: blocks of lists, and the names of modules that are in no list."""

    blocks: Blocks
    others: tuple[str, ...] = ()

    @property
    def n_blocks(self) -> int:
        return sum(map(len, self.blocks.values()))

    def text(self, every: Blocks) -> str:
        """`all 80 blocks`, or which of them; `every` has all blocks of the model."""
        words = [_list_text(prefix, found, every[prefix]) for prefix, found in self.blocks.items()]
        if self.n_blocks > 1 and self.blocks == every:
            words = [f"all {self.n_blocks} blocks"]
        return ", ".join([*words, *self.others])


def block_set(modules: Iterable[str]) -> BlockSet:
    """The blocks of some module paths, and the paths in no block; each once, in order."""
    found: dict[str, set[int]] = {}
    others: dict[str, None] = {}
    for module in modules:
        block = Block.of(module)
        if block.index:
            found.setdefault(block.prefix, set()).add(int(block.index))
        else:
            others[module or "the model itself"] = None
    return BlockSet({p: tuple(sorted(of)) for p, of in found.items()}, tuple(others))


def every_block(pipeline: Pipeline) -> Blocks:
    """The blocks that the stages run."""
    return block_set(m for program in pipeline.stages for m in modules_of(program)).blocks


def modules_of(program: StageProgram) -> Iterable[str]:
    """The modules whose operators a stage runs, in order of first use."""
    return modules_of_lines(program.body)


def modules_of_lines(lines: Iterable[Line]) -> Iterable[str]:
    """The modules of the operators among some lines, in order of first use."""
    keys = (line.key for line in lines if isinstance(line, CallLine))
    return dict.fromkeys(key.rpartition("/")[0] for key in keys)


def folded_names(entries: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """(name, text) pairs; names that are equal up to numbers and have one text are one, counted."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, text in entries:
        groups.setdefault((starred(name), text), []).append(name)
    return [
        (f"{pattern} ({len(names)})" if len(names) > 1 else names[0], text)
        for (pattern, text), names in groups.items()
    ]


def range_text(numbers: Sequence[int]) -> str:
    """`0, 27 to 79` for ascending numbers."""
    runs = [
        [number for _, number in run]
        for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
    ]
    return ", ".join(
        f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs
    )


def _list_text(prefix: str, found: Sequence[int], every: Sequence[int]) -> str:
    pattern = f"{prefix}.*" if prefix else "*"
    if tuple(found) == tuple(every):
        return (
            f"all {len(every)} blocks ({pattern})" if len(every) > 1 else pattern.replace("*", "0")
        )
    noun = "block" if len(found) == 1 else "blocks"
    return f"{noun} {range_text(found)} of {len(every)} ({pattern})"
