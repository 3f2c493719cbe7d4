"""Activations between the two matmuls of an expert: of a gate, times a factor where it is gated.

features = act(gate) * factor(up)

silu, gelu, gelu_tanh, relu      factor(up) = up
clamped_swiglu ALPHA LIMIT       act(gate) = c sigmoid(ALPHA c) with c = min(gate, LIMIT);
                                 factor(up) = 1 + min(max(up, -LIMIT), LIMIT)    (gpt-oss)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch import Tensor
from torch.nn import functional as F

aten = torch.ops.aten
CLAMPED = "clamped_swiglu"


def _itself(up: Tensor) -> Tensor:
    return up


@dataclass(frozen=True)
class Activation:
    """`act` with its derivative, of (gradient, gate); `factor`, and where its derivative is 0, not
    1, if anywhere."""

    act: Callable[[Tensor], Tensor]
    differentiate: Callable[[Tensor, Tensor], Tensor]
    factor: Callable[[Tensor], Tensor] = _itself
    is_flat: Callable[[Tensor], Tensor] | None = None

    @property
    def has_factor(self) -> bool:
        """Is the factor another tensor than `up`?"""
        return self.factor is not _itself


_PLAIN: Mapping[str, Activation] = {
    "silu": Activation(F.silu, aten.silu_backward),
    "gelu": Activation(F.gelu, aten.gelu_backward),
    "gelu_tanh": Activation(
        partial(F.gelu, approximate="tanh"), partial(aten.gelu_backward, approximate="tanh")
    ),
    "relu": Activation(F.relu, lambda gradient, x: aten.threshold_backward(gradient, x, 0)),
}


@lru_cache
def activation_of(text: str) -> Activation:
    """`silu`, or `clamped_swiglu 1.702 7.0`."""
    name, *numbers = text.split()
    if name != CLAMPED:
        return _PLAIN[text]
    alpha, limit = map(float, numbers)

    def act(gate: Tensor) -> Tensor:  # c sigmoid(alpha c) = silu(alpha c) / alpha
        return F.silu(gate.clamp(max=limit).mul_(alpha), inplace=True).div_(alpha)

    def differentiate(gradient: Tensor, gate: Tensor) -> Tensor:
        found: Tensor = aten.silu_backward(gradient, gate.clamp(max=limit).mul_(alpha))
        return found.masked_fill_(gate > limit, 0)

    return Activation(
        act,
        differentiate,
        lambda up: up.clamp(-limit, limit).add_(1),
        lambda up: (up < -limit) | (up > limit),
    )
