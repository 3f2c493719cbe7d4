"""Elimination of one problem in compiled loops: up through the steps, then back down to choices.

All numbers of a problem lie in one row, the given ones before the made ones. The arrays of an
`elimination_code.Code` say where. A step sums its tables in *slots*, then takes the minimum over
the classes of the eliminated variable:

    wide     at most `N_WIDE`, [classes, rows, columns]
    narrow   at most one, [classes, rows]

Columns are the classes of the separator's last variable. Rows are over some of the other separator
variables. The innermost loop runs along the columns of wide slots. Where these are short, and the
narrow slot has every row that is made, it runs along rows (`_least_of_short`). To eliminate one
block of a model takes a millisecond or two.
"""

from __future__ import annotations

import numpy as np

from autopar.arrays import Array, Codes
from autopar.passes.solvers.problem import compiled

N_WIDE = 3

# Columns of `Code.steps`. The variable, its number of choices and of classes. The offset of its own
# costs in the numbers, and of its choices' classes in the places. The number of rows (separator
# without its last variable) and columns (last variable) of the made table, and its offset in the
# numbers. The first slot, how many are wide, how many narrow. The first table of the variable
# alone, and how many. The first table to read on the way back, and how many. IS_NEW: 0 for views,
# and for tables that an earlier step makes.
VARIABLE, N_CHOICES, N_CLASSES, OWN_AT, CLASSES_AT, N_ROWS, N_COLUMNS, MADE_AT = range(8)
FIRST_SLOT, N_WIDE_SLOTS, N_NARROW_SLOTS, FIRST_ALONE, N_ALONE, FIRST_READ, N_READS, IS_NEW = range(
    8, 16
)
N_STEP_COLUMNS = 16
# Of `Code.slots`: the first source and how many; the number of rows and columns; the offset in the
# places of the slot's row for every row that is made.
FIRST_SOURCE, N_SOURCES, SLOT_ROWS, SLOT_COLUMNS, ROWS_AT = range(5)
# Of `Code.sources`, the tables summed in a slot: the offset in the numbers, and the offsets in the
# places of what classes, the slot's rows and its columns add to it.
TABLE_AT, BY_CLASS_AT, BY_ROW_AT, BY_COLUMN_AT = range(4)
# Of `Code.alone`: the offset in the numbers, and in the places of every choice's entry.
ALONE_AT, ALONE_CODES_AT = range(2)
# Of `Code.reads`, the tables of a step's bucket: the offset in the numbers; the first axis of
# another variable and how many; the offset in the places of what every choice of the step's
# variable adds.
READ_AT, FIRST_AXIS, N_AXES, OWN_CODES_AT = range(4)
# Of `Code.axes`: the variable, and the offset in the places of what each of its choices adds.
AXIS_VARIABLE, AXIS_CODES_AT = range(2)


@compiled
def run_steps(
    numbers: Array, steps: Codes, slots: Codes, sources: Codes, alone: Codes, places: Codes,
    scratch: Array,
) -> None:  # fmt: skip
    """Write the tables that the steps make."""
    for s in range(len(steps)):
        if steps[s, IS_NEW]:
            _make(numbers, steps[s], slots, sources, alone, places, scratch)


@compiled
def _make(
    numbers: Array, step: Codes, slots: Codes, sources: Codes, alone: Codes, places: Codes,
    scratch: Array,
) -> None:  # fmt: skip
    """Write the table that one step makes."""
    n_classes, n_columns = step[N_CLASSES], step[N_COLUMNS]
    least = scratch[:n_classes]
    _least_alone(numbers, step, alone, places, least)
    end = n_classes
    n_wide, n_narrow, first = step[N_WIDE_SLOTS], step[N_NARROW_SLOTS], step[FIRST_SLOT]
    # Unused wide slots alias the scratch buffer; an unused narrow slot adds 0.
    x = y = z = scratch[:1].reshape(1, 1)
    narrow = np.zeros(1)
    for i in range(n_wide + n_narrow):
        n_rows, n_slot_columns = slots[first + i, SLOT_ROWS], slots[first + i, SLOT_COLUMNS]
        size = n_classes * n_rows * n_slot_columns
        joined = scratch[end : end + size]
        end += size
        _join(numbers, slots[first + i], sources, places, n_classes, joined)
        if i == n_wide + n_narrow - 1:
            for k in range(n_classes):
                for e in range(k * (size // n_classes), (k + 1) * (size // n_classes)):
                    joined[e] += least[k]
        if i >= n_wide:
            narrow = joined
        elif i == 0:
            x = joined.reshape(n_classes * n_rows, n_slot_columns)
        elif i == 1:
            y = joined.reshape(n_classes * n_rows, n_slot_columns)
        else:
            z = joined.reshape(n_classes * n_rows, n_slot_columns)
    out = numbers[step[MADE_AT] : step[MADE_AT] + step[N_ROWS] * n_columns]
    for e in range(len(out)):
        out[e] = np.inf
    if n_wide == 0:  # no table joins the variable to another
        for k in range(n_classes):
            out[0] = min(out[0], least[k])
        return
    n_x_rows = slots[first, SLOT_ROWS]
    n_narrow_rows = slots[first + n_wide, SLOT_ROWS] if n_narrow else 0
    is_short = n_wide == 1 and n_x_rows == 1 and 2 * n_columns < step[N_ROWS]
    if is_short and n_narrow_rows == step[N_ROWS]:  # a loop along its rows is faster
        _least_of_short(out, x, narrow)
        return
    for r in range(step[N_ROWS]):
        best = out[r * n_columns : (r + 1) * n_columns]
        of_x = places[slots[first, ROWS_AT] + r]
        of_y = places[slots[first + 1, ROWS_AT] + r] if n_wide > 1 else 0
        of_z = places[slots[first + 2, ROWS_AT] + r] if n_wide > 2 else 0
        of_narrow = places[slots[first + n_wide, ROWS_AT] + r] if n_narrow else 0
        if n_wide == 1:
            _least_of_one(best, x, of_x, n_x_rows, narrow, of_narrow, n_narrow_rows, n_classes)
            continue
        for k in range(n_classes):
            fixed = narrow[k * n_narrow_rows + of_narrow]
            if fixed == np.inf:
                continue
            row_x = x[k * n_x_rows + of_x]
            row_y = y[k * slots[first + 1, SLOT_ROWS] + of_y]
            if n_wide == 2:
                for c in range(n_columns):
                    total = row_x[c] + row_y[c] + fixed
                    best[c] = total if total < best[c] else best[c]
            else:
                row_z = z[k * slots[first + 2, SLOT_ROWS] + of_z]
                for c in range(n_columns):
                    total = row_x[c] + row_y[c] + row_z[c] + fixed
                    best[c] = total if total < best[c] else best[c]


@compiled
def _least_of_one(
    best: Array, x: Array, of_x: int, n_x_rows: int, narrow: Array, of_narrow: int,
    n_narrow_rows: int, n_classes: int,
) -> None:  # fmt: skip
    """Write the minimum over classes k of x[of_x + k n_x_rows] + narrow[of_narrow + k
    n_narrow_rows]. It takes four classes at a time, so that `best` is read and written a quarter as
    often."""
    n_in_fours = n_classes // 4 * 4
    for k in range(0, n_in_fours, 4):
        fixed_0 = narrow[of_narrow + k * n_narrow_rows]
        fixed_1 = narrow[of_narrow + (k + 1) * n_narrow_rows]
        fixed_2 = narrow[of_narrow + (k + 2) * n_narrow_rows]
        fixed_3 = narrow[of_narrow + (k + 3) * n_narrow_rows]
        if min(min(fixed_0, fixed_1), min(fixed_2, fixed_3)) == np.inf:
            continue
        row_0, row_1 = x[of_x + k * n_x_rows], x[of_x + (k + 1) * n_x_rows]
        row_2, row_3 = x[of_x + (k + 2) * n_x_rows], x[of_x + (k + 3) * n_x_rows]
        for c in range(len(best)):
            least = min(min(best[c], row_0[c] + fixed_0), row_1[c] + fixed_1)
            best[c] = min(min(least, row_2[c] + fixed_2), row_3[c] + fixed_3)
    for k in range(n_in_fours, n_classes):
        fixed, row = narrow[of_narrow + k * n_narrow_rows], x[of_x + k * n_x_rows]
        for c in range(len(best)):
            best[c] = min(best[c], row[c] + fixed)


@compiled
def _least_of_short(out: Array, x: Array, narrow: Array) -> None:
    """Write the minimum over classes k of x[k, c] + narrow[k, r] to `out` [r, c], whose rows are
    short: the innermost loop runs along r."""
    n_classes, n_columns = x.shape
    n_rows = len(out) // n_columns
    best = np.full(len(out), np.inf)
    for k in range(n_classes):
        given = narrow[k * n_rows : (k + 1) * n_rows]
        for c in range(n_columns):
            fixed, column = x[k, c], best[c * n_rows : (c + 1) * n_rows]
            for r in range(n_rows):
                column[r] = min(column[r], given[r] + fixed)
    for r in range(n_rows):
        for c in range(n_columns):
            out[r * n_columns + c] = best[c * n_rows + r]


@compiled
def _least_alone(numbers: Array, step: Codes, alone: Codes, places: Codes, least: Array) -> None:
    """Write, for every class of a variable, the least of what its choices cost by themselves."""
    for c in range(len(least)):
        least[c] = np.inf
    for k in range(step[N_CHOICES]):
        total = numbers[step[OWN_AT] + k]
        for i in range(step[FIRST_ALONE], step[FIRST_ALONE] + step[N_ALONE]):
            total += numbers[alone[i, ALONE_AT] + places[alone[i, ALONE_CODES_AT] + k]]
        of_class = places[step[CLASSES_AT] + k]
        least[of_class] = min(least[of_class], total)


@compiled
def _join(
    numbers: Array, slot: Codes, sources: Codes, places: Codes, n_classes: int,
    joined: Array,
) -> None:  # fmt: skip
    """Write the sum of a slot's tables: [classes, rows, columns]."""
    n_rows, n_columns = slot[SLOT_ROWS], slot[SLOT_COLUMNS]
    row_at, column_at = BY_ROW_AT, BY_COLUMN_AT
    if n_columns == 1:  # its rows become the columns of one row
        n_rows, n_columns = n_columns, n_rows
        row_at, column_at = column_at, row_at
    for i in range(slot[N_SOURCES]):
        source = sources[slot[FIRST_SOURCE] + i]
        columns = places[source[column_at] : source[column_at] + n_columns]
        for k in range(n_classes):
            of_class = source[TABLE_AT] + places[source[BY_CLASS_AT] + k]
            for r in range(n_rows):
                given = numbers[of_class + places[source[row_at] + r] :]
                e = (k * n_rows + r) * n_columns
                made = joined[e : e + n_columns]
                if i == 0:
                    for c in range(n_columns):
                        made[c] = given[columns[c]]
                else:
                    for c in range(n_columns):
                        made[c] += given[columns[c]]


@compiled
def walk_back(
    numbers: Array, steps: Codes, reads: Codes, axes: Codes, places: Codes, chosen: Codes
) -> None:
    """Write every variable's best choice, the last eliminated variable first. Among equal choices
    the first is taken."""
    for s in range(len(steps) - 1, -1, -1):
        best, at = np.inf, 0
        for k in range(steps[s, N_CHOICES]):
            total = numbers[steps[s, OWN_AT] + k]
            for i in range(steps[s, FIRST_READ], steps[s, FIRST_READ] + steps[s, N_READS]):
                e = reads[i, READ_AT] + places[reads[i, OWN_CODES_AT] + k]
                for a in range(reads[i, FIRST_AXIS], reads[i, FIRST_AXIS] + reads[i, N_AXES]):
                    e += places[axes[a, AXIS_CODES_AT] + chosen[axes[a, AXIS_VARIABLE]]]
                total += numbers[e]
            if total < best:
                best, at = total, k
        chosen[steps[s, VARIABLE]] = at
