"""The accuracy of the cost model: predictions beside published training runs.

Read `runs.py` (a file of runs: the shipped `published_runs.json` and `mcore_golden.json`, or a
user's own), then `rows.py` (a run as numbers), `features.py` (its software) and `settle.py` (what
it leaves open). Then `tables.py` (two tables of one layer), `fit.py` (constants of a software from
runs, intervals) and `scoring.py` (all runs of a file, errors, targets).

This is the highest room of `cost`: it may import all the others. It mainly hands on `read_runs`,
`score` and `Score`.
"""

from autopar.cost.published.fit import fit, fitted_constants, interval_ratios, leave_one_out
from autopar.cost.published.rows import PublishedRun, read_row
from autopar.cost.published.runs import GOLDEN_MEMORY, SHIPPED, is_runs_file, read_runs
from autopar.cost.published.scoring import (
    AccuracyTarget,
    Entry,
    ErrorSummary,
    Ordering,
    PublishedFigure,
    Score,
    score,
)
from autopar.cost.published.tables import Cell

__all__ = [
    "GOLDEN_MEMORY",
    "SHIPPED",
    "AccuracyTarget",
    "Cell",
    "Entry",
    "ErrorSummary",
    "Ordering",
    "PublishedFigure",
    "PublishedRun",
    "Score",
    "fit",
    "fitted_constants",
    "interval_ratios",
    "is_runs_file",
    "leave_one_out",
    "read_row",
    "read_runs",
    "score",
]
