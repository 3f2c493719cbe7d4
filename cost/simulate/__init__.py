"""The simulator."""

from autopar.cost.simulate.events import Event, Lane, Totals
from autopar.cost.simulate.step import simulate
from autopar.cost.simulate.timeline import Timeline
from autopar.cost.simulate.times import Spent, SplitBackward, StageTimes, TieTimes

__all__ = [
    "Event",
    "Lane",
    "Spent",
    "SplitBackward",
    "StageTimes",
    "TieTimes",
    "Timeline",
    "Totals",
    "simulate",
]
