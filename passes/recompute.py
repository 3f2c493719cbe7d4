"""Recompute as a user asks for it: every repeated block of every stage, in one mode.

The blocks are those of the whole program (`folding.find_runs`, two alike being enough), so that
a stage with one layer has them too; where stages cut through a block, each has its part. A run
of blocks may be cut into blocks at any of `period` places. What is kept of a block is what
enters it, so the cut is where least bytes cross (`_best_shift`); what a cut leaves at both ends
of a run is recomputed as well.

    full, selective    the whole block
    attention-core     fused attention alone; else what is between two products of activations
                       with a softmax between them, and those products  (`_attention_cores`)
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import get_args

from autopar.errors import NotSupportedError
from autopar.facts import Recomputed
from autopar.options import Recompute
from autopar.passes.analysis import Analysis
from autopar.passes.folding import Run, find_runs
from autopar.passes.join import LaidStage
from autopar.rules import rule_for

LEAST_BLOCKS = 2
MODES: tuple[Recompute, ...] = get_args(Recompute)
_FUSED_ATTENTION = "scaled_dot_product"
_SOFTMAX = ("aten._softmax.default", "aten.softmax.int", "aten._safe_softmax.default")

# Positions in `Analysis.operators`, next to each other.
Block = range


def recomputed_stages(
    stages: Sequence[LaidStage], analysis: Analysis, mode: Recompute
) -> tuple[LaidStage, ...]:
    """The stages of a program with all their repeated blocks recomputed.

    Raises `NotSupportedError` where the program has nothing of the kind.
    """
    wanted = recomputed_operators(analysis, mode)
    return tuple(
        replace(s, strategy=replace(s.strategy, recomputed=tuple(_within(s.analysis, wanted))))
        for s in stages
    )


def recomputed_operators(analysis: Analysis, mode: Recompute) -> tuple[Recomputed, ...]:
    """What `mode` recomputes of a whole program.

    Raises `NotSupportedError` where that is nothing.
    """
    found = blocks(analysis)
    if not found:
        raise NotSupportedError(
            f"recompute={mode!r}: {analysis.program.model_name} has no blocks that are alike",
            hint="recompute='none'",
        )
    ranges = found
    if mode == "attention-core":
        ranges = [core for block in found for core in _attention_cores(analysis, block)]
        if not ranges:
            raise NotSupportedError(
                f"recompute={mode!r}: no attention was found in the blocks of "
                f"{analysis.program.model_name}",
                hint="recompute='selective' keeps what products made, and recomputes the rest",
            )
    names = [o.name for o in analysis.operators]
    return tuple(Recomputed(mode, tuple(names[r.start : r.stop])) for r in ranges)


def _within(part: Analysis, wanted: Sequence[Recomputed]) -> Iterator[Recomputed]:
    """What of it one stage has."""
    own = {operator.name for operator in part.operators}
    for item in wanted:
        names = tuple(name for name in item.operators if name in own)
        if names:
            yield Recomputed(item.mode, names)


# -- blocks ----------------------------------------------------------------------------------------


def blocks(analysis: Analysis) -> list[Block]:
    """The repeated blocks of a program that have products, in order."""
    found: list[Block] = []
    for run in find_runs(analysis, LEAST_BLOCKS, own_buffers=True):
        if any(_is_product(analysis, i) for i in range(run.start, run.start + run.period)):
            found += _cut(run, _best_shift(analysis, run))
    return found


def _cut(run: Run, shift: int) -> Iterator[Block]:
    edges = sorted({run.start, *range(run.start + shift, run.end, run.period), run.end})
    return (range(a, b) for a, b in itertools.pairwise(edges))


def _best_shift(analysis: Analysis, run: Run) -> int:
    """Where to cut a run: the least bytes cross, then no operators are left at its ends."""
    operators, owners = analysis.operators, analysis.storage_owners
    last_read: dict[str, int] = {}
    for i in range(run.start, run.end):
        last_read |= {owners.get(name, name): i for name in operators[i].inputs}

    def crossing_bytes(shift: int) -> int:
        edge = run.start + run.period + shift
        made = {owners.get(n, n) for o in operators[edge - run.period : edge] for n in o.outputs}
        crossing = (n for n in made if last_read.get(n, -1) >= edge)
        return sum(_size_bytes(analysis, n) for n in crossing)

    return min(range(run.period), key=lambda shift: (crossing_bytes(shift), shift))


def _size_bytes(analysis: Analysis, value: str) -> int:
    tensor = analysis.types.tensors.get(value)
    return tensor.size_bytes if tensor else 0


def _is_product(analysis: Analysis, i: int) -> bool:
    return bool(rule_for(str(analysis.operators[i].call.op)).flops)


# -- attention -------------------------------------------------------------------------------------


def _attention_cores(analysis: Analysis, block: Block) -> Iterator[Block]:
    """From scores to what they weigh, in order."""
    operators, end = analysis.operators, block.start
    for i in block:
        op = str(operators[i].call.op)
        if _FUSED_ATTENTION in op:
            yield range(i, i + 1)
            end = i + 1
        elif op in _SOFTMAX:
            core = _core_around(analysis, block, i)
            if core is not None and core.start >= end:
                yield core
                end = core.stop


def _core_around(analysis: Analysis, block: Block, softmax: int) -> Block | None:
    """The products of activations before and after a softmax, and what is between them."""
    operators = analysis.operators
    made = {name: i for i in block for name in operators[i].outputs}
    first = _product_before(analysis, made, softmax)
    if first is None:
        return None
    reached = set(operators[softmax].outputs)
    for i in range(softmax + 1, block.stop):
        if reached.isdisjoint(operators[i].inputs):
            continue
        if _is_product(analysis, i):
            return range(first, i + 1) if _is_of_activations(analysis, i) else None
        reached |= set(operators[i].outputs)
    return None


def _product_before(analysis: Analysis, made: dict[str, int], softmax: int) -> int | None:
    """The last product that a softmax is of."""
    waiting, seen, found = [softmax], {softmax}, []
    while waiting:
        for name in analysis.operators[waiting.pop()].inputs:
            i = made.get(name)
            if i is None or i in seen:
                continue
            seen.add(i)
            if _is_product(analysis, i):
                found.append(i)
            else:
                waiting.append(i)
    products = [i for i in found if _is_of_activations(analysis, i)]
    return max(products, default=None)


def _is_of_activations(analysis: Analysis, i: int) -> bool:
    """No weight takes part."""
    return analysis.matrices.isdisjoint(analysis.operators[i].inputs)
