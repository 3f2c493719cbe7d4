"""Errors that a user can act on.

Every message says what went wrong, the actual values, where (operator and the user's
`file:line`), and what to do. An `assert` is for bugs of autopar itself.
"""

from __future__ import annotations


class AutoparError(Exception):
    """Base of everything autopar raises on purpose.

    `where` names the operator or source line, `hint` says what to do. Each gets a line of its own
    below `what`.
    """

    def __init__(self, what: str, *, where: str | None = None, hint: str | None = None) -> None:
        lines = [what]
        if where:
            lines.append(f"  at {where}")
        if hint:
            lines.append(f"  hint: {hint}")
        super().__init__("\n".join(lines))
        self.what, self.where, self.hint = what, where, hint


class NotSupportedError(AutoparError):
    """A documented option or a model feature that this version does not support."""


class MeshError(AutoparError):
    """A mesh that is impossible, or does not match the running processes."""


class NotationError(AutoparError):
    """A malformed operator notation; the message underlines the fault."""


class CaptureError(AutoparError):
    """The model could not be traced into one graph."""


class MissingRuleError(AutoparError):
    """The graph has an operator that no sharding rule covers."""


class OptionError(AutoparError):
    """An option with a value that is not allowed, or that contradicts another."""


class BatchError(AutoparError):
    """A batch that cannot be divided, or is not like the one the plan was made for."""


class InfeasibleError(AutoparError):
    """No plan satisfies the constraints; the message says how much is missing.

    `least_bytes`: what the leanest plan needs per device, if memory is what is missing.
    """

    def __init__(
        self, what: str, *, where: str | None = None, hint: str | None = None,
        least_bytes: float | None = None,
    ) -> None:  # fmt: skip
        super().__init__(what, where=where, hint=hint)
        self.least_bytes = least_bytes


class PlanError(AutoparError):
    """A plan that is malformed, illegal, or made for another graph or mesh."""


class NotPlannedError(AutoparError):
    """A module without a plan was asked for something that needs one."""


class StateError(AutoparError):
    """Weights, a checkpoint or a state dict that is damaged, or does not fit what it is for."""


class VerificationError(AutoparError):
    """A generated program that breaks one of its invariants."""


class LaunchError(AutoparError):
    """A worker process failed; carries its rank and traceback."""


class DivergenceError(AutoparError):
    """Ranks that should hold the same values hold different ones."""


class NonFiniteError(AutoparError):
    """A loss and gradients that are NaN or infinite, before an optimizer uses them."""


class StepError(AutoparError):
    """A step of a pipeline after one that failed half-way."""


class StepTimeoutError(LaunchError):
    """A rank stayed in one call of a step for longer than `timeout_s`; says where every rank is."""


class AbsentRanksError(AutoparError):
    """A call that all ranks must make, and that some of them have not made."""


class CalibrationError(AutoparError):
    """Measurements that the cost model fits with no positive constants."""
