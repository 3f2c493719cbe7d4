"""Constants of the cost model's laws, fitted to samples by least squares on relative error.

    memory    t = bytes / bytes_per_s + n launch_s                                (`fit_memory`)
    matmul    t = max(flops / rate + u bytes / bytes_per_s, bytes / bytes_per_s) + n launch_s
              with one rate per dtype, and one u for all                          (`fit_products`)
    transfer  t = turns c T(latency_s, s_per_byte)                                (`fit_link`)
              T is the least over the algorithms of `cost/laws/collectives.py`. c is a ratio per
              kind, and 1 except for `MEASURED_RATIOS`: gloo's reduce_scatter takes as long as an
              all_reduce
    step      t = work_ratio w + launch_ratio n + transfer_ratio c                (`fit_steps`)
              w, n and c are the times of matmuls and memory, of launches and of collectives by the
              laws above. A ratio is the time in whole steps / the time alone

Every fit minimises the sum over samples of (log law - log t)^2, so half and twice the time are
equally wrong. (With law / t - 1, a law that is too short costs little. Where no constants fit well,
the best ones would all be too short.) The unknowns are the logs of the constants, so constants are
positive. A constant that no sample depends on is refused (`_require_effect`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from autopar.calibration.samples import OperatorSample, StepSample, TransferSample
from autopar.cost.hardware import MEASURED_RATIOS, flat_group
from autopar.cost.laws import collective_time_s
from autopar.errors import CalibrationError
from autopar.mesh import Link

Array = NDArray[np.float64]
Sample = OperatorSample | TransferSample | StepSample
Law = Callable[[Array], Array]

_FARTHEST = 40.0  # of a log from where the fit starts: a constant that runs there has no effect
_MATTERS = 1e-4  # of a sample's time
# Weight of the log of a step's ratio beside the log of a sample's error: an e-fold ratio counts as
# much as an error of 2%. Enough to leave a ratio at 1 if no step determines it.
_TOWARDS_ONE = 0.02


@dataclass(frozen=True)
class Residual:
    """The measured time of one sample, and the time by the fitted law."""

    name: str
    size: str
    measured_s: float
    fitted_s: float

    @property
    def error(self) -> float:
        return self.fitted_s / self.measured_s - 1.0


@dataclass(frozen=True)
class MemoryFit:
    bytes_per_s: float
    launch_s: float
    residuals: tuple[Residual, ...]


@dataclass(frozen=True)
class ProductFit:
    """By dtype: `rates_flops_per_s` of infinitely large matmuls, `best_flops_per_s` measured."""

    rates_flops_per_s: dict[str, float]
    best_flops_per_s: dict[str, float]
    traffic_ratio: float
    residuals: tuple[Residual, ...]


@dataclass(frozen=True)
class LinkFit:
    """The fitted link; `link.ratios` has the kinds of `MEASURED_RATIOS` that were timed."""

    link: Link
    residuals: tuple[Residual, ...]


@dataclass(frozen=True)
class StepFit:
    """Time in whole steps / time alone: `work_ratio` of matmuls and memory, `launch_ratio` of
    launches, `transfer_ratio` of collectives."""

    work_ratio: float
    launch_ratio: float
    transfer_ratio: float
    residuals: tuple[Residual, ...]


def fit_memory(samples: Sequence[OperatorSample]) -> MemoryFit:
    """Memory bandwidth and launch time, from operators that compute next to nothing.

    Raises `CalibrationError` if no positive constants fit, as the other fits do.
    """
    times_s = _times_s(samples)
    touched, n = _column(samples, "size_bytes"), _column(samples, "n_operators")

    def law(constants: Array) -> Array:
        s_per_byte, launch_s = constants
        return touched * s_per_byte + n * launch_s

    start = np.array([np.median(times_s / touched), np.median(times_s / n)]) / 2
    found = _fitted(law, times_s, start)
    _require_effect(law, found, times_s, ("bandwidth of memory", "launch time of an operator"))
    return MemoryFit(1.0 / found[0], float(found[1]), _residuals(samples, law(found)))


def fit_products(samples: Sequence[OperatorSample], memory: MemoryFit) -> ProductFit:
    """A rate per dtype, and the share of a matmul's memory time that adds to its arithmetic."""
    times_s = _times_s(samples)
    dtypes = sorted({s.dtype for s in samples})
    flops = np.array([[s.flops * (s.dtype == d) for d in dtypes] for s in samples])
    memory_s = _column(samples, "size_bytes") / memory.bytes_per_s
    launch_s = _column(samples, "n_operators") * memory.launch_s

    def law(constants: Array) -> Array:
        *s_per_flop, ratio = constants
        return np.maximum(flops @ s_per_flop + ratio * memory_s, memory_s) + launch_s

    best = {d: max(s.flops / s.time_s for s in samples if s.dtype == d) for d in dtypes}
    found = _fitted(law, times_s, np.array([*(1.0 / best[d] for d in dtypes), 0.1]))
    _require_effect(law, found, times_s, [f"rate of {d} matmuls" for d in dtypes])
    rates = {d: float(1.0 / value) for d, value in zip(dtypes, found[:-1], strict=True)}
    ratio = round(float(found[-1]), 6)
    return ProductFit(rates, best, ratio, _residuals(samples, law(found)))


def fit_link(samples: Sequence[TransferSample]) -> LinkFit:
    """Latency and seconds per byte of a link, from all collectives and messages over it."""
    times_s = _times_s(samples)

    timed = {s.kind for s in samples}
    # Only beside other kinds: alone, a ratio cannot be told from latency and bandwidth.
    kinds = [k for k in MEASURED_RATIOS if k in timed] if timed - set(MEASURED_RATIOS) else []

    def link_of(constants: Array) -> Link:
        latency_s, s_per_byte, *ratios = map(float, constants)
        return Link(latency_s, s_per_byte, ratios=tuple(zip(kinds, ratios, strict=True)))

    def law(constants: Array) -> Array:
        link = link_of(constants)
        return np.array([_transfer_s(sample, link) for sample in samples])

    largest = max(samples, key=lambda s: s.size_bytes)
    start = [times_s.min() / 2, largest.time_s / largest.size_bytes, *(1.0 for _ in kinds)]
    found = _fitted(law, times_s, np.array(start))
    _require_effect(law, found, times_s, ("latency of a link", "bandwidth of a link"))
    return LinkFit(link_of(found), _residuals(samples, law(found)))


def fit_steps(samples: Sequence[StepSample]) -> StepFit:
    """The ratios of work, launches and collectives in steps to the same alone; 1 for a ratio that
    no step determines."""
    times_s = _times_s(samples)
    parts_s = np.column_stack([_column(samples, f"{p}_s") for p in ("work", "launch", "transfer")])

    def law(ratios: Array) -> Array:
        return parts_s @ ratios

    def with_prior(ratios: Array) -> Array:
        return np.append(law(ratios), ratios**_TOWARDS_ONE)

    found = _fitted(with_prior, np.append(times_s, np.ones(3)), np.ones(3))
    work, launch, transfer = map(float, found)
    return StepFit(work, launch, transfer, _residuals(samples, law(found)))


def median_error(residuals: Sequence[Residual]) -> float:
    """The median of |error|."""
    return float(np.median([abs(r.error) for r in residuals]))


def _transfer_s(sample: TransferSample, link: Link) -> float:
    group = flat_group(sample.n_ranks, link)
    return sample.turns * collective_time_s(sample.kind, sample.size_bytes, group)


def _fitted(law: Law, times_s: Array, start: Array) -> Array:
    """The positive constants that minimise squared log errors."""
    logs = np.log(start)
    fitted = least_squares(
        lambda logs: np.log(law(np.exp(logs)) / times_s), logs,
        bounds=(logs - _FARTHEST, logs + _FARTHEST), xtol=1e-12, ftol=1e-14, gtol=1e-14,
    )  # fmt: skip
    return np.exp(fitted.x)


def _require_effect(law: Law, found: Array, times_s: Array, names: Sequence[str]) -> None:
    """Raise if a constant might as well be zero, that is, a rate or bandwidth infinite."""
    for i, name in enumerate(names):
        without = law(np.where(np.arange(len(found)) == i, 0.0, found))
        if not np.any(np.abs(law(found) - without) > _MATTERS * times_s):
            raise CalibrationError(
                f"no {name} fits what was measured: times do not grow with the work",
                hint="something else kept the machine busy; calibrate again when it is idle",
            )


def _times_s(samples: Sequence[Sample]) -> Array:
    return np.array([s.time_s for s in samples])


def _column(samples: Sequence[Sample], name: str) -> Array:
    return np.array([float(getattr(s, name)) for s in samples])


def _residuals(samples: Sequence[Sample], fitted_s: Array) -> tuple[Residual, ...]:
    return tuple(
        Residual(s.name, s.size, s.time_s, float(f)) for s, f in zip(samples, fitted_s, strict=True)
    )
