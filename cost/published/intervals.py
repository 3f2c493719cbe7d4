"""How far published steps lie from predictions: ratios that hold 80% of the runs left out of a fit.

Runs are left out a paper at a time (`fit.py`), as a user's own run is. Per software and device,

    ratio = the 80% quantile of |log (predicted / published)|, as a factor

Fewer than `LEAST_RUNS` runs say little about a quantile: they share the ratio of their software,
or, if that has too few, of all runs.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping

import numpy as np

from autopar.cost.published.rows import PublishedRun

HELD = 0.8  # of the runs
LEAST_RUNS = 5


def interval_ratios(
    rows: Iterable[PublishedRun], errors: Mapping[str, float]
) -> dict[str, dict[str, tuple[float, int]]]:
    """Software -> device -> (ratio, number of runs it is of); `errors` by id, of left-out runs."""
    by_device: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if row.id in errors:
            log = abs(math.log(1 + errors[row.id]))
            by_device[row.software.name][row.profile].append(log)
    every = [log for devices in by_device.values() for logs in devices.values() for log in logs]
    found: dict[str, dict[str, tuple[float, int]]] = {}
    for name, devices in by_device.items():
        of_software = [log for logs in devices.values() for log in logs]
        found[name] = {}
        for device, logs in devices.items():
            used = next((known for known in (logs, of_software) if len(known) >= LEAST_RUNS), every)
            found[name][device] = math.exp(float(np.quantile(used, HELD))), len(used)
    return found
