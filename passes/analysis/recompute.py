"""What may be recomputed: every repeated block of a program, and in which modes.

Blocks are found in the whole program (`folding.find_runs`, at least two equal blocks). So a stage
with a single layer has a block too, and a stage that cuts through a block has its part of it. A run
can be cut into blocks at any of `period` places. A recomputed block keeps its inputs, so it is cut
where the fewest bytes cross (`_best_shift`). What a cut leaves over at both ends of a run is
recomputed too.

    full, selective    the whole block
    gathers            of the whole block what a reshard gathers
    attention-core     the fused attention operator; without one, the two matmuls of activations
                       around a softmax and everything between them (`_attention_cores`)

A mode that the user chose applies to all blocks. With "auto" the search chooses one of `SEARCHED`
per block (`passes/intra/recompute_choice.py`), if the fastest placements without recompute do not
fit (`passes/search/evaluator.py`).

With "auto", regions inside `torch.utils.checkpoint.checkpoint(...)` run again as the user's code
says, and nothing else does (`_user_regions`). A region is any range of operators.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import get_args

from autopar.caching import once
from autopar.errors import NotSupportedError
from autopar.manual import Recompute
from autopar.options import Options
from autopar.passes.analysis.analysis import Analysis
from autopar.passes.analysis.folding import KEPT, Run, find_runs
from autopar.program.lines import Recomputed
from autopar.rules import rule_for

LEAST_BLOCKS = 2
MODES: tuple[Recompute, ...] = get_args(Recompute)
# The modes that the search chooses from, least recompute first.
SEARCHED: tuple[Recompute | None, ...] = (None, "gathers", "selective", "full")
_SOFTMAX = ("aten._softmax.default", "aten.softmax.int", "aten._safe_softmax.default")

# Consecutive positions in `Analysis.operators`.
Block = range


@dataclass(frozen=True)
class Recomputable:
    """Ranges of consecutive operators, by name and in order, and the modes that each may have.

    Mode None means that the range does not run again. A single mode leaves no choice.
    """

    ranges: tuple[tuple[str, ...], ...]
    modes: tuple[Recompute | None, ...]

    @staticmethod
    def of(analysis: Analysis, options: Options) -> Recomputable | None:
        """The ranges and modes that the options allow; None if nothing is recomputed.

        Raises `NotSupportedError` if the user chose a mode that has nothing to recompute.
        """
        mode = options.recompute_mode
        if mode is not None:
            wanted = recomputed_operators(analysis, mode)
            return Recomputable(tuple(item.operators for item in wanted), (mode,))
        if not analysis.program.training:
            return None
        regions = _user_regions(analysis) if options.keeps_user_regions else None
        if regions is not None:
            return regions
        if not options.searches_recompute:
            return None
        names = [o.name for o in analysis.operators]
        ranges = tuple(tuple(names[r.start : r.stop]) for r in blocks(analysis))
        return Recomputable(ranges, SEARCHED) if ranges else None

    @once
    def within(self, part: Analysis) -> tuple[range, ...]:
        """The ranges that a part of the program has, as consecutive positions of its operators."""
        place = {operator.name: i for i, operator in enumerate(part.operators)}
        found = []
        for names in self.ranges:
            own = [place[name] for name in names if name in place]
            if own:
                assert own == list(range(own[0], own[-1] + 1)), "a range is cut, not thinned"
                found.append(range(own[0], own[-1] + 1))
        return tuple(found)

    def operators_within(self, part: Analysis) -> frozenset[int]:
        """The positions of all ranges within a part."""
        return frozenset(i for positions in self.within(part) for i in positions)

    @property
    def is_choice(self) -> bool:
        return len(self.modes) > 1


def is_searched(recomputable: Recomputable | None) -> bool:
    """Does the search choose what is recomputed, rather than the user?"""
    return recomputable is not None and recomputable.is_choice


def aligned_runs(part: Analysis, recomputable: Recomputable) -> tuple[Run, ...]:
    """The repeated blocks of a program (`folding.find_runs`), cut where ranges begin.

    Blocks with ranges at other places are in runs of their own. A run is left out if no number of
    its blocks holds whole ranges, because then no block can stand for others.
    """
    ranges = recomputable.within(part)
    return tuple(run for found in find_runs(part) for run in _align(found, ranges))


def _align(run: Run, ranges: Sequence[range]) -> tuple[Run, ...]:
    """The parts of a run in which all blocks have equal ranges; blocks may be several of its own.

    Empty if a range is in two blocks, or too few blocks are equal, however many make one.
    """
    starts = [positions.start for positions in ranges]
    for n in range(1, run.count // KEPT + 1):
        longer = _shift(Run(run.start, n * run.period, run.count // n), starts)
        inside: list[list[tuple[int, int]]] = [[] for _ in range(longer.count)]
        for positions in ranges:
            blocks = {longer.block_at(i) for i in (positions.start, positions[-1])}
            around = positions.start < longer.start and positions.stop > longer.end
            if len(blocks) > 1 or around:
                break
            (block,) = blocks
            if block is not None:
                first = longer.block(block).start
                inside[block].append((positions.start - first, positions.stop - first))
        else:
            parts = tuple(part for part in _equal_parts(longer, inside) if part.count > KEPT)
            if parts:
                return parts
    return ()


def _equal_parts(run: Run, inside: Sequence[object]) -> Iterator[Run]:
    """Consecutive blocks with equal entries of `inside`."""
    start = run.start
    for _, blocks in itertools.groupby(inside):
        part = Run(start, run.period, len(list(blocks)))
        yield part
        start = part.end


def _shift(run: Run, starts: Sequence[int]) -> Run:
    """The run, starting at the first of `starts` within its first block."""
    first = next((i for i in starts if run.start <= i < run.start + run.period), run.start)
    return Run(first, run.period, (run.end - first) // run.period)


def _user_regions(analysis: Analysis) -> Recomputable | None:
    """What the user's code checkpoints: whole ranges of operators, None without any.

    A policy that keeps some results is "selective" if all regions have one, else "full".
    """
    position = {operator.name: i for i, operator in enumerate(analysis.operators)}
    ranges: list[range] = []
    regions = analysis.program.checkpointed
    for region in regions:
        places = [position[name] for name in region.operators if name in position]
        if not places:
            continue
        found = range(min(places), max(places) + 1)
        if ranges and found.start < ranges[-1].stop:
            found = range(ranges[-1].stop, found.stop)
        if found:
            ranges.append(found)
    if not ranges:
        return None
    names = [operator.name for operator in analysis.operators]
    mode: Recompute = "selective" if all(r.is_selective for r in regions) else "full"
    return Recomputable(tuple(tuple(names[r.start : r.stop]) for r in ranges), (mode,))


def recomputed_operators(analysis: Analysis, mode: Recompute) -> tuple[Recomputed, ...]:
    """What `mode` recomputes of a whole program.

    Raises `NotSupportedError` if that is nothing.
    """
    found = blocks(analysis)
    if not found:
        raise NotSupportedError(
            f"recompute={mode!r}: {analysis.program.model_name} has no repeated blocks",
            hint="recompute='none'",
        )
    ranges = found
    if mode == "attention-core":
        ranges = [core for block in found for core in _attention_cores(analysis, block)]
        if not ranges:
            raise NotSupportedError(
                f"recompute={mode!r}: no attention was found in the blocks of "
                f"{analysis.program.model_name}",
                hint="recompute='selective' keeps the results of matmuls and recomputes the rest",
            )
    names = [o.name for o in analysis.operators]
    return tuple(Recomputed(mode, tuple(names[r.start : r.stop])) for r in ranges)


def blocks(analysis: Analysis) -> list[Block]:
    """The repeated blocks of a program that have matmuls, in order."""
    found: list[Block] = []
    for run in find_runs(analysis, LEAST_BLOCKS, own_buffers=True):
        if any(_is_matmul(analysis, i) for i in range(run.start, run.start + run.period)):
            found += _cut(run, _best_shift(analysis, run))
    return found


def _cut(run: Run, shift: int) -> Iterator[Block]:
    edges = sorted({run.start, *range(run.start + shift, run.end, run.period), run.end})
    return (range(a, b) for a, b in itertools.pairwise(edges))


def _best_shift(analysis: Analysis, run: Run) -> int:
    """The cut of a run that the fewest bytes cross; ties take the first one."""
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


def _is_matmul(analysis: Analysis, i: int) -> bool:
    return bool(rule_for(str(analysis.operators[i].call.op)).flops)


def _attention_cores(analysis: Analysis, block: Block) -> Iterator[Block]:
    """The attention cores of a block, from scores to weighted values, in order."""
    operators, end = analysis.operators, block.start
    for i in block:
        op = str(operators[i].call.op)
        if rule_for(op).fused:
            yield range(i, i + 1)
            end = i + 1
        elif op in _SOFTMAX:
            core = _core_around(analysis, block, i)
            if core is not None and core.start >= end:
                yield core
                end = core.stop


def _core_around(analysis: Analysis, block: Block, softmax: int) -> Block | None:
    """The matmuls of activations before and after a softmax, and what is between them."""
    operators = analysis.operators
    made = {name: i for i in block for name in operators[i].outputs}
    first = _matmul_before(analysis, made, softmax)
    if first is None:
        return None
    reached = set(operators[softmax].outputs)
    for i in range(softmax + 1, block.stop):
        if reached.isdisjoint(operators[i].inputs):
            continue
        if _is_matmul(analysis, i):
            return range(first, i + 1) if _is_of_activations(analysis, i) else None
        reached |= set(operators[i].outputs)
    return None


def _matmul_before(analysis: Analysis, made: dict[str, int], softmax: int) -> int | None:
    """The last matmul of activations before a softmax, with no other matmul between them."""
    waiting, seen, found = [softmax], {softmax}, []
    while waiting:
        for name in analysis.operators[waiting.pop()].inputs:
            i = made.get(name)
            if i is None or i in seen:
                continue
            seen.add(i)
            if _is_matmul(analysis, i):
                found.append(i)
            else:
                waiting.append(i)
    matmuls = [i for i in found if _is_of_activations(analysis, i)]
    return max(matmuls, default=None)


def _is_of_activations(analysis: Analysis, i: int) -> bool:
    """Does no parameter take part?"""
    return analysis.parameter_views.isdisjoint(analysis.operators[i].inputs)
