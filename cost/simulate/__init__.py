"""The simulator."""

from autopar.cost.simulate.events import Event
from autopar.cost.simulate.step import simulate
from autopar.cost.simulate.timeline import Timeline
from autopar.cost.simulate.times import Spent, SplitBackward, StageTimes, TieTimes

__all__ = [
    "Event",
    "Spent",
    "SplitBackward",
    "StageTimes",
    "TieTimes",
    "Timeline",
    "simulate",
]
