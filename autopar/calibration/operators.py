"""The operators that are timed, and what the planner charges for them.

    matmul    the three matmuls of a linear layer and its backward. Each has 2mnk FLOPs and touches
              mk + kn + mn elements. They run without autograd: its time is in the small operators
    memory    forward alone is one operator, charged its inputs and outputs. Forward and backward
              are two operators; the backward is charged 1.5 times the bytes
              (`passes/intra/member_prices.py`). With 1 row, the time is the cost of an operator as
              such. Four run in a chain, as in a model: autograd starts once for many operators
    attention causal, as fused as the device has it; GPUs only

Tensors come from a ring that is larger than the caches, like the tensors of a model's layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial

import torch
from torch import Tensor
from torch.nn import functional as F

from autopar.calibration.samples import OperatorSample, SampleGrid
from autopar.calibration.timing import TimedCall, issue_time_s, medians_s
from autopar.units import format_bytes

Operator = Callable[[Tensor, Tensor], Tensor]

_CHAIN = 4
_RING_BYTES = {"cpu": 48 << 20, "cuda": 128 << 20}
_MOST_COPIES = 64
_BACKWARD_BYTES = 1.5
_HEADS, _HEAD_DIM, _LENGTH = 16, 128, 4096


def _layer_norm(x: Tensor, y: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:])


# Name -> the operator, and how many tensors of the size of x it touches.
MEMORY: dict[str, tuple[Operator, int]] = {
    "add": (torch.add, 3),
    "mul": (torch.mul, 3),
    "gelu": (lambda x, y: F.gelu(x), 2),
    "layer_norm": (_layer_norm, 2),
    "softmax": (lambda x, y: F.softmax(x, -1), 2),
}


@dataclass(frozen=True)
class Timed:
    """A timed call, and its sample without the time."""

    case: TimedCall
    sample: OperatorSample


def operator_samples(grid: SampleGrid, device: torch.device) -> list[OperatorSample]:
    """Matmuls, memory-bound and small operators, while all ranks do the same."""
    return _measured([*products(grid, device), *memory_operators(grid, device)], grid, device)


def turn_samples(grid: SampleGrid, device: torch.device) -> list[OperatorSample]:
    """A few of the same operators, to measure how ranks share cores."""
    few = replace(grid, product_shapes=grid.product_shapes[:2], memory_rows=grid.memory_rows[1:2])
    floats = [t for t in products(few, device) if t.sample.dtype == "float32"]
    return _measured([*floats, *memory_operators(few, device)], grid, device)


def attention_samples(grid: SampleGrid, device: torch.device) -> list[OperatorSample]:
    """Forward, then forward and backward, of causal attention in bfloat16."""
    return _measured(list(_attention(device)), grid, device)


def issue_samples(grid: SampleGrid, device: torch.device) -> list[OperatorSample]:
    """Small operators again, timed by the interpreter's clock."""
    found = []
    for timed in memory_operators(replace(grid, memory_rows=(1,)), device):
        time_s = issue_time_s(timed.case.run, device)
        found.append(replace(timed.sample, time_s=time_s))
    return found


def products(grid: SampleGrid, device: torch.device) -> Iterator[Timed]:
    for dtype, most_flops in grid.most_flops:
        for m, n, k in grid.product_shapes:
            flops = 2.0 * m * n * k
            if flops > most_flops:
                continue
            kind = getattr(torch, dtype)
            touched_bytes = (m * k + n * k + m * n) * kind.itemsize
            x, w = _ring((m, k), kind, device), _ring((n, k), kind, device)
            size = f"{m} x {n} x {k}"
            sample = OperatorSample(
                f"{dtype} matmul", size, dtype, 3 * flops, 3.0 * touched_bytes, 3, 0.0
            )
            yield Timed(TimedCall(partial(_products, x, w)), sample)


def _products(x: list[Tensor], w: list[Tensor], i: int) -> None:
    """The matmuls of a linear layer: its output, and the gradients of x and w."""
    a, b = _pair(x, w, i)
    out = a @ b.T
    out @ b
    out.T @ a


def memory_operators(grid: SampleGrid, device: torch.device) -> Iterator[Timed]:
    for name, (operator, n_touched) in MEMORY.items():
        for rows in grid.memory_rows:
            x = _ring((rows, grid.width), torch.float32, device)
            size, moved = format_bytes(x[0].nbytes), float(_CHAIN * n_touched * x[0].nbytes)
            repeated = partial(_chain, operator)
            sample = OperatorSample(name, size, "", 0.0, moved, _CHAIN, 0.0)
            yield Timed(TimedCall(partial(_forward, repeated, x, x)), sample)
            both = replace(
                sample, name=f"{name} and backward", n_operators=2 * _CHAIN,
                size_bytes=(1 + _BACKWARD_BYTES) * moved,
            )  # fmt: skip
            yield Timed(TimedCall(partial(_differentiated, repeated, x, x)), both)


def _chain(operator: Operator, x: Tensor, y: Tensor) -> Tensor:
    for _ in range(_CHAIN):
        x = operator(x, y)
    return x


def _attention(device: torch.device) -> Iterator[Timed]:
    shape = (1, _HEADS, _LENGTH, _HEAD_DIM)
    x = _ring(shape, torch.bfloat16, device)
    # Two matmuls over all pairs of query and key; half of the pairs are masked and not computed.
    flops = 2.0 * 2 * _HEADS * _LENGTH**2 * _HEAD_DIM / 2

    def attend(q: Tensor, kv: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, kv, kv, is_causal=True)

    for name, run, n, work in (
        ("attention", _forward, 1, flops),
        ("attention and backward", _differentiated, 2, 3.5 * flops),
    ):
        sample = OperatorSample(name, str(shape), "bfloat16", work, 0.0, n, 0.0)
        yield Timed(TimedCall(partial(run, attend, x, x)), sample)


def _measured(timed: list[Timed], grid: SampleGrid, device: torch.device) -> list[OperatorSample]:
    cases = [t.case for t in timed]
    times_s = medians_s(cases, device, grid.sample_s, grid.n_rounds)
    return [replace(t.sample, time_s=s) for t, s in zip(timed, times_s, strict=True)]


@cache
def _ring(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Tensors of one shape, shared by all callers."""
    first = torch.randn(shape, device=device).to(dtype)
    n_copies = max(2, min(_MOST_COPIES, _RING_BYTES[device.type] // first.nbytes))
    return [first, *(first.clone() for _ in range(n_copies - 1))]


def _pair(x: list[Tensor], y: list[Tensor], i: int) -> tuple[Tensor, Tensor]:
    """Two different tensors, even if both rings are the same."""
    return x[i % len(x)], y[(i + 1) % len(y)]


def _forward(operator: Operator, x: list[Tensor], y: list[Tensor], i: int) -> None:
    """One forward, recorded by autograd as in training."""
    a, b = (tensor.detach().requires_grad_() for tensor in _pair(x, y, i))
    operator(a, b)


def _differentiated(operator: Operator, x: list[Tensor], y: list[Tensor], i: int) -> None:
    a, b = (tensor.detach().requires_grad_() for tensor in _pair(x, y, i))
    out = operator(a, b)
    torch.autograd.grad(out, (a, b), out.detach(), allow_unused=True)
