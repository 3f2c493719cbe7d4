"""Fitting a profile's constants to published runs: least squares with the literature as prior.

    minimise   sum over runs        (log predicted - log published)^2 / RUN_SIGMA^2
             + sum over group runs  (log ratio - mean log ratio of the group)^2 / GROUP_SIGMA^2
             + sum over constants   (log value - log prior)^2 / sigma^2

where log ratio is log(predicted / published). `fit` solves this. Runs of a group are one figure of
a paper: the same machine, model and software. Their ratios to each other are known better than
their absolute times. A residual beyond two sigmas counts linearly, not squared (P. J. Huber, 1964).
So one unusual run does not bend the constants of all others. The unknowns are the logarithms.

The prior of a constant (`priors.toml`) comes from data sheets and micro-benchmarks. Its sigma is
how far whole training runs may lie from that. Without runs on a device, its constants stay at the
prior. Constants belong to hardware: all runs on a device share them, from whatever paper.
`leave_one_out` fits without the runs of one paper and predicts those, as it would a user's own run.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from autopar.cost.hardware import Profile, Quantity, load_profile
from autopar.cost.published.predict import step_model
from autopar.cost.published.rows import PublishedRun

RUN_SIGMA = 0.05
GROUP_SIGMA = 0.01
_HUBER = 2.0
_CONVERGED = 1e-4  # of all logarithms together
Array = NDArray[np.float64]
PRIORS = Path(__file__).parent / "priors.toml"
_NUDGE = 0.02  # of a logarithm, for the Jacobian: laws have kinks


@dataclass(frozen=True)
class Constant:
    """A fitted constant: its keys in a profile (all get its value), its prior and sigma."""

    keys: tuple[str, ...]
    prior: float
    sigma: float


def constants_of(name: str) -> tuple[Constant, ...]:
    """The fitted constants of a profile; empty for one that is not fitted."""
    with PRIORS.open("rb") as file:
        table = tomllib.load(file)["profile"].get(name, {})
    return tuple(
        Constant(tuple(entry.get("keys", (key,))), entry["prior"], entry["sigma"])
        for key, entry in table.items()
    )


def with_values(profile: Profile, values: Mapping[str, float]) -> Profile:
    """The profile with some of its quantities replaced."""
    changed = {key: Quantity(value, "fit") for key, value in values.items()}
    return replace(profile, quantities={**profile.quantities, **changed})


def at_priors(name: str) -> Profile:
    """The profile with constants from the literature alone, before any fit to training runs."""
    constants = constants_of(name)
    return with_values(load_profile(name), {key: c.prior for c in constants for key in c.keys})


@dataclass(frozen=True)
class Fit:
    """The values of the constants of one profile, and the runs they were fitted to."""

    profile: str
    values: Mapping[str, float]
    n_runs: int


def fit(
    name: str, rows: Iterable[PublishedRun], constants: Sequence[Constant],
    groups: Iterable[Sequence[str]] = (), n_steps: int = 32,
) -> Fit:  # fmt: skip
    """Fit constants of the profile `name` to those `rows` that ran on it; groups are of ids."""
    base = load_profile(name)
    used = [row for row in rows if row.profile == name and row.step_time_s]
    ids = [row.id for row in used]
    members = [[ids.index(i) for i in group if i in ids] for group in groups]
    prior = np.log([constant.prior for constant in constants])
    sigma = np.array([constant.sigma for constant in constants])

    def residuals(at: Array) -> Array:
        profile = with_values(base, _values(constants, at))
        errors = np.array([log_error(row, profile) for row in used])
        apart = [errors[m] - errors[m].mean() for m in members if len(m) > 1]
        return np.concatenate(
            [(at - prior) / sigma, errors / RUN_SIGMA, *(a / GROUP_SIGMA for a in apart)]
        )

    def slopes(at: Array) -> Array:
        here = residuals(at)
        nudged = [residuals(at + _NUDGE * unit) for unit in np.eye(len(at))]
        return np.column_stack([(there - here) / _NUDGE for there in nudged])

    def loss(squares: Array) -> Array:
        """Huber's, and squares for priors: values and both derivatives (`least_squares`)."""
        is_prior = np.arange(len(squares)) < len(prior)
        roots = np.sqrt(np.where(is_prior | (squares <= 1), 1.0, squares))
        values = np.where(roots > 1, 2 * roots - 1, squares)
        return np.stack([values, 1 / roots, np.where(roots > 1, -0.5 / roots**3, 0.0)])

    if used:
        fitted = least_squares(
            residuals, prior, slopes, loss=loss, f_scale=_HUBER, xtol=_CONVERGED, max_nfev=n_steps
        )
        return Fit(name, _values(constants, fitted.x), len(used))
    return Fit(name, _values(constants, prior), 0)


def log_error(row: PublishedRun, profile: Profile | None = None) -> float:
    """log(predicted / published) of a run's step time."""
    assert row.step_time_s is not None
    return math.log(step_model(row, profile).step_time_s() / row.step_time_s)


def _values(constants: Sequence[Constant], logs: np.ndarray) -> dict[str, float]:
    return {
        key: float(math.exp(log))
        for constant, log in zip(constants, logs, strict=True)
        for key in constant.keys
    }


def leave_one_out(
    rows: Sequence[PublishedRun], groups: Iterable[Sequence[str]] = ()
) -> dict[str, dict[str, float]]:
    """Paper -> id -> predicted / published - 1, with constants fitted to the other papers' runs."""
    groups, found = list(groups), {}
    for paper in dict.fromkeys(row.paper for row in rows if row.step_time_s):
        left_out = [row for row in rows if row.paper == paper and row.step_time_s]
        others = [row for row in rows if row.paper != paper]
        errors = {}
        for name in dict.fromkeys(row.profile for row in left_out):
            values = fit(name, others, constants_of(name), groups).values
            profile = with_values(load_profile(name), values)
            for row in left_out:
                if row.profile == name:
                    errors[row.id] = math.exp(log_error(row, profile)) - 1
        found[paper] = errors
    return found
