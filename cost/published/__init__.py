"""Published training runs beside what the cost model says of them.

runs      a file of runs: the shipped `published_runs.json`, or a user's own
rows      a run as numbers: shape, recipe, software, machine
predict   the model of a run
tables    two tables of one transformer layer that a file may carry: bytes kept, milliseconds
accuracy  what errors come to: means, order, targets
score     predictions beside what was published
fit       constants of a hardware profile from runs
"""

from autopar.cost.published.accuracy import ErrorSummary, Ordering, Target
from autopar.cost.published.runs import SHIPPED, is_runs_file, read_runs
from autopar.cost.published.scoring import Entry, PublishedFigure, Score, score
from autopar.cost.published.tables import Cell

__all__ = [
    "SHIPPED",
    "Cell",
    "Entry",
    "ErrorSummary",
    "Ordering",
    "PublishedFigure",
    "Score",
    "Target",
    "is_runs_file",
    "read_runs",
    "score",
]
