"""Mean losses as a sum and a divisor, so that they can be sharded and microbatched.

    mean over elements     sum / n                       n is a Python number
    cross-entropy, nll     sum / count(labels != ignore) the count moves to the prologue
    class weights          sum / sum(weight[label])      so does this sum, unless it reads a buffer
    class probabilities    sum / rows

The count depends on inputs only, so the prologue computes it once for the whole global batch.
Thus the mean is exact over ranks and microbatches, even if ignored labels are spread unevenly.
If all labels are ignored, the result is 0 / 0 = nan, as in torch.

Half precision. torch's kernels round differently: on CUDA a mean rounds once, on the CPU the sum
and the count round too. The form here is that of the CPU, so with one microbatch on one rank the
loss is eager's bit by bit there. With more parts, or on CUDA, let u = 2^-8 for bfloat16 (2^-11 for
float16), and s the exact sum of the losses of rows as torch rounds them:

    a part's sum        each addition inside the kernel rounds: at most k u, k the longest chain of
                        additions; k = 1 on CUDA, at most 16 per level of 16 rows on the CPU
    count, quotient     at most u each
    sum over parts      microbatches add up in float32 (`runtime/execute/executor.py`), and the
                        result rounds once: u; ranks add up in the loss's own dtype: u each

So |loss - s / count| <= (k + 3 + ranks) u |loss| to first order, as losses are not negative. The
gradient of a row does not depend on the sums. A model that casts its logits to float32 first, as
those of transformers do, has none of this.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from autopar.capture.builder import Builder, TracedCall
from autopar.precision import working_dtype

aten = torch.ops.aten
NONE, MEAN, SUM = 0, 1, 2  # torch's at::Reduction


def sum_of(b: Builder, x: fx.Node, dims: list[int] | None, keepdim: bool = False) -> fx.Node:
    if dims is None:
        return b.op(aten.sum.default, x)
    return b.op(aten.sum.dim_IntList, x, dims, keepdim)


def mean_of(
    b: Builder,
    x: fx.Node,
    dims: list[int] | None,
    keepdim: bool,
    count: int,
    dtype: torch.dtype | None = None,
) -> fx.Node:
    """`sum / count`; half precision is summed in float32, as in torch's mean."""
    wanted = dtype if dtype is not None else x.meta["val"].dtype
    working = working_dtype(wanted)
    total = sum_of(b, b.cast(x, working), dims, keepdim)
    return b.cast(b.op(aten.div.Tensor, total, count), wanted)


def elementwise(values: Callable[[Builder, dict[str, Any]], fx.Node]) -> Any:
    """The rewrite of a loss with elements `values`, reduced by its argument `reduction`."""

    def rewrite(b: Builder, call: TracedCall) -> fx.Node | None:
        bound = call.bind()
        x = values(b, bound)
        if bound["reduction"] == NONE:
            return x
        if bound["reduction"] == SUM:
            return sum_of(b, x, None)
        return mean_of(b, x, None, False, math.prod(x.meta["val"].shape))

    return rewrite


def squared_difference(b: Builder, bound: dict[str, Any]) -> fx.Node:
    difference = b.op(aten.sub.Tensor, bound["self"], bound["target"])
    return b.op(aten.pow.Tensor_Scalar, difference, 2)


def absolute_difference(b: Builder, bound: dict[str, Any]) -> fx.Node:
    return b.op(aten.abs.default, b.op(aten.sub.Tensor, bound["self"], bound["target"]))


def with_sum(b: Builder, call: TracedCall, bound: dict[str, Any]) -> fx.Node:
    """The same loss with `reduction="sum"`."""
    changed = bound | {"reduction": SUM}
    arguments = call.target._schema.arguments
    args = tuple(changed[a.name] for a in arguments if not a.kwarg_only)
    kwargs = {a.name: changed[a.name] for a in arguments if a.kwarg_only}
    return b.emit(call.target, args, kwargs)


def fused_elementwise(b: Builder, call: TracedCall) -> fx.Node | None:
    """Keep the loss whole, but turn a mean into a sum divided by the element count."""
    bound = call.bind()
    if bound["reduction"] != MEAN:
        return None
    shapes = [bound[name].meta["val"].shape for name in ("self", "target")]
    count = math.prod(torch.broadcast_shapes(*shapes))
    return b.op(aten.div.Tensor, with_sum(b, call, bound), count)


def row_mean(b: Builder, call: TracedCall) -> fx.Node | tuple[fx.Node, ...] | None:
    """Margin losses: the sum divided by the number of rows."""
    bound = call.bind()
    if bound["reduction"] != MEAN:
        return None
    shape = bound["self"].meta["val"].shape
    n_rows = shape[0] if len(shape) == 2 else 1
    total = with_sum(b, call, bound)
    if call.target is not aten.multilabel_margin_loss_forward.default:
        return b.op(aten.div.Tensor, total, n_rows)
    return b.op(aten.div.Tensor, b.getitem(total, 0), n_rows), b.getitem(total, 1)


def label_mean(b: Builder, call: TracedCall) -> fx.Node | None:
    """Cross-entropy and nll: the sum divided by the class weights of the labels not ignored."""
    bound = call.bind()
    labels, weight = bound["target"], bound["weight"]
    if labels.meta["val"].is_floating_point():
        return probability_loss(b, bound)
    if bound["reduction"] != MEAN:
        return None
    total = with_sum(b, call, bound)
    counted = b.op(aten.ne.Scalar, labels, bound["ignore_index"])
    if weight is not None:
        known = b.op(aten.where.ScalarOther, counted, labels, 0)
        counted = b.op(aten.mul.Tensor, b.op(aten.index.Tensor, weight, [known]), counted)
    count = b.cast(b.op(aten.sum.default, counted), total.meta["val"].dtype)
    b.divisors.add(count)
    return b.op(aten.div.Tensor, total, count)


def probability_loss(b: Builder, bound: dict[str, Any]) -> fx.Node:
    """Cross-entropy against class probabilities; its mean is over rows."""
    scores, target, smoothing = bound["self"], bound["target"], bound["label_smoothing"]
    shape = tuple(scores.meta["val"].shape)
    dim = min(len(shape) - 1, 1)
    values = b.op(aten.log_softmax.int, scores, dim)
    if smoothing > 0:
        kept = b.op(aten.mul.Tensor, target, 1 - smoothing)
        target = b.op(aten.add.Scalar, kept, smoothing / shape[dim])
    values = b.op(aten.neg.default, b.op(aten.mul.Tensor, values, target))
    if bound["weight"] is not None:
        per_class = [n if i == dim else 1 for i, n in enumerate(shape)]
        weight = b.op(aten.reshape.default, bound["weight"], per_class)
        values = b.op(aten.mul.Tensor, values, weight)
    if bound["reduction"] == NONE:
        return sum_of(b, values, [dim])
    total = sum_of(b, values, None)
    if bound["reduction"] == SUM:
        return total
    return b.op(aten.div.Tensor, total, math.prod(shape) // shape[dim])


LOSS_REWRITES: dict[Any, Callable[[Builder, TracedCall], fx.Node | tuple[fx.Node, ...] | None]] = {
    aten.multi_margin_loss: row_mean,
    aten.multilabel_margin_loss_forward: row_mean,
    aten.mse_loss: elementwise(squared_difference),
    aten.l1_loss: elementwise(absolute_difference),
    aten.smooth_l1_loss: fused_elementwise,
    aten.soft_margin_loss: fused_elementwise,
    aten.huber_loss: fused_elementwise,
    aten.binary_cross_entropy: fused_elementwise,
    aten.binary_cross_entropy_with_logits: fused_elementwise,
    aten.kl_div: fused_elementwise,
    aten.cross_entropy_loss: label_mean,
    aten.nll_loss: label_mean,
    aten.nll_loss_nd: label_mean,
}
