"""Canonical forms of convolutions, pools and circular padding.

bias           `conv(x, w, b)` = `conv(x, w) + b`, so that partial sums over input channels do
               not add the bias once per rank
global pools   an average over all spatial dims is a mean, that is, a sum that can be sharded
circular       `cat` of the end, the whole and the beginning, dim by dim. torch writes it as copies
               into slices of empty memory, whose derivative is not recorded
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from autopar.capture.builder import Builder, TracedCall
from autopar.capture.rewrites.losses import mean_of
from autopar.capture.rewrites.slices import cut

aten = torch.ops.aten


def convolution(b: Builder, call: TracedCall) -> fx.Node | None:
    bound = call.bind()
    bias, n_spatial = bound["bias"], len(bound["weight"].meta["val"].shape) - 2
    if bias is None:
        return None
    result = b.op(call.target, *(bound | {"bias": None}).values())
    channels = [bias.meta["val"].shape[0], *[1] * n_spatial]
    return b.op(aten.add.Tensor, result, b.op(aten.reshape.default, bias, channels))


def global_mean(b: Builder, call: TracedCall) -> fx.Node | None:
    bound = call.bind()
    source, size = bound["self"], bound["output_size"]
    if any(n != 1 for n in size):
        return None
    shape = source.meta["val"].shape
    dims = list(range(len(shape) - len(size), len(shape)))
    return mean_of(b, source, dims, True, math.prod(shape[d] for d in dims))


def circular_pad(b: Builder, call: TracedCall) -> fx.Node | None:
    """`pad` with mode "circular"; a negative amount crops before the rest wraps around."""
    bound = call.bind()
    if bound.get("mode", "circular") != "circular":
        return None
    x, amounts = bound["self"], bound["pad"]
    for i, (before, after) in enumerate(zip(amounts[::2], amounts[1::2], strict=True)):
        dim = len(x.meta["val"].shape) - 1 - i
        x = cut(b, x, dim, max(-before, 0), x.meta["val"].shape[dim] - max(-after, 0))
        size = x.meta["val"].shape[dim]
        head = [cut(b, x, dim, size - before, size)] if before > 0 else []
        tail = [cut(b, x, dim, 0, after)] if after > 0 else []
        if head or tail:
            x = b.op(aten.cat.default, [*head, x, *tail], dim)
    return x


IMAGE_REWRITES: dict[Any, Callable[[Builder, TracedCall], fx.Node | None]] = {
    aten.conv1d: convolution,
    aten.conv2d: convolution,
    aten.conv3d: convolution,
    aten.conv_transpose1d: convolution,
    aten.conv_transpose2d: convolution,
    aten.conv_transpose3d: convolution,
    aten.convolution: convolution,
    aten.pad: circular_pad,
    aten._pad_circular: circular_pad,
    aten.adaptive_avg_pool1d: global_mean,
    aten.adaptive_avg_pool2d: global_mean,
    aten.adaptive_avg_pool3d: global_mean,
}
