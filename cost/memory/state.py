"""Bytes that every stored parameter costs, and the time of its update.

    static = parameter + gradient + master + moments          bytes per parameter
                                                              (`static_bytes_per_param`)
    under ZeRO over N ranks: stage 1 divides master and moments by N, stage 2 the gradient
    too, stage 3 everything (`StaticBytes.under_zero`; Rajbhandari et al., arXiv 1910.02054,
    section 5)

    update time = bytes touched / bytes_per_s + operators * launch_s      (`optimizer_time_s`)

Bytes touched are the sizes of all tensors that the update rule, not fused, reads and writes.

`policy="model"` is plain `torch.optim` on the model's own dtype: gradient and moments are as
wide as the parameter, and there is no master copy. The mixed-precision rows keep a float32
master and float32 moments beside 16-bit parameters. The `OPTIMIZERS` counts are those of
`torch.optim` with its default arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from autopar.cost.hardware import Software
from autopar.errors import OptionError
from autopar.mesh import Device

_ZERO = "S. Rajbhandari et al.: ZeRO, arXiv 1910.02054, section 3.1"
_MEGATRON = "Megatron-LM documentation, distributed optimizer: bf16 parameters, fp32 gradients, 18"


@dataclass(frozen=True)
class PolicyRow:
    """Widths in bytes of what a precision policy keeps for one parameter."""

    parameter_bytes: int
    gradient_bytes: int
    master_bytes: int
    moment_bytes: int
    source: str


POLICIES: dict[str, PolicyRow] = {
    "bf16-mixed": PolicyRow(2, 2, 4, 4, f"{_ZERO}: 2 + 2 + 12, in bf16 for fp16"),
    "fp16-mixed": PolicyRow(2, 2, 4, 4, f"{_ZERO}: 2 + 2 + 12"),
    "bf16-mixed-fp32-gradients": PolicyRow(2, 4, 4, 4, _MEGATRON),
    "fp64": PolicyRow(8, 8, 0, 8, "every float lifted to float64: 8 bytes each, no master copy"),
}


# Per parameter: clipping reads gradients for their norm, reads and writes them to scale them; then
# they are set to zero.
_BYTES_AROUND_UPDATE = 4 + 8 + 4


@dataclass(frozen=True)
class OptimizerRow:
    """What one step of an optimizer keeps and touches.

    moments           state tensors as large as the parameter
    parameter_passes  times the updated copy is read or written
    gradient_passes   times the gradient is read
    moment_passes     times a state tensor or a temporary is read or written
    operators         operators launched per parameter tensor
    temporaries       tensors that the update makes, each as large as the parameter
    """

    moments: int
    parameter_passes: int
    gradient_passes: int
    moment_passes: int
    operators: int
    temporaries: int
    source: str
    is_fused: bool = False  # the master is rounded into the parameter by the same operator


OPTIMIZERS: dict[str, OptimizerRow] = {
    # mul_ p | lerp_ m, g | mul_ v | addcmul_ v, g | sqrt v to t | div_, add_ t | addcdiv_ p, m, t
    "adamw": OptimizerRow(2, 4, 2, 14, 8, 1, "torch/optim/adam.py, _multi_tensor_adam"),
    "fused-adamw": OptimizerRow(
        2, 2, 1, 4, 1, 0, "one kernel reads and writes each tensor once (Apex, FusedAdam)", True
    ),
    "adam": OptimizerRow(2, 2, 2, 14, 7, 1, "the same without weight decay, Adam's default"),
    "sgd": OptimizerRow(0, 2, 1, 0, 1, 0, "torch/optim/sgd.py; momentum is 0 by default"),
    # norm p | norm g twice | row @ col to t | div_, clamp_, rsqrt_ t | mul_ t, g | norm t |
    # add_ p, t; the other operators work on rows and columns
    "adafactor": OptimizerRow(
        1, 3, 3, 11, 20, 1, "torch/optim/_adafactor.py, _single_tensor_adafactor"
    ),
}


@dataclass(frozen=True)
class StaticBytes:
    """Bytes per parameter that stay between steps; the gradient stays from backward to update.

    They may be fractions: Adafactor's factored moments are smaller than the parameter.
    """

    parameter_bytes: float
    gradient_bytes: float
    master_bytes: float
    moments_bytes: float
    source: str

    @property
    def optimizer_bytes(self) -> float:
        return self.master_bytes + self.moments_bytes

    @property
    def total_bytes(self) -> float:
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes

    def under_zero(self, stage: int, n_ranks: int) -> float:
        """Bytes per parameter on each of `n_ranks` ranks under ZeRO `stage` (0: none)."""
        assert stage in (0, 1, 2, 3) and n_ranks >= 1, (stage, n_ranks)
        parts = (self.optimizer_bytes, self.gradient_bytes, self.parameter_bytes)
        return sum(parts[:stage]) / n_ranks + sum(parts[stage:])


def static_bytes_per_param(
    optimizer: str,
    dtype: torch.dtype,
    policy: str = "model",
    shape: Sequence[int] | None = None,
) -> StaticBytes:
    """Bytes that one trained parameter of `dtype` occupies.

    Adafactor keeps one row and one column of second moments per matrix. That needs the `shape` of
    the tensor. Without it the result is an upper bound: a full moment, as a vector has.

    Raises:
        OptionError: unknown optimizer or policy, or a dtype that cannot be trained.
    """
    row, rule = _policy_row(policy, dtype), _optimizer_row(optimizer)
    share = float(rule.moments)
    if optimizer == "adafactor" and shape is not None and len(shape) > 1:
        share = 1 / shape[-1] + 1 / shape[-2]
    return StaticBytes(
        row.parameter_bytes,
        row.gradient_bytes,
        row.master_bytes,
        share * row.moment_bytes,
        f"{row.source}; {rule.source}",
    )


def optimizer_time_s(
    n_params_stored: float,
    optimizer: str,
    dtype: torch.dtype,
    device: Device,
    policy: str = "model",
    n_tensors: int = 1,
) -> float:
    """Seconds of one update of the `n_params_stored` parameters of a rank, in `n_tensors`."""
    assert n_params_stored >= 0 and n_tensors >= 0, (n_params_stored, n_tensors)
    row, rule = _policy_row(policy, dtype), _optimizer_row(optimizer)
    touched_bytes = (
        rule.parameter_passes * (row.master_bytes or row.parameter_bytes)
        + rule.gradient_passes * row.gradient_bytes
        + rule.moment_passes * row.moment_bytes
    )
    operators = rule.operators
    if row.master_bytes:  # the master is rounded into the parameter afterwards
        touched_bytes += row.parameter_bytes + (0 if rule.is_fused else row.master_bytes)
        operators += not rule.is_fused
    return n_params_stored * touched_bytes / device.bytes_per_s + (
        n_tensors * operators * device.launch_s
    )


def update_time_s(
    n_params_stored: float, optimizer: str, dtype: torch.dtype, device: Device, software: Software,
    policy: str = "model", n_tensors: int = 1,
) -> float:  # fmt: skip
    """Seconds of an update as a software runs it: in one kernel perhaps, after clipping."""
    fused = f"fused-{optimizer}"
    rule = fused if software.fused_optimizer and fused in OPTIMIZERS else optimizer
    around_bytes = n_params_stored * _BYTES_AROUND_UPDATE * software.clips_gradients
    time_s = optimizer_time_s(n_params_stored, rule, dtype, device, policy, n_tensors)
    return around_bytes / device.bytes_per_s + time_s


def _policy_row(policy: str, dtype: torch.dtype) -> PolicyRow:
    if not (dtype.is_floating_point or dtype.is_complex):
        raise OptionError(f"a parameter of {dtype} has no gradient and no optimizer state")
    if policy == "model":
        width = dtype.itemsize
        return PolicyRow(width, width, 0, width, "torch.optim keeps state like the parameter")
    if policy not in POLICIES:
        raise OptionError(
            f"unknown precision policy {policy!r}", hint=f"it is model, {', '.join(POLICIES)}"
        )
    return POLICIES[policy]


def _optimizer_row(optimizer: str) -> OptimizerRow:
    if optimizer not in OPTIMIZERS:
        raise OptionError(
            f"no memory and time model of optimizer {optimizer!r}",
            hint=f"there is one of {', '.join(OPTIMIZERS)}",
        )
    return OPTIMIZERS[optimizer]
