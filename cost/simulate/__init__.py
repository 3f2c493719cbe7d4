"""The simulator: when every action of a step runs, given the schedule and its durations.

Read `times.py` (durations of a stage's parts), `simulation.py` (a whole step), `engine.py` (devices
that run and wait), `events.py` (the record, and bytes over time), `timeline.py` (the result), then
its outputs `trace.py` and `drawing.py`.

The room may import `hardware` and what lies below `cost`, such as `schedule`; not `laws` or
`memory`, which are its neighbours. It mainly hands on `simulate`, `StageTimes` and `Timeline`.
"""

from autopar.cost.simulate.events import Event
from autopar.cost.simulate.simulation import simulate
from autopar.cost.simulate.timeline import Timeline
from autopar.cost.simulate.times import PartWork, SplitBackward, StageTimes, TieTimes

__all__ = [
    "Event",
    "PartWork",
    "SplitBackward",
    "StageTimes",
    "TieTimes",
    "Timeline",
    "simulate",
]
