"""Lowers a stage with few of its repeated blocks, to price it or to print it.

Consecutive blocks that are placed alike cost the same. Of such a group three blocks are lowered:
the first, because the blocks before it may be placed otherwise; the second, which stands for all
blocks up to the last; and the last. Every block that is left out has an equal block before and
after it. So it costs what the second costs, and changes the live bytes by as much
(`program/lines/abridged.py`, `cost/memory/ledger.py`). The price is exact, and the time to find
it does not grow with depth.

Text needs more (`lower_few`): the blocks beside the one that stands for others have equal
neighbours, too, and nothing outside of the blocks reads one that is left out. Codegen proves that
others are printed like those that stand for them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from autopar.cost.laws import CostModel
from autopar.passes.analysis import Analysis, Folded, Run, find_runs, fold, place_in
from autopar.passes.lowering.lines import lower
from autopar.passes.lowering.placed_stage import PlacedStage
from autopar.program.lines import CallLine, Recomputed, RepeatedLines, StageProgram, Strategy

# Blocks before the one that stands for others, and after it, in a text.
_N_BEFORE, _N_AFTER = 3, 2


@dataclass(frozen=True)
class EqualBlocks:
    """Blocks `first` to `last` of a run, all placed alike.

    Of them `n_before` are lowered, then one that stands for as many as it can, then `n_after`.
    """

    first: int
    last: int
    n_before: int
    n_after: int

    @property
    def middle(self) -> int:
        """The block that stands for others."""
        return min(self.first + self.n_before, self.last)

    @property
    def n_stood_for(self) -> int:
        return max(1, self.last - self.middle - self.n_after + 1)

    @property
    def kept(self) -> tuple[int, ...]:
        after = range(self.middle + self.n_stood_for, self.last + 1)
        return *range(self.first, self.middle + 1), *after


@dataclass(frozen=True, eq=False)
class Abridger:
    """Lowers one program with few blocks of its `runs`: of equal ones, some before the one that
    stands for others, and some after it."""

    analysis: Analysis
    runs: tuple[Run, ...]
    n_before: int = 1
    n_after: int = 1
    _folded: dict[tuple[tuple[int, ...], ...], Folded] = field(default_factory=dict, init=False)

    def lower(
        self, strategy: Strategy, cost: CostModel, with_outputs: bool = False
    ) -> StageProgram:
        """The stage program with `repeats`, for a strategy of the whole program."""
        found = self.equal_blocks(strategy)
        folded = self.folded(found)
        fewer = replace(strategy, recomputed=self._recomputed(strategy, _kept_numbers(found)))
        program = lower(folded.analysis, fewer, cost, with_outputs)
        repeats = tuple(
            _repeat(program, folded, run, group)
            for run, groups in zip(self.runs, found, strict=True)
            for group in groups
            if group.n_stood_for > 1
        )
        return replace(program, repeats=repeats, every_parameter=_every_parameter(folded))

    def folded(self, blocks: Sequence[Sequence[EqualBlocks]]) -> Folded:
        """The program with the kept ones of these blocks."""
        kept = _kept_numbers(blocks)
        if kept not in self._folded:
            self._folded[kept] = fold(self.analysis, self.runs, kept)
        return self._folded[kept]

    def equal_blocks(self, strategy: Strategy) -> list[list[EqualBlocks]]:
        """Of each run, the groups of consecutive blocks that are placed alike."""
        return [self._of_run(run, strategy) for run in self.runs]

    def _of_run(self, run: Run, strategy: Strategy) -> list[EqualBlocks]:
        """The groups of a run.

        If another stage reads a value made before the last block, every block is its own group.
        """
        again = {
            name: (item.mode, name == item.operators[0])
            for item in strategy.recomputed
            for name in item.operators
        }
        sent = {*self.analysis.program.sent}
        inner = range(run.start, run.end - run.period)
        if any(sent.intersection(self.analysis.operators[i].outputs) for i in inner):
            return [self._blocks(b) for b in range(run.count)]
        found: list[EqualBlocks] = []
        before: object = None
        for b in range(run.count):
            placed = [
                (strategy.operators[o.name], *self._stored(o.inputs, strategy), again.get(o.name))
                for o in (self.analysis.operators[i] for i in run.block(b))
            ]
            if placed == before:
                found[-1] = replace(found[-1], last=b)
            else:
                found.append(self._blocks(b))
            before = placed
        return found

    def _blocks(self, b: int) -> EqualBlocks:
        return EqualBlocks(b, b, self.n_before, self.n_after)

    def _stored(self, names: Sequence[str], strategy: Strategy) -> list[object]:
        return [strategy.storage[n] for n in names if n in self.analysis.program.parameters]

    def _recomputed(
        self, strategy: Strategy, blocks: Sequence[Sequence[int]]
    ) -> tuple[Recomputed, ...]:
        """The recomputed ranges that begin in a kept block.

        A range that continues in the next block continues in the next kept block.
        """
        operators = self.analysis.operators
        place = {o.name: i for i, o in enumerate(operators)}
        found = []
        for item in strategy.recomputed:
            positions = [place[name] for name in item.operators]
            moved = [self._moved(i, positions[0], blocks) for i in positions]
            if None not in moved:
                names = tuple(operators[i].name for i in moved if i is not None)
                found.append(replace(item, operators=names))
        return tuple(found)

    def _moved(self, i: int, first: int, blocks: Sequence[Sequence[int]]) -> int | None:
        """The kept operator for operator `i` of a range that begins with operator `first`.

        None if the range begins in a block that is left out.
        """
        for run, kept in zip(self.runs, blocks, strict=True):
            block, begins = run.block_at(i), run.block_at(first)
            if block is None:
                continue
            begins = block if begins is None else begins
            if begins not in kept:
                return None
            number = kept[kept.index(begins) + block - begins]
            return i + (number - block) * run.period
        return i


def lower_few(stage: PlacedStage, with_outputs: bool = False) -> StageProgram | None:
    """The stage program with few blocks, to print it; None if no more are left out than are kept,
    or if others than blocks near by read those."""
    few = Abridger(stage.analysis, find_runs(stage.analysis), _N_BEFORE, _N_AFTER)
    blocks = few.equal_blocks(stage.strategy)
    if all(group.n_stood_for == 1 for groups in blocks for group in groups):
        return None
    if not _is_read_near_by(few.folded(blocks), _kept_numbers(blocks), with_outputs):
        return None
    return few.lower(stage.strategy, stage.cost, with_outputs)


def _is_read_near_by(folded: Folded, numbers: Sequence[Sequence[int]], with_outputs: bool) -> bool:
    """Is what is left out read only by its own run, by blocks near by? `numbers` are kept."""
    whole, runs = folded.whole, folded.runs
    program, kept = whole.program, frozenset(folded.kept)
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


def _kept_numbers(blocks: Sequence[Sequence[EqualBlocks]]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(b for group in groups for b in group.kept) for groups in blocks)


def _repeat(program: StageProgram, folded: Folded, run: Run, group: EqualBlocks) -> RepeatedLines:
    """The lines of the block that stands for others, and the constants that only it reads."""
    whole, captured = folded.whole.operators, folded.analysis.program
    own = {o.name: o for o in folded.analysis.operators}
    block = [own[whole[i].name] for i in run.block(group.middle)]
    before = [whole[i].name for i in run.block(group.middle - 1)]
    reads = Counter(name for o in own.values() for name in o.inputs)
    mine = Counter(name for o in block for name in o.inputs)
    alone = {name for name, n in mine.items() if reads[name] == n}
    return RepeatedLines(
        _end(program, [captured.keys[name] for name in before]),
        _end(program, [captured.keys[o.name] for o in block]),
        group.n_stood_for,
        frozenset(
            d.local.name for d in program.delivered if d.kind == "constant" and d.source in alone
        ),
    )


def _every_parameter(folded: Folded) -> tuple[str, ...]:
    """Per parameter of the whole program, the name of the one that stands for it."""
    own, instead = folded.analysis.program.parameters, dict[str, str]()
    for operator, f in zip(folded.whole.operators, folded.stands_for, strict=True):
        instead.update(zip(operator.inputs, folded.analysis.operators[f].inputs, strict=True))
    every = folded.whole.program.parameters
    return tuple(own[n if n in own else instead[n]].name for n in every)


def _end(program: StageProgram, keys: Sequence[str]) -> int:
    """The position after the last line of these operators."""
    wanted = frozenset(keys)
    lines = enumerate(program.body)
    return 1 + max(i for i, line in lines if isinstance(line, CallLine) and line.key in wanted)
