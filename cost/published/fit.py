"""Fitting a profile's constants to published runs: least squares with the literature as prior.

    minimise   sum over runs        (log predicted - log published)^2 / RUN_SIGMA^2
             + sum over group runs  (log ratio - mean log ratio of the group)^2 / GROUP_SIGMA^2
             + sum over constants   (log value - log prior)^2 / sigma^2

where log ratio is log(predicted / published). `fit` solves this. Runs of a group are one figure of
a paper: the same machine, model and software. Their ratios to each other are known better than
their absolute times. A residual beyond two sigmas counts linearly, not squared (P. J. Huber, 1964).
So one unusual run does not bend the constants of all others. The solver is reweighted Gauss-Newton
with a numerical Jacobian in the logarithms.

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

from autopar.cost.hardware import Profile, Quantity, load_profile
from autopar.cost.published.predict import step_model
from autopar.cost.published.rows import PublishedRun

RUN_SIGMA = 0.05
GROUP_SIGMA = 0.01
_HUBER = 2.0
_CONVERGED = 1e-3  # of every logarithm
PRIORS = Path(__file__).parent / "priors.toml"
_STEP = 0.02  # of a logarithm, for the Jacobian


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
    x = np.log([constant.prior for constant in constants])
    prior, sigma = x.copy(), np.array([constant.sigma for constant in constants])

    def residuals(at: np.ndarray) -> np.ndarray:
        profile = with_values(base, _values(constants, at))
        errors = np.array([log_error(row, profile) for row in used])
        apart = [errors[m] - errors[m].mean() for m in members if len(m) > 1]
        return np.concatenate([errors / RUN_SIGMA, *(a / GROUP_SIGMA for a in apart)])

    for _ in range(n_steps if used else 0):
        here = residuals(x)
        jacobian = np.stack(
            [(residuals(x + _STEP * unit) - here) / _STEP for unit in np.eye(len(x))], axis=1
        )
        weight = np.minimum(1.0, _HUBER / np.maximum(np.abs(here), 1e-12))
        normal = (jacobian.T * weight) @ jacobian + np.diag(sigma**-2.0)
        gradient = jacobian.T @ (weight * here) + (x - prior) * sigma**-2.0
        step = np.linalg.solve(normal, gradient)
        x = x - step
        if np.abs(step).max() < _CONVERGED:
            break
    return Fit(name, _values(constants, x), len(used))


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
