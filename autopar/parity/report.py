"""What `verify` found: errors by name, beside what is allowed.

Errors are max|a - b| / max(1, max|b|) (`relative_error`). Those of the captured program's gradients
have a smaller scale if all gradients are small (`captured.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from autopar.errors import VerificationError
from autopar.planning import Plan
from autopar.precision import widened


@dataclass(frozen=True)
class Report:
    """Errors of both comparisons, by name of a parameter or buffer; the loss is named `loss`.

    errors             of the sharded step, against the captured program on one process
    tolerance          for `errors`
    capture_errors     of the captured program in the model's own dtypes, against the user's module
    capture_tolerance  for `capture_errors`
    not_compared       why capture was not compared; None if it was. Then `ok` is False.
    lifted_errors      in mixed precision: of the same plan with every float as float64
    lifted_tolerance   for `lifted_errors`
    uncompiled_errors  with `compile`: of the same plan without; `errors` are of the compiled step
    """

    errors: Mapping[str, float]
    tolerance: float
    plan: Plan
    capture_errors: Mapping[str, float]
    capture_tolerance: float
    not_compared: str | None
    lifted_errors: Mapping[str, float] = field(default_factory=dict)
    lifted_tolerance: float = 0.0
    uncompiled_errors: Mapping[str, float] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Are sharding and capture right?"""
        return self.sharding_ok and self.capture_ok

    @property
    def sharding_ok(self) -> bool:
        """Is the sharded step that of the captured program on one process, compiled or not?"""
        lifted = (error <= self.lifted_tolerance for error in self.lifted_errors.values())
        both = (*self.errors.values(), *self.uncompiled_errors.values())
        return all(error <= self.tolerance for error in both) and all(lifted)

    @property
    def capture_ok(self) -> bool:
        """Is the captured program the user's module? False if that was not compared."""
        errors = self.capture_errors.values()
        return self.not_compared is None and all(e <= self.capture_tolerance for e in errors)

    @property
    def worst(self) -> float:
        """The worst error of sharding, compiled or not, and of capture."""
        every = self.errors, self.uncompiled_errors, self.capture_errors
        return _worst(tuple(error for errors in every for error in errors.values()))

    def text(self) -> str:
        """One line for each comparison, and one for each value that exceeds its tolerance."""
        what = "sharding, compiled" if self.uncompiled_errors else "sharding"
        lines = [*_lines(what, self.errors, self.tolerance)]
        if self.uncompiled_errors:
            lines += _lines("sharding, not compiled", self.uncompiled_errors, self.tolerance)
        if self.lifted_errors:
            lines += _lines("sharding in float64", self.lifted_errors, self.lifted_tolerance)
        if self.not_compared is not None:
            lines.append(f"capture: not compared: {self.not_compared}")
        else:
            lines += _lines("capture", self.capture_errors, self.capture_tolerance)
        return "\n".join(lines)

    def raise_if_wrong(self) -> None:
        """Raise `VerificationError` unless `ok`."""
        if not self.ok:
            raise VerificationError(self.text())


def relative_error(value: Tensor, wanted: Tensor, least_scale: float = 1.0) -> float:
    """max|a - b| / max(least_scale, max|b|); infinite for anything that is not finite."""
    if value.numel() == 0:
        return 0.0
    error = (widened(value) - widened(wanted)).abs().double().max().item()
    scale = max(least_scale, widened(wanted).abs().double().max().item())
    return error / scale if error == error else float("inf")


def _worst(errors: tuple[float, ...]) -> float:
    return max(errors, default=0.0)


def _lines(what: str, errors: Mapping[str, float], tolerance: float) -> Iterator[str]:
    wrong = {name: error for name, error in errors.items() if not error <= tolerance}
    yield (
        f"{what}: {'NOT equal' if wrong else 'equal'}, worst error "
        f"{_worst(tuple(errors.values())):.2e} of {len(errors)} values, tolerance {tolerance:.0e}"
    )
    for name in sorted(wrong, key=lambda name: -wrong[name]):
        yield f"  {name}: {wrong[name]:.2e}"
