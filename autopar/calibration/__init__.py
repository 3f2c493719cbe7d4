"""`autopar calibrate`: this machine as a hardware profile, every number measured.

Read in this order:

    samples   what is timed (`Grid`), and what a timing says: work charged, seconds taken
    timing    interleaved medians, on the clock of the CPU or of a GPU
    operators, transfers   the work itself: products, memory-bound and small operators; the
              runtime's own collectives and messages
    steps     whole training steps, whose predictions show what lies between operators
    measure   starts ranks, runs all of it on them, and collects the samples
    fit       constants of the model's own laws, by least squares on relative error
    machine   what is asked of the system rather than timed
    profile   the constants as quantities of a profile, each with its source
    result    `Calibration`: samples and fits; as TOML, as text with residuals, as JSON

The laws are those of `cost/laws/compute.py` and `cost/laws/collectives.py`. Work is charged as the planner
charges it (bytes of a backward, one launch per operator), and what is achieved is fitted to whole
steps in the end, so what the model leaves out is in the constants and not missing from its
predictions.
"""

from autopar.calibration.measure import calibrate
from autopar.calibration.result import Calibration

__all__ = [
    "Calibration",
    "calibrate",
]
