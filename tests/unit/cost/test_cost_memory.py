"""Static memory against real optimizers and published figures; operator and update times."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from autopar.cost.hardware import flops_per_s, resolve
from autopar.cost.laws import op_time_s
from autopar.cost.memory import optimizer_time_s, static_bytes_per_param
from autopar.cost.memory.state import OPTIMIZERS, POLICIES
from autopar.errors import NotSupportedError, OptionError
from autopar.mesh import Device, Mesh

DEVICE = Device(flops_per_s=1e12, bytes_per_s=1e11, memory_bytes=1e10, launch_s=5e-6)
CLASSES: dict[str, Any] = {
    "fused-adamw": partial(torch.optim.AdamW, fused=True),
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
    "adafactor": torch.optim.Adafactor,
}


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(24,), (16, 8), (3, 16, 8)])
def test_optimizer_state_is_what_torch_allocates(
    name: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    parameter = torch.nn.Parameter(torch.ones(shape, dtype=dtype))
    parameter.grad = torch.ones_like(parameter)
    optimizer = CLASSES[name]([parameter])
    optimizer.step()
    state = [v for k, v in optimizer.state[parameter].items() if k != "step" and v is not None]
    static = static_bytes_per_param(name, dtype, shape=shape)
    assert static.optimizer_bytes * parameter.numel() == pytest.approx(
        sum(v.numel() * v.element_size() for v in state), rel=1e-12
    )
    assert static.parameter_bytes == static.gradient_bytes == dtype.itemsize
    # Without the shape the answer is an upper bound.
    assert static_bytes_per_param(name, dtype).total_bytes >= static.total_bytes


@pytest.mark.parametrize("n_ranks", [1, 8, 64])
def test_bf16_rows_of_the_zero_paper(n_ranks: int) -> None:
    static = static_bytes_per_param("adamw", torch.bfloat16, "bf16-mixed")
    rows = [16, 4 + 12 / n_ranks, 2 + 14 / n_ranks, 16 / n_ranks]
    assert [static.under_zero(stage, n_ranks) for stage in range(4)] == pytest.approx(rows)
    wide = static_bytes_per_param("adamw", torch.bfloat16, "bf16-mixed-fp32-gradients")
    assert (wide.total_bytes, wide.under_zero(1, 8)) == (18, 6 + 12 / 8)


def test_other_policies() -> None:
    assert static_bytes_per_param("adamw", torch.float32).total_bytes == 16
    assert static_bytes_per_param("adamw", torch.float32, "fp64").total_bytes == 32
    assert static_bytes_per_param("sgd", torch.float32).total_bytes == 8
    assert static_bytes_per_param("sgd", torch.bfloat16, "fp16-mixed").total_bytes == 8
    assert all(row.source for row in POLICIES.values())
    assert all(rule.source for rule in OPTIMIZERS.values())


def test_unknown_optimizer_policy_and_dtype_are_refused() -> None:
    with pytest.raises(OptionError, match="optimizer 'muon'"):
        static_bytes_per_param("muon", torch.float32)
    with pytest.raises(OptionError, match="precision policy 'int8'"):
        static_bytes_per_param("sgd", torch.float32, "int8")
    with pytest.raises(OptionError, match=r"torch\.int64 has no gradient"):
        optimizer_time_s(10, "sgd", torch.int64, DEVICE)


def test_update_time_counts_bytes_touched_and_operators() -> None:
    n_params, launch_s = 10**9, DEVICE.launch_s
    assert optimizer_time_s(n_params, "sgd", torch.float32, DEVICE) == pytest.approx(
        n_params * 3 * 4 / 1e11 + launch_s
    )
    # Gradient, master and two moments read, the last three written, the parameter written.
    megatrons = "fused-adamw", torch.bfloat16, DEVICE, "bf16-mixed-fp32-gradients"
    assert optimizer_time_s(n_params, *megatrons) == pytest.approx(n_params * 30 / 1e11 + launch_s)
    assert optimizer_time_s(n_params, "adamw", torch.float32, DEVICE, n_tensors=7) == pytest.approx(
        n_params * 20 * 4 / 1e11 + 7 * 8 * launch_s
    )
    # Master weights and moments have 4 bytes, the gradient 2; then the master is rounded.
    mixed_s = optimizer_time_s(n_params, "adamw", torch.bfloat16, DEVICE, "bf16-mixed")
    assert mixed_s == pytest.approx(n_params * (18 * 4 + 2 * 2 + 6) / 1e11 + 9 * launch_s)
    assert optimizer_time_s(0, "adamw", torch.float32, DEVICE, n_tensors=0) == 0.0


def test_operator_time_is_a_roofline_with_a_floor() -> None:
    assert op_time_s(2e12, 1.9e11, DEVICE) == pytest.approx(2 + 5e-6)
    assert op_time_s(2.9e12, 3e11, DEVICE) == pytest.approx(3 + 5e-6)
    assert op_time_s(0, 0, DEVICE) == 5e-6
    assert op_time_s(2e12, 1e3, DEVICE, torch.float64) == op_time_s(2e12, 1e3, DEVICE)


def test_operator_time_depends_on_the_dtype_of_a_profile() -> None:
    device = resolve(Mesh((1, 8), hardware="a100-80gb"), torch.bfloat16).device
    fast_s, slow_s = (op_time_s(1e12, 0, device, d) for d in (torch.bfloat16, torch.float64))
    assert fast_s == op_time_s(1e12, 0, device)
    assert fast_s - device.launch_s == pytest.approx(1e12 / flops_per_s(device, torch.bfloat16))
    assert slow_s - device.launch_s == pytest.approx(1e12 / flops_per_s(device, torch.float64))
    assert slow_s > 10 * fast_s
    assert op_time_s(0, 1e6, device, torch.int64) > device.launch_s
    with pytest.raises(NotSupportedError, match=r"no matmul rate for torch\.int64"):
        op_time_s(1, 1e6, device, torch.int64)
