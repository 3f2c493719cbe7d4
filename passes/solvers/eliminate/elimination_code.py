"""An elimination plan as integer arrays, which compiled loops read (`elimination_loops.py`).

A problem's numbers lie in one row: the given ones, then those that steps make. Equal blocks share
the places of their tables, so steps of one kind that read the same numbers are computed once.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from autopar.arrays import Codes
from autopar.passes.solvers.eliminate import elimination_loops as loops
from autopar.passes.solvers.eliminate.elimination_order import EliminationPlan
from autopar.passes.solvers.problem import EliminationStep, Layout, PlacedTable, Shape


@dataclass(frozen=True, eq=False)
class Code:
    """What the loops read; `elimination_loops.py` names the columns. `table_at` and `shapes` are
    the offsets and shapes of all tables, given or made. `constants_at` are the offsets of tables
    without variables. `n_numbers` is the length of a row, with what steps make."""

    steps: Codes
    slots: Codes
    sources: Codes
    alone: Codes
    reads: Codes
    axes: Codes
    places: Codes
    table_at: dict[int, int]
    shapes: dict[int, Shape]
    constants_at: tuple[int, ...]
    n_numbers: int
    n_scratch: int


@lru_cache(maxsize=256)
def code_of(plan: EliminationPlan, layout: Layout) -> Code:
    """The code of a plan, for numbers in the places of `layout`."""
    return _Coder(plan, layout).code()


@dataclass
class _StepSource:
    """A table that a step reads, as offsets into it: `by_class` of the classes of the eliminated
    variable, `by_axis[w]` of the classes of separator variable w."""

    table: PlacedTable
    by_class: Codes
    by_axis: dict[int, Codes]


_Groups = list[list[_StepSource]]


@dataclass
class _Coder:
    plan: EliminationPlan
    layout: Layout
    steps: list[list[int]] = field(default_factory=list)
    slots: list[list[int]] = field(default_factory=list)
    sources: list[list[int]] = field(default_factory=list)
    alone: list[list[int]] = field(default_factory=list)
    reads: list[list[int]] = field(default_factory=list)
    axes: list[list[int]] = field(default_factory=list)
    _places: list[Codes] = field(default_factory=list)
    _place_of: dict[bytes, int] = field(default_factory=dict)
    _n_places: int = 0
    _n_scratch: int = 1
    table_at: dict[int, int] = field(default_factory=dict)
    shapes: dict[int, Shape] = field(default_factory=dict)
    n_numbers: int = 0

    def code(self) -> Code:
        self.table_at.update(enumerate(self.layout.table_at))
        self.shapes.update(enumerate(self.layout.shapes))
        self.n_numbers = self.layout.n_numbers
        known: dict[Hashable, int] = {}
        for step in self.plan.steps:
            if step.is_view:
                self._see(step)
                self._add(step, 0, False)
                continue
            of_tables = ((self.table_at[p.table], self.shapes[p.table]) for p in step.bucket)
            key = (step.kind, self.layout.own_at[step.variable], *of_tables)
            is_new = key not in known
            shape = tuple(self.plan.partitions.n_classes(p) for p in step.made.partitions)
            if is_new:
                known[key] = self.n_numbers
                self.n_numbers += math.prod(shape)
            self.table_at[step.made.table], self.shapes[step.made.table] = known[key], shape
            self._add(step, known[key], is_new)
        places = np.concatenate(self._places) if self._places else np.zeros(1, dtype=np.intp)
        return Code(
            _array(self.steps, loops.N_STEP_COLUMNS), _array(self.slots, 5),
            _array(self.sources, 4), _array(self.alone, 2), _array(self.reads, 4),
            _array(self.axes, 2), places, self.table_at, self.shapes,
            tuple(self.table_at[t] for t, shape in self.shapes.items() if not shape),
            self.n_numbers, self._n_scratch,
        )  # fmt: skip

    def _see(self, view: EliminationStep) -> None:
        """Place a view's table where its pair's table is, with one axis split in two."""
        table, _, second = view.bucket
        *before, n_pairs = self.shapes[table.table][: table.scope.index(view.variable) + 1]
        after = self.shapes[table.table][len(before) + 1 :]
        n_second = int(second.codes_of(view.variable).max()) + 1
        self.table_at[view.made.table] = self.table_at[table.table]
        self.shapes[view.made.table] = (*before, n_pairs // n_second, n_second, *after)

    def _offset_of(self, codes: Codes) -> int:
        """The offset of an index array in `places`; equal arrays are stored once."""
        codes = np.ascontiguousarray(codes, dtype=np.intp)
        key = codes.tobytes()
        if key not in self._place_of:
            self._place_of[key] = self._n_places
            self._places.append(codes)
            self._n_places += len(codes)
        return self._place_of[key]

    def _add(self, step: EliminationStep, made_at: int, is_new: bool) -> None:
        plan = self.plan
        separator, n_first = step.made.scope, len(self.slots)
        *rows, last = separator or (-1,)
        sizes = {
            v: plan.partitions.n_classes(p)
            for v, p in zip(separator, step.made.partitions, strict=True)
        }
        first_alone, first_read = len(self.alone), len(self.reads)
        wide = narrow = 0
        if is_new:
            wide, narrow = self._add_slots(step, tuple(rows), last, sizes)
            for placed in step.bucket:
                if len(placed.scope) == 1:
                    at = self.table_at[placed.table]
                    self.alone.append([at, self._offset_of(placed.codes[0])])
        for placed in step.bucket:
            self._add_read(step, placed)
        partition = plan.partitions.codes[step.partition]
        self.steps.append([
            step.variable, plan.sizes[step.variable], plan.partitions.n_classes(step.partition),
            self.layout.own_at[step.variable], self._offset_of(partition),
            math.prod(sizes[v] for v in rows), sizes.get(last, 1), made_at,
            n_first, wide, narrow, first_alone, len(self.alone) - first_alone,
            first_read, len(self.reads) - first_read, int(is_new),
        ])  # fmt: skip

    def _strides(self, placed: PlacedTable) -> list[int]:
        shape = self.shapes[placed.table]
        return [math.prod(shape[k + 1 :]) for k in range(len(shape))]

    def _add_read(self, step: EliminationStep, placed: PlacedTable) -> None:
        first, own = len(self.axes), 0
        for v, codes, stride in zip(placed.scope, placed.codes, self._strides(placed), strict=True):
            at = self._offset_of(codes * stride)
            if v == step.variable:
                own = at
            else:
                self.axes.append([v, at])
        self.reads.append([self.table_at[placed.table], first, len(self.axes) - first, own])

    def _add_slots(
        self, step: EliminationStep, rows: tuple[int, ...], last: int, sizes: dict[int, int]
    ) -> tuple[int, int]:
        """Add the slots of a step's tables, wide ones first: (how many are wide, narrow)."""
        wide, narrow = _group(
            [self._source(step, placed) for placed in step.bucket if len(placed.scope) > 1], last
        )
        n_classes, n_scratch = self.plan.partitions.n_classes(step.partition), 0
        for i, group in enumerate((*wide, *narrow)):
            mine = [v for v in rows if any(v in source.by_axis for source in group)]
            n_rows = math.prod(sizes[v] for v in mine)
            n_columns = sizes[last] if i < len(wide) else 1
            first = len(self.sources)
            for source in group:
                by_row = _sums([source.by_axis.get(v, np.zeros(sizes[v], np.intp)) for v in mine])
                by_column = source.by_axis.get(last, np.zeros(n_columns, np.intp))
                self.sources.append([
                    self.table_at[source.table.table], self._offset_of(source.by_class),
                    self._offset_of(by_row), self._offset_of(by_column),
                ])  # fmt: skip
            row_of = np.arange(n_rows).reshape([sizes[v] if v in mine else 1 for v in rows])
            row_of = np.broadcast_to(row_of, [sizes[v] for v in rows]).ravel()
            self.slots.append([first, len(group), n_rows, n_columns, self._offset_of(row_of)])
            n_scratch += n_classes * n_rows * n_columns
        self._n_scratch = max(self._n_scratch, n_classes + n_scratch)
        return len(wide), len(narrow)

    def _source(self, step: EliminationStep, placed: PlacedTable) -> _StepSource:
        joins = {step.variable: step.partition}
        joins |= zip(step.made.scope, step.made.partitions, strict=True)
        by_axis = {
            v: codes[self.plan.partitions.firsts[joins[v]]] * stride
            for v, codes, stride in zip(
                placed.scope, placed.codes, self._strides(placed), strict=True
            )
        }
        by_class = by_axis.pop(step.variable)
        return _StepSource(placed, by_class, by_axis)


def _group(
    sources: Sequence[_StepSource], last: int
) -> tuple[list[list[_StepSource]], list[list[_StepSource]]]:
    """(wide groups, narrow groups) of tables that are summed before they are joined.

    A table whose variables are among those of a wide group joins it. The others without the last
    variable are one narrow group. Wide tables beyond `N_WIDE` groups join the last group.
    """
    wide, narrow = _Groups(), list[_StepSource]()
    for source in sorted(sources, key=lambda of: (last not in of.by_axis, -len(of.by_axis))):
        for group in wide:
            if source.by_axis.keys() <= group[0].by_axis.keys():
                group.append(source)
                break
        else:
            if last not in source.by_axis:
                narrow.append(source)
            elif len(wide) < loops.N_WIDE:
                wide.append([source])
            else:
                wide[-1].append(source)
    return wide, [narrow] if narrow else []


def _sums(by_axis: Sequence[Codes]) -> Codes:
    """The sums of offsets over all combinations of the axes, the last axis fastest."""
    total = np.zeros(1, dtype=np.intp)
    for places in by_axis:
        total = (total[:, None] + places).ravel()
    return total


def _array(rows: Sequence[Sequence[int]], n_columns: int) -> Codes:
    return np.array(rows, dtype=np.intp).reshape(len(rows), n_columns)
