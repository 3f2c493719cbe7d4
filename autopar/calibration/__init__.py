"""`autopar calibrate`: this machine as a hardware profile, every number measured.

Read `samples` (what is timed), `timing` (interleaved medians), `operators`, `transfers` and `steps`
(the timed work), `measure` (runs it on ranks), `fit` (constants of the laws), `machine` (what the
system reports), `profile` (constants with sources), `result` (`Calibration`: samples and fits).
The laws are those of `cost/laws/model.py` and `cost/laws/collectives.py`. Work is charged as the
planner charges it, and the constants are fitted to whole steps last. So what the laws leave out is
in the constants, and predictions do not miss it.
May import every room except `cli` and `parity`. Hands on `calibrate` and `Calibration`.
"""

from autopar.calibration.measure import calibrate
from autopar.calibration.result import Calibration

__all__ = [
    "Calibration",
    "calibrate",
]
