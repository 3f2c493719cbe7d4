"""Fitting a profile's constants to published runs: least squares with the literature as prior.

    minimise   sum over runs ((log predicted - log published) / RUN_SIGMA)^2
             + sum over runs of a group ((log ratio - mean log ratio of the group) / GROUP_SIGMA)^2
             + sum over constants ((log value - log prior) / sigma)^2

Runs of a group (one figure of a paper: same machine, model and software) are known better relative to
each other than to the world. Solved by Gauss-Newton steps with a numerical Jacobian in the logarithms. The prior of a constant is what
data sheets and micro-benchmarks say of it; its sigma is how far whole training runs may lie from
that. With no run on a device, its constants stay at the prior.

Constants belong to hardware: all runs on a device share them, whatever paper they come from.
`leave_one_out` fits without the runs of one paper and predicts them, which is what a user's own
run would see.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.cost.hardware import Profile, Quantity, load_profile
from autopar.cost.published.predict import step_model
from autopar.cost.published.rows import Row

RUN_SIGMA = 0.05
GROUP_SIGMA = 0.01
_STEP = 0.02  # of a logarithm, for the Jacobian


@dataclass(frozen=True)
class Constant:
    """A fitted constant: its keys in a profile, which share one value, its prior and sigma."""

    keys: tuple[str, ...]
    prior: float
    sigma: float
    largest: float = math.inf


def with_values(profile: Profile, values: Mapping[str, float]) -> Profile:
    """The profile with some of its quantities replaced."""
    changed = {key: Quantity(value, "fit") for key, value in values.items()}
    return replace(profile, quantities={**profile.quantities, **changed})


@dataclass(frozen=True)
class Fit:
    """The values of the constants of one profile, and the runs they were fitted to."""

    profile: str
    values: Mapping[str, float]
    n_runs: int


def fit(
    name: str, rows: Iterable[Row], constants: Sequence[Constant],
    groups: Iterable[Sequence[str]] = (), n_steps: int = 4,
) -> Fit:  # fmt: skip
    """Constants of the profile `name` from those of `rows` that ran on it; groups are of ids."""
    base = load_profile(name)
    used = [row for row in rows if row.profile == name and row.step_time_s]
    ids = [row.id for row in used]
    members = [[ids.index(i) for i in group if i in ids] for group in groups]
    x = np.log([constant.prior for constant in constants])
    prior, sigma = x.copy(), np.array([constant.sigma for constant in constants])
    bound = np.log([constant.largest for constant in constants])

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
        normal = jacobian.T @ jacobian + np.diag(sigma**-2.0)
        gradient = jacobian.T @ here + (x - prior) * sigma**-2.0
        x = np.minimum(x - np.linalg.solve(normal, gradient), bound)
    return Fit(name, _values(constants, x), len(used))


def log_error(row: Row, profile: Profile | None = None) -> float:
    """log(predicted / published) of a run's step time."""
    assert row.step_time_s is not None
    return math.log(step_model(row, profile).simulate().step_time_s / row.step_time_s)


def _values(constants: Sequence[Constant], logs: np.ndarray) -> dict[str, float]:
    return {
        key: float(math.exp(log))
        for constant, log in zip(constants, logs, strict=True)
        for key in constant.keys
    }
