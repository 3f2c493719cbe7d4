"""Hypothesis strategies of calls of convolutions, pools, resizing and norms (`drawn_calls.py`)."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import assume
from hypothesis import strategies as st
from torch import Tensor

from tests.helpers.samples.drawn_calls import (
    MOST_ELEMENTS,
    Call,
    Shape,
    anew,
    real,
    shapes,
    sizes,
)
from tests.helpers.samples.rule_samples import call, fixed, positive, x

# Two numbers are 1 and -1 once normalised: what is left of their gradient is rounding.
FEWEST = 3
SPATIAL = st.sampled_from((1, 2, 3, 4, 6))


@st.composite
def images(draw: st.DrawFn, n_spatial: int) -> Shape:
    """[batch, channels, ...], now and then without the batch."""
    spatial = tuple(draw(SPATIAL) for _ in range(n_spatial))
    shape = (draw(sizes()), draw(sizes()), *spatial)[draw(st.sampled_from((0, 0, 1))) :]
    assume(math.prod(shape) <= 2 * MOST_ELEMENTS)
    return shape


def per_dim(n: int, least: int, most: int) -> st.SearchStrategy[list[int]]:
    """A number per dim, or one for all."""
    each = st.integers(least, most)
    return st.lists(each, min_size=n, max_size=n) | st.lists(each, min_size=1, max_size=1)


@st.composite
def convolutions(draw: st.DrawFn) -> Call:
    n, groups = draw(st.integers(1, 3)), draw(st.sampled_from((1, 1, 2, 4)))
    into, outof = draw(st.sampled_from((1, 2, 3, 4))), draw(st.sampled_from((1, 2, 3, 4)))
    batch = (draw(sizes()),) if draw(st.integers(0, 3)) else ()
    spatial = tuple(draw(SPATIAL) for _ in range(n))
    kernel = tuple(draw(st.integers(1, min(3, size))) for size in spatial)
    assume(math.prod(batch) * math.prod(spatial) * groups * into <= MOST_ELEMENTS)
    image = draw(real((*batch, groups * into, *spatial)))
    kind = draw(st.sampled_from(("plain", "tiles", "padding", "transposed")))
    if kind == "transposed":
        overload = "default" if n == 1 else "input"
        strides = draw(st.sampled_from(([2] * n, [1] * n, list(kernel))))
        paddings, weight = [(k - 1) // 2 for k in kernel], x(groups * into, outof, *kernel)
        dilations = draw(per_dim(n, 1, 2))
        return f"aten.conv_transpose{n}d.{overload}", call(
            image, weight, None, strides, paddings, [0], groups, dilations
        )
    weight = draw(real((groups * outof, into, *kernel)))
    if kind == "tiles":
        return f"aten.conv{n}d.default", call(image, weight, None, list(kernel), [0], [1], groups)
    if kind == "padding":
        return f"aten.conv{n}d.padding", call(
            image, weight, None, [1], draw(st.sampled_from(("same", "valid"))), [1], groups
        )
    strides, paddings = draw(per_dim(n, 1, 3)), draw(per_dim(n, 0, 2))
    return f"aten.conv{n}d.default", call(image, weight, None, strides, paddings, [1], groups)


@st.composite
def pools(draw: st.DrawFn) -> Call:
    n = draw(st.integers(1, 3))
    shape = draw(images(n))
    kernel = [draw(st.integers(1, min(3, size))) for size in shape[-n:]]
    kind = draw(st.sampled_from(("max", "avg", "indices", "adaptive", "tiles")))
    image = draw(real(shape))
    if kind == "adaptive":
        how, size = draw(st.sampled_from(("avg", "max"))), [draw(SPATIAL) for _ in range(n)]
        return f"aten.adaptive_{how}_pool{n}d.default", call(image, size)
    if kind == "tiles":
        how = draw(st.sampled_from(("avg", "max")))
        return f"aten.{how}_pool{n}d.default", call(image, kernel)
    stride = [draw(st.integers(1, 3)) for _ in kernel]
    padding = [draw(st.integers(0, k // 2)) for k in kernel]
    if kind == "avg":
        ceil, counted = draw(st.booleans()), draw(st.booleans())
        return f"aten.avg_pool{n}d.default", call(image, kernel, stride, padding, ceil, counted)
    name = f"max_pool{n}d_with_indices" if kind == "indices" else f"max_pool{n}d"
    ceil = draw(st.booleans())
    return f"aten.{name}.default", call(image, kernel, stride, padding, [1], ceil)


@st.composite
def resized(draw: st.DrawFn) -> Call:
    n, kind = draw(st.integers(1, 3)), draw(st.sampled_from(("nearest", "linear", "patches")))
    shape = (draw(sizes()), draw(sizes()), *(draw(SPATIAL) for _ in range(n)))
    assume(math.prod(shape) <= MOST_ELEMENTS)
    if kind == "patches":
        shape = (*shape[:2], draw(SPATIAL), draw(SPATIAL))
        kernel = [draw(st.integers(1, size)) for size in shape[2:]]
        return "aten.im2col.default", call(draw(real(shape)), kernel, [1, 1], [1, 0], [2, 1])
    size = [draw(SPATIAL) for _ in range(n)]
    if kind == "nearest":
        return f"aten.upsample_nearest{n}d.vec", call(draw(real(shape)), size, None)
    linear = ("linear", "bilinear", "trilinear")[n - 1]
    corners = draw(st.booleans())
    return f"aten.upsample_{linear}{n}d.vec", call(draw(real(shape)), size, corners, None)


@st.composite
def norms(draw: st.DrawFn) -> Call:
    """Over trailing dims, with or without scale and shift."""
    shape, op = draw(shapes(1)), draw(st.sampled_from(("layer_norm", "rms_norm")))
    held = shape[draw(st.integers(0, len(shape) - 1)) :]
    assume(math.prod(held) >= FEWEST)
    affine = [x(*held) for _ in range(draw(st.integers(0, 2 if op == "layer_norm" else 1)))]
    return f"aten.{op}.default", call(draw(real(shape)), list(held), *affine)


@st.composite
def group_norms(draw: st.DrawFn) -> Call:
    groups, each = draw(sizes()), draw(st.sampled_from((1, 2, 3)))
    spatial = draw(shapes(0, 2))
    c = groups * each
    assume(c * math.prod(spatial) <= MOST_ELEMENTS and each * math.prod(spatial) >= FEWEST)
    affine = [x(c) for _ in range(draw(st.integers(0, 2)))]
    return "aten.group_norm.default", call(
        draw(real((draw(sizes()), c, *spatial))), groups, *affine
    )


@st.composite
def batch_norms(draw: st.DrawFn) -> Call:
    """Statistics of the batch or given ones; running ones kept or not."""
    n, c, spatial = draw(sizes()), draw(sizes()), draw(shapes(0, 2))
    assume(n * math.prod(spatial) >= FEWEST and n * c * math.prod(spatial) <= MOST_ELEMENTS)
    image = draw(real((n, c, *spatial)))
    affine: tuple[Tensor | None, ...] = (x(c), x(c)) if draw(st.booleans()) else (None, None)
    running: tuple[Any, ...] = (fixed(c), positive(c).detach())
    op = draw(st.sampled_from(("training", "eval", "updates", "instance")))
    if op == "updates":
        name = "aten._native_batch_norm_legit_functional.default"
        return name, call(image, *affine, *running, True, 0.1, 1e-5)
    if op == "instance":
        assume(math.prod(spatial) >= FEWEST)
        return "aten.instance_norm.default", call(
            image, *affine, None, None, True, 0.1, 1e-5, False
        )
    kept = running if op == "eval" else (None, None)
    training = op == "training"
    return "aten.batch_norm.default", call(image, *affine, *kept, training, 0.1, 1e-5, False)


FAMILIES = {
    family.__name__: anew(family())
    for family in (convolutions, pools, resized, norms, group_norms, batch_norms)
}
