"""Connectionist temporal classification: one loss per row (Graves et al., ICML 2006).

    losses[n] = -log Σ_{paths of targets[n]} Π_t exp(log_probs[t, n, path_t])

with log_probs [t, n, c], targets [n, s] and the lengths of both [n]. Or targets are a list, row
after row, and `starts` [n] says where each row's begin, so that a rank may hold any of the rows.

torch's `ctc_loss` cannot be traced: besides losses its kernel returns the path sums, whose size
depends on the lengths. Here backward computes them again.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def _own_targets(targets: Tensor, lengths: Tensor, starts: Tensor | None) -> Tensor:
    """The targets of the rows at hand."""
    if starts is None:
        return targets
    offsets = lengths.cumsum(0) - lengths
    places = torch.arange(int(lengths.sum()), device=targets.device)
    return targets[places + (starts - offsets).repeat_interleave(lengths)]


@torch.library.custom_op("autopar::ctc_loss", mutates_args=())
def ctc_loss(
    log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor,
    starts: Tensor | None = None, blank: int = 0, zero_infinity: bool = False,
) -> Tensor:  # fmt: skip
    """t n c, n s, n, n -> n; with `zero_infinity`, 0 for a row that no path fits."""
    own = _own_targets(targets, target_lengths, starts)
    lengths = (input_lengths, target_lengths)
    losses: Tensor = aten._ctc_loss.Tensor(log_probs, own, *lengths, blank, zero_infinity)[0]
    return losses.masked_fill(losses == math.inf, 0) if zero_infinity else losses.clone()


@torch.library.custom_op("autopar::ctc_loss_backward", mutates_args=())
def ctc_loss_backward(
    gradient: Tensor, log_probs: Tensor, targets: Tensor, input_lengths: Tensor,
    target_lengths: Tensor, starts: Tensor | None, blank: int, zero_infinity: bool,
) -> Tensor:  # fmt: skip
    """The gradient of the log-probabilities: n, t n c -> t n c."""
    own = _own_targets(targets, target_lengths, starts)
    call = (log_probs, own, input_lengths, target_lengths)
    losses, path_sums = aten._ctc_loss.Tensor(*call, blank, zero_infinity)
    found: Tensor = aten._ctc_loss_backward.Tensor(
        gradient.contiguous(), *call, losses, path_sums, blank, zero_infinity
    )
    return found


@ctc_loss.register_fake
def _(log_probs: Tensor, *args: Any) -> Tensor:
    return log_probs.new_empty(log_probs.shape[1])


@ctc_loss_backward.register_fake
def _(gradient: Tensor, log_probs: Tensor, *args: Any) -> Tensor:
    return torch.empty_like(log_probs)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.blank, ctx.zero_infinity = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    options = (ctx.blank, ctx.zero_infinity)
    found = torch.ops.autopar.ctc_loss_backward(gradient, *ctx.saved_tensors, *options)
    return found, None, None, None, None, None, None


ctc_loss.register_autograd(_backward, setup_context=_keep)
