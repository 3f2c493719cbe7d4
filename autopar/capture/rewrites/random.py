"""Random operators of the traced graph, written with `UNIFORM` and `DROPOUT`.

These two are in `operators/random.py`. Below, u and v are uniform in [0, 1) (`uniform`).

    dropout                x / (1 - p) where kept; `dropout2d` drops whole channels: the dims
                           they span have positions of length 1
    rand, rand_like,       u, a + (b - a) u, floor of it, u < p
    uniform_, randint,
    bernoulli
    randn, normal_         sqrt(-2 log(1 - u)) cos(2 pi v)                     (Box, Muller 1958)
    exponential_           -log(1 - u) / lambda
    randperm               the order that sorts u
    alpha_dropout          a x m + a alpha (m - 1 + p), m = u < 1 - p        (Klambauer et al. 2017)
    rrelu                  x or, where negative, x (a + (b - a) u)

Every random operator gets a number, its `occurrence`, in the order of the trace, so that no two
draw the same bits. Seed and positions are placeholders of the program. The runtime supplies one
seed per step. Positions are constants, which are sharded and microbatched like any other.

There is one position constant per operator and dim, because one operator may need it split by
rows of the batch and another needs it whole. All constants of one length share one function
(`positions_of`), so the runtime makes and delivers them once.

Other random operators are unchanged and have no rule.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from autopar.capture.builder import Builder, TracedCall
from autopar.operators import DROPOUT, UNIFORM

aten = torch.ops.aten
Rewrite = Callable[[Builder, TracedCall], fx.Node | None]
Drop = Callable[[Builder, fx.Node, float, Sequence[int]], fx.Node]


@functools.cache
def positions_of(size: int) -> Callable[[], torch.Tensor]:
    """The function that returns 0, 1, ..., size - 1; one function per size."""
    return functools.cache(functools.partial(torch.arange, size))


def places(b: Builder, shape: Sequence[int]) -> list[fx.Node]:
    """The positions along each dim of a tensor."""
    return [b.constant("position", positions_of(n)) for n in shape]


def uniform(b: Builder, shape: Sequence[int], dtype: torch.dtype) -> fx.Node:
    """A new draw of uniform numbers in [0, 1)."""
    drawn = b.op(UNIFORM, b.seed(), places(b, shape or (1,)), b.next_occurrence(), dtype)
    return drawn if shape else b.op(aten.reshape.default, drawn, [])


def _logarithm(b: Builder, shape: Sequence[int], dtype: torch.dtype) -> fx.Node:
    """log(1 - u); 1 - u is in (0, 1], so the logarithm is finite."""
    upper = b.op(aten.rsub.Scalar, uniform(b, shape, dtype), 1)
    return b.op(aten.log.default, upper)


def _normal(b: Builder, shape: Sequence[int], dtype: torch.dtype) -> fx.Node:
    log = _logarithm(b, shape, dtype)
    radius = b.op(aten.sqrt.default, b.op(aten.mul.Tensor, log, -2.0))
    angle = b.op(aten.mul.Tensor, uniform(b, shape, dtype), 2 * math.pi)
    return b.op(aten.mul.Tensor, radius, b.op(aten.cos.default, angle))


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which functions of uniform numbers are computed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _linear(b: Builder, node: fx.Node, factor: Any, summand: Any) -> fx.Node:
    """factor * node + summand; either may be a number or a tensor."""
    if not (isinstance(factor, float) and factor == 1):
        node = b.op(aten.mul.Tensor, node, factor)
    if not (isinstance(summand, float) and summand == 0):
        node = b.op(aten.add.Tensor, node, summand)
    return node


def _dropout(drop: Drop, *, whole_channels: bool) -> Rewrite:
    """The rewrite of a dropout; with `whole_channels`, one draw per index of the first two dims."""

    def rewrite(b: Builder, call: TracedCall) -> fx.Node | None:
        bound = call.bind()
        source, p = call.args[0], bound["p"]
        if not bound["train"] or p == 0:
            return source
        shape = source.meta["val"].shape
        drawn = [n if k < 2 else 1 for k, n in enumerate(shape)] if whole_channels else shape
        return drop(b, source, p, drawn)

    return rewrite


def dropped(b: Builder, source: fx.Node, p: float, drawn: Sequence[int]) -> fx.Node:
    """Dropout with one draw per element of a tensor of shape `drawn`."""
    if p == 1:
        return b.op(aten.mul.Tensor, source, 0)
    return b.op(DROPOUT, source, b.seed(), places(b, drawn), p, b.next_occurrence())


def alpha_dropped(b: Builder, source: fx.Node, p: float, drawn: Sequence[int]) -> fx.Node:
    """Dropout that keeps the mean and variance of SELU's outputs; `alpha` is torch's constant."""
    if p == 1:
        return b.op(aten.mul.Tensor, source, 0)
    alpha = 1.7580993408473766
    a = 1 / math.sqrt((alpha * alpha * p + 1) * (1 - p))
    kept = _kept(b, drawn, 1 - p, source.meta["val"].dtype)
    scaled = b.op(aten.mul.Tensor, source, b.op(aten.mul.Tensor, kept, a))
    return b.op(aten.add.Tensor, scaled, _linear(b, kept, alpha * a, alpha * a * (p - 1)))


def _kept(b: Builder, shape: Sequence[int], probability: Any, dtype: torch.dtype) -> fx.Node:
    """1 with the given probability (a number or a tensor), else 0."""
    compare = aten.lt.Tensor if isinstance(probability, fx.Node) else aten.lt.Scalar
    return b.cast(b.op(compare, uniform(b, shape, _wide(dtype)), probability), dtype)


def bernoulli(b: Builder, call: TracedCall) -> fx.Node | None:
    """Draws with a tensor of probabilities, or with one number `p` in the shape of a tensor."""
    bound = call.bind()
    p = bound.get("p", call.args[0])
    return _kept(b, call.shape, 0.5 if p is None else p, call.dtype)


def rrelu(b: Builder, call: TracedCall) -> fx.Node | None:
    """A random negative slope per element; outside training the mean slope, as in torch."""
    bound, source = call.bind(), call.args[0]
    value = source.meta["val"]
    low, high = bound["lower"], bound["upper"]
    if not bound["training"]:
        return b.op(aten.leaky_relu.default, source, (low + high) / 2)
    slope = _linear(b, uniform(b, value.shape, value.dtype), float(high - low), float(low))
    negative = b.op(aten.mul.Tensor, source, slope)
    return b.op(aten.where.self, b.op(aten.ge.Scalar, source, 0), source, negative)


def rand(b: Builder, call: TracedCall) -> fx.Node | None:
    return uniform(b, call.shape, call.dtype)


def between(b: Builder, call: TracedCall) -> fx.Node | None:
    """`uniform_(a, b)`."""
    bound = call.bind()
    drawn = uniform(b, call.shape, call.dtype)
    return _linear(b, drawn, float(bound["to"] - bound["from"]), float(bound["from"]))


def gaussian(b: Builder, call: TracedCall) -> fx.Node | None:
    """`randn`, `normal_(mean, std)`, and `torch.normal` of tensors."""
    bound, dtype = call.bind(), call.dtype
    drawn = b.cast(_normal(b, call.shape, _wide(dtype)), dtype)
    return _linear(b, drawn, bound.get("std", 1.0), bound.get("mean", 0.0))


def exponential(b: Builder, call: TracedCall) -> fx.Node | None:
    bound, dtype = call.bind(), call.dtype
    log = _logarithm(b, call.shape, _wide(dtype))
    return b.cast(b.op(aten.mul.Tensor, log, -1 / bound["lambd"]), dtype)


def randint(b: Builder, call: TracedCall) -> fx.Node | None:
    bound = call.bind()
    low, high = bound.get("low", 0), bound["high"]
    if isinstance(high, fx.Node):
        return None
    scaled = b.op(aten.mul.Tensor, uniform(b, call.shape, torch.float64), high - low)
    whole = b.cast(b.op(aten.floor.default, scaled), call.dtype)
    return whole if low == 0 else b.op(aten.add.Tensor, whole, low)


def randperm(b: Builder, call: TracedCall) -> fx.Node | None:
    return b.getitem(b.op(aten.sort.default, uniform(b, call.shape, torch.float64)), 1)


RANDOM_REWRITES: dict[Any, Rewrite] = {
    aten.dropout: _dropout(dropped, whole_channels=False),
    aten.feature_dropout: _dropout(dropped, whole_channels=True),
    aten.alpha_dropout: _dropout(alpha_dropped, whole_channels=False),
    aten.feature_alpha_dropout: _dropout(alpha_dropped, whole_channels=True),
    aten.bernoulli: bernoulli,
    aten.rrelu: rrelu,
    aten.rand: rand,
    aten.rand_like: rand,
    aten.randn: gaussian,
    aten.randn_like: gaussian,
    aten.uniform: between,
    aten.normal: gaussian,
    aten.normal_functional: gaussian,
    aten.exponential: exponential,
    aten.randint: randint,
    aten.randint_like: randint,
    aten.randperm: randperm,
}
