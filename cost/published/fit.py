"""Fitting a software's constants to published runs: least squares with the literature as prior.

    minimise   sum over runs        (log ratio)^2 / RUN_SIGMA^2
             + sum over group runs  (log ratio - mean log ratio of the group)^2 / GROUP_SIGMA^2
             + sum over constants   (log value - log prior)^2 / sigma^2

where log ratio is log(predicted / published). `fit` solves this. Runs of a group are one figure of
a paper: the same machine, model and software. Their ratios to each other are known better than
their absolute times. A residual beyond two sigmas counts linearly, not squared (P. J. Huber, 1964).
So one unusual run does not bend the constants of all others. The unknowns are the logarithms.

A device's constants are not fitted: they are measurements of its kernels and links alone
(`cost/hardware/profiles`). What whole steps reach of them belongs to the software
(`cost/hardware/software.py`). All its runs share its constants, on whatever device and from
whatever paper. The prior of a constant and its sigma are in `priors.toml`; without runs, constants
stay there. `leave_one_out` fits without the runs of one paper and predicts those, as it would a
user's own run. How far their published steps lie from predictions, by software and device, as a
factor (`interval_ratios`):

    ratio = the 80% quantile of |log (predicted / published)|

Fewer than `LEAST_RUNS` runs say little about a quantile: they share the ratio of their software,
or, if that has too few, of all runs.
"""

from __future__ import annotations

import math
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from autopar.cost.hardware import Software
from autopar.cost.published.rows import PublishedRun

HELD = 0.8  # of the runs
LEAST_RUNS = 5
RUN_SIGMA = 0.05
GROUP_SIGMA = 0.01
_HUBER = 2.0
_CONVERGED = 1e-4  # of all logarithms together
Array = NDArray[np.float64]
PRIORS = Path(__file__).parent / "priors.toml"
_NUDGE = 0.02  # of a logarithm, for the Jacobian: laws have kinks


@dataclass(frozen=True)
class Constant:
    """A fitted constant of software: its name, its prior and sigma, the prior's source, and the
    least value that makes sense."""

    name: str
    prior: float
    sigma: float
    source: str = ""
    least: float = 1e-9


@cache
def fitted_constants() -> tuple[Constant, ...]:
    """The constants that are fitted for each software."""
    with PRIORS.open("rb") as file:
        return tuple(Constant(name, **entry) for name, entry in tomllib.load(file).items())


@dataclass(frozen=True)
class Fit:
    """The values of the constants of one software, and the runs they were fitted to."""

    software: str
    values: Mapping[str, float]
    n_runs: int


def fit(
    name: str, rows: Iterable[PublishedRun], constants: Sequence[Constant],
    groups: Iterable[Sequence[str]] = (), n_steps: int = 32,
) -> Fit:  # fmt: skip
    """Fit constants of the software `name` to those `rows` that ran it; groups are of ids."""
    used = [row for row in rows if row.software.name == name and row.step_time_s]
    ids = [row.id for row in used]
    members = [[ids.index(i) for i in group if i in ids] for group in groups]
    prior = np.log([constant.prior for constant in constants])
    sigma = np.array([constant.sigma for constant in constants])

    def values(at: Array) -> dict[str, float]:
        return {known.name: math.exp(log) for known, log in zip(constants, at, strict=True)}

    def residuals(at: Array) -> Array:
        found = values(at)
        errors = np.array([log_error(row, row.software.with_constants(found)) for row in used])
        apart = [errors[m] - errors[m].mean() for m in members if len(m) > 1]
        return np.concatenate(
            [(at - prior) / sigma, errors / RUN_SIGMA, *(a / GROUP_SIGMA for a in apart)]
        )

    def slopes(at: Array) -> Array:
        nudged = [residuals(at + _NUDGE * unit) for unit in np.eye(len(at))]
        return (np.column_stack(nudged) - residuals(at)[:, None]) / _NUDGE

    if not used:
        return Fit(name, values(prior), 0)
    fitted = least_squares(
        residuals, prior, slopes, loss="huber", f_scale=_HUBER, xtol=_CONVERGED, max_nfev=n_steps,
        bounds=(np.log([constant.least for constant in constants]), np.inf),
    )  # fmt: skip
    return Fit(name, values(fitted.x), len(used))


def log_error(row: PublishedRun, software: Software | None = None) -> float:
    """log(predicted / published) of a run's step time, with its software or another one."""
    assert row.step_time_s is not None
    return math.log(row.step(software).step_time_s() / row.step_time_s)


def leave_one_out(
    rows: Sequence[PublishedRun], groups: Iterable[Sequence[str]] = ()
) -> dict[str, dict[str, float]]:
    """Paper -> id -> predicted / published - 1, with constants fitted to the other papers' runs."""
    groups, found = list(groups), dict[str, dict[str, float]]()
    timed = [row for row in rows if row.step_time_s]
    for paper in dict.fromkeys(row.paper for row in timed):
        own = [row for row in timed if row.paper == paper]
        others = [row for row in timed if row.paper != paper]
        values = {
            name: fit(name, others, fitted_constants(), groups).values
            for name in {row.software.name for row in own}
        }
        software = {row.id: row.software.with_constants(values[row.software.name]) for row in own}
        found[paper] = {row.id: math.exp(log_error(row, software[row.id])) - 1 for row in own}
    return found


def interval_ratios(
    rows: Iterable[PublishedRun], errors: Mapping[str, float]
) -> dict[str, dict[str, tuple[float, int]]]:
    """Software -> device -> (ratio, number of runs it is of); `errors` by id, of left-out runs."""
    logs = [
        ((row.software.name, row.profile.name), abs(math.log(1 + errors[row.id])))
        for row in rows
        if row.id in errors
    ]
    found = defaultdict[str, dict[str, tuple[float, int]]](dict)
    for name, device in dict.fromkeys(of for of, _ in logs):
        of_device = [log for of, log in logs if of == (name, device)]
        of_software = [log for of, log in logs if of[0] == name]
        every = [log for _, log in logs]
        used = next((k for k in (of_device, of_software) if len(k) >= LEAST_RUNS), every)
        found[name][device] = math.exp(float(np.quantile(used, HELD))), len(used)
    return dict(found)
