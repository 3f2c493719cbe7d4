"""Models with `torch.autograd.Function`s whose backward is not the derivative of their forward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

ROWS, WIDTH = 8, 8


class Reverse(torch.autograd.Function):
    """Gradient reversal (Ganin, Lempitsky: "Unsupervised domain adaptation by backpropagation")."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return -ctx.scale * grads[0], None


class Clipped(torch.autograd.Function):
    """Clips its gradient, so that parts of a gradient give another result than their sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, most: float) -> Tensor:
        ctx.most = most
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0].clamp(-ctx.most, ctx.most), None


class RoundStraight(torch.autograd.Function):
    """A straight-through estimator."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (4 * x).round() / 4

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


class Gated(torch.autograd.Function):
    """Several tensors in and out, one of them optional; `setup_context`; a non-tensor result."""

    @staticmethod
    def forward(
        x: Tensor, gate: Tensor, shift: Tensor | None = None, powers: tuple[int, ...] = (1, 2)
    ) -> Any:
        on = gate > 0
        out = x * on if shift is None else x * on + shift
        return sum(out**p for p in powers), None, on, x.abs().amax(-1)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, gate, shift, ctx.powers = inputs
        ctx.save_for_backward(x, gate)
        ctx.has_shift = shift is not None
        ctx.mark_non_differentiable(output[2], output[3])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, gate = ctx.saved_tensors
        wrong = grads[0] * torch.cos(x)  # not the derivative
        return wrong, 0.5 * grads[0] * gate, wrong.sum(0) if ctx.has_shift else None, None


reverse = Reverse.apply  # as a script keeps it


class WithFunctions(nn.Module):
    """Two layers before and after whatever `of` names."""

    def __init__(self, of: str) -> None:
        super().__init__()
        self.of = of
        self.up, self.mid, self.down = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.shift = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.down(self.inner(self.mid(self.up(x).tanh()))) - y).square().mean()

    def inner(self, h: Tensor) -> Tensor:
        if self.of == "reverse":
            return reverse(h, 0.5)
        if self.of == "clipped":
            return Clipped.apply(h, 1e-3)
        if self.of == "rounded":
            return RoundStraight.apply(h).relu()
        out, nothing, on, most = Gated.apply(h, h.sin(), self.shift)
        assert nothing is None
        plain, _, _, _ = Gated.apply(h, h.sin(), powers=(2,))
        return out * on + most.unsqueeze(-1) + plain


MODELS = ("reverse", "clipped", "rounded", "gated")
RULES = {
    Reverse: "... -> ...",
    Clipped: "... -> ...",
    RoundStraight: "... -> ...",
    Gated: "b w!, b w!, w! -> b w!, b w!, b",
}


def model(of: str) -> WithFunctions:
    torch.manual_seed(0)
    return WithFunctions(of).double()


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        name: torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64) for name in "xy"
    }


def gradients(module: nn.Module) -> dict[str, Tensor]:
    """Of one eager step; 0 for parameters that the loss does not depend on."""
    module.zero_grad()
    loss = module(**batch())
    loss.backward()
    found = {"loss": loss.detach()}
    for name, p in module.named_parameters():
        found[name] = torch.zeros_like(p) if p.grad is None else p.grad
    return found
