"""A deep stage with few of its repeated blocks, from which all are printed (`lower_few`).

A plan is priced from the first of equal blocks, one that stands for others, and the last
(`abridger.py`). Text needs more: the blocks beside the one that stands for others have equal
neighbours, too; each block is a numbered module; nothing outside of the blocks reads one that is
left out; and what differs from block to block are names of parameters, and numbers that grow
evenly.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch.fx

from autopar.passes.analysis import Analysis, Folded, Run, find_runs, place_in
from autopar.passes.lowering.abridger import Abridger, EqualBlocks
from autopar.passes.lowering.lines import PlacedStage
from autopar.program import StageProgram, block_of

_N_BEFORE, _N_AFTER = 3, 2


def lower_few(stage: PlacedStage, with_outputs: bool = False) -> StageProgram | None:
    """The stage program with few blocks; None if no more are left out than are kept, or if the text
    of those would not follow."""
    analysis, runs = stage.analysis, find_runs(stage.analysis)
    few = Abridger(analysis, runs, _N_BEFORE, _N_AFTER)
    blocks = few.equal_blocks(stage.strategy)
    groups = [(run, group) for run, own in zip(runs, blocks, strict=True) for group in own]
    several = [(run, group) for run, group in groups if group.n_stood_for > 1]
    if not several or not all(_is_module(analysis, run.block(g.middle)) for run, g in several):
        return None
    if not all(_grow_evenly(analysis, run, group) for run, group in several):
        return None
    if not _is_read_near_by(few.folded(blocks), blocks, with_outputs):
        return None
    return few.lower(stage.strategy, stage.cost, with_outputs)


def _is_read_near_by(
    folded: Folded, blocks: Sequence[Sequence[EqualBlocks]], with_outputs: bool
) -> bool:
    """Is what is left out read only by its own run, by blocks near by?"""
    whole, runs = folded.whole, folded.runs
    program, kept = whole.program, frozenset(folded.kept)
    numbers = [[b for group in own for b in group.kept] for own in blocks]
    made = {name: i for i, o in enumerate(whole.operators) for name in o.outputs}
    left_out = {name: i for name, i in made.items() if i not in kept}
    results = {program.loss, *program.sent, *(b.update for b in program.buffers.values())}
    if not left_out.keys().isdisjoint(results.union(program.outputs if with_outputs else ())):
        return False
    for i in kept:
        for source in (left_out[n] for n in whole.operators[i].inputs if n in left_out):
            reader, at = place_in(runs, i), place_in(runs, source)
            assert at is not None, "only blocks are left out"
            if reader is None or reader[0] != at[0]:
                return False
            if numbers[at[0]].index(reader[1]) < reader[1] - at[1]:
                return False
    return True


def _is_module(analysis: Analysis, positions: range) -> bool:
    """Are the numbered modules of some operators one, of which all operators are among these?"""
    keys = analysis.program.keys
    blocks = [block_of(keys[operator.name]) for operator in analysis.operators]
    own = {*blocks[positions.start : positions.stop]} - {None}
    others = {*blocks[: positions.start], *blocks[positions.stop :]}
    return len(own) == 1 and own.isdisjoint(others)


def _grow_evenly(analysis: Analysis, run: Run, group: EqualBlocks) -> bool:
    """Are blocks that are left out equal to the one before them, but for even steps of numbers?"""
    place = {name: k for k, name in enumerate(analysis.program.parameters)}
    same, first = _split_numbers(_printed_facts(analysis, run, group.middle - 1, place))
    numbers = [first]
    for b in range(group.middle, group.middle + group.n_stood_for):
        words, own = _split_numbers(_printed_facts(analysis, run, b, place))
        if words != same:
            return False
        numbers.append(own)
    steps = [b - a for a, b in zip(numbers[0], numbers[1], strict=True)]
    return all(
        [b - a for a, b in zip(before, after, strict=True)] == steps
        for before, after in pairwise(numbers)
    )


def _split_numbers(facts: Iterable[object]) -> tuple[list[object], list[int]]:
    """The facts with a mark for each number, and the numbers."""
    words, numbers = list[object](), list[int]()
    for fact in facts:
        if type(fact) is int:
            numbers.append(fact)
        words.append("#" if type(fact) is int else fact)
    return words, numbers


def _printed_facts(analysis: Analysis, run: Run, b: int, place: dict[str, int]) -> Iterator[object]:
    """What is printed of the operators of block `b`, but for names of values."""
    program = analysis.program
    for operator in (analysis.operators[i] for i in run.block(b)):
        node, key = program.node(operator.name), program.keys[operator.name]
        module = block_of(key) or ""
        stem, _, number = module.rpartition(".")
        yield from (str(node.target), program.sources.get(operator.name), stem)
        yield key.rpartition("/")[0].removeprefix(module)
        yield str(int(number) - b) if number else None
        yield from (place.get(name) for name in operator.inputs)
        yield from _leaves([node.args, sorted(node.kwargs.items())])


def _leaves(value: Any) -> Iterator[object]:
    if isinstance(value, torch.fx.Node):
        yield None
    elif isinstance(value, list | tuple):
        yield f"{len(value)} items"
        for item in value:
            yield from _leaves(item)
    else:
        yield value if type(value) is int else repr(value)
