"""Turns a strategy into the lines of a stage program, and the texts of a plan into a strategy.

Reading order: `placed_stage.py` (a stage with its strategy), `lines.py` (a strategy into lines,
stages into a pipeline), `line_costs.py` (what a line costs), `fusion.py` (bias into matmul),
`gathers.py` (a block's gathers side by side), `head_tail.py` (equal causal work), `segments.py`
(lines that run again), `abridger.py` (few of the repeated blocks, to price and to
print them), `replaying.py` (plans read back).
May import `passes/intra`, `analysis` and `reshard`, and what lies below `passes`.
Mainly hands on `join`, `Abridger` and `replay`.
"""

from autopar.passes.lowering.abridger import Abridger, lower_few
from autopar.passes.lowering.head_tail import fold_alike
from autopar.passes.lowering.lines import join, lower
from autopar.passes.lowering.placed_stage import PlacedStage
from autopar.passes.lowering.replaying import replay, replay_ends, stage_record

__all__ = [
    "Abridger",
    "PlacedStage",
    "fold_alike",
    "join",
    "lower",
    "lower_few",
    "replay",
    "replay_ends",
    "stage_record",
]
