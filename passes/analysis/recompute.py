"""What may be recomputed: every repeated block of a program, and in which modes.

The blocks are those of the whole program (`folding.find_runs`, two alike being enough), so that
a stage with one layer has them too; where stages cut through a block, each has its part. A run
of blocks may be cut into blocks at any of `period` places. What is kept of a block is what
enters it, so the cut is where least bytes cross (`_best_shift`); what a cut leaves at both ends
of a run is recomputed as well.

    full, selective    the whole block
    attention-core     fused attention alone; else what is between two products of activations
                       with a softmax between them, and those products  (`_attention_cores`)

A mode that the user asks for is that of all blocks. "auto" leaves it to the search, block by block,
where the fastest placements without recompute do not fit (`Evaluator`); it weighs the modes of
`SEARCHED` (`recompute_choice.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import get_args

from autopar.errors import NotSupportedError
from autopar.options import Options, Recompute
from autopar.passes.analysis.analysis import Analysis
from autopar.passes.analysis.folding import KEPT, Run, find_runs
from autopar.program import Recomputed
from autopar.rules import rule_for

LEAST_BLOCKS = 2
MODES: tuple[Recompute, ...] = get_args(Recompute)
# What the search weighs, least effort first.
SEARCHED: tuple[Recompute | None, ...] = (None, "selective", "full")
_FUSED_ATTENTION = "scaled_dot_product"
_SOFTMAX = ("aten._softmax.default", "aten.softmax.int", "aten._safe_softmax.default")

# Positions in `Analysis.operators`, next to each other.
Block = range


@dataclass(frozen=True)
class Recomputable:
    """Ranges of operators by name, next to each other, in order; and the modes that each may be
    in, of which None is not to run again. One mode is no choice."""

    ranges: tuple[tuple[str, ...], ...]
    modes: tuple[Recompute | None, ...]
    _within: dict[int, tuple[Analysis, tuple[range, ...]]] = field(
        default_factory=dict, repr=False, compare=False
    )

    @staticmethod
    def of(analysis: Analysis, options: Options) -> Recomputable | None:
        """What the options let be recomputed of a program; None where that is nothing.

        Raises `NotSupportedError` where a user asks for a mode, and the program has nothing of the
        kind.
        """
        mode = options.recompute_mode
        if mode is not None:
            wanted = recomputed_operators(analysis, mode)
            return Recomputable(tuple(item.operators for item in wanted), (mode,))
        if not (options.searches_recompute and analysis.program.training):
            return None
        names = [o.name for o in analysis.operators]
        ranges = tuple(tuple(names[r.start : r.stop]) for r in blocks(analysis))
        return Recomputable(ranges, SEARCHED) if ranges else None

    def within(self, part: Analysis) -> tuple[range, ...]:
        """What of the ranges a part of the program has: positions among its operators, of which
        those of one range are next to each other."""
        if id(part) not in self._within:
            place = {operator.name: i for i, operator in enumerate(part.operators)}
            found = []
            for names in self.ranges:
                own = [place[name] for name in names if name in place]
                if own:
                    assert own == list(range(own[0], own[-1] + 1)), "a range is cut, not thinned"
                    found.append(range(own[0], own[-1] + 1))
            self._within[id(part)] = part, tuple(found)
        return self._within[id(part)][1]

    def operators_within(self, part: Analysis) -> frozenset[int]:
        """The positions in all its ranges."""
        return frozenset(i for positions in self.within(part) for i in positions)

    @property
    def is_choice(self) -> bool:
        return len(self.modes) > 1


def is_searched(recomputable: Recomputable | None) -> bool:
    """Is what runs again chosen, and not given?"""
    return recomputable is not None and recomputable.is_choice


def aligned_runs(part: Analysis, recomputable: Recomputable) -> tuple[Run, ...]:
    """The repeated blocks of a program (`folding.find_runs`), cut where ranges begin; none where
    ranges and blocks are not the same, so that no block stands for others."""
    starts = [positions.start for positions in recomputable.within(part)]
    runs = tuple(_shifted(run, starts) for run in find_runs(part))
    runs = tuple(run for run in runs if run.count > KEPT)
    places = {i: (run, (i - run.start) // run.period) for run in runs for i in _positions(run)}
    for positions in recomputable.within(part):
        if len({places.get(i) for i in positions}) > 1:
            return ()
    return runs


def _positions(run: Run) -> range:
    return range(run.start, run.end)


def _shifted(run: Run, starts: Sequence[int]) -> Run:
    """From the first of the starts within its first block on."""
    first = next((i for i in starts if run.start <= i < run.start + run.period), run.start)
    return Run(first, run.period, (run.end - first) // run.period)


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
