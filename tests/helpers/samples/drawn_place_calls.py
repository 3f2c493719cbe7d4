"""Hypothesis strategies of calls of losses, and of what addresses places (`drawn_calls.py`)."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from hypothesis import assume
from hypothesis import strategies as st
from torch import Tensor

from tests.helpers.samples.drawn_calls import (
    MOST_ELEMENTS,
    Call,
    Shape,
    anew,
    broadcast,
    dim_of,
    real,
    shapes,
    sizes,
    some_dims,
)
from tests.helpers.samples.rule_samples import bools, call, fixed, ints, positive, x


def distinct(high: int, n: int) -> Tensor:
    return ints(1 << 30, high).argsort()[:n]


@st.composite
def looked_up(draw: st.DrawFn) -> Call:
    op = draw(st.sampled_from(("embedding", "padded", "index", "gather")))
    shape = draw(shapes(1, 3))
    if op == "embedding":
        v = draw(sizes())
        padding = draw(st.integers(-1, v - 1))
        ids = ints(v, *draw(shapes(0, 2)))
        return "aten.embedding.default", call(draw(real((v, draw(sizes())))), ids, padding)
    if op == "padded":
        v = draw(sizes(12))
        valid = draw(st.integers(1, v))
        table = draw(real((v, draw(sizes()))))
        ids = ints(valid, *draw(shapes(0, 2)))
        return "autopar.padded_embedding.default", call(table, ids, n_valid=valid)
    if op == "gather":
        dim = draw(dim_of(shape))
        places = [draw(st.sampled_from((n, n, draw(st.integers(1, n))))) for n in shape]
        places[dim] = draw(sizes())
        return "aten.gather.default", call(draw(real(shape)), dim, ints(shape[dim], *places))
    return "aten.index.Tensor", call(draw(real(shape)), draw(indices(shape)))


@st.composite
def indices(draw: st.DrawFn, shape: Shape) -> list[Tensor | None]:
    """Index tensors of some dims that broadcast with each other."""
    block, dims = draw(shapes(0, 2)), draw(some_dims(shape))
    assume(math.prod(block) * math.prod(shape) <= 8 * MOST_ELEMENTS)
    return [
        ints(n, *draw(broadcast(block))) if i in dims else None
        for i, n in enumerate(shape[: max(dims) + 1])
    ]


@st.composite
def written(draw: st.DrawFn) -> Call:
    shape = draw(shapes(1, 3))
    dim, target = draw(dim_of(shape)), draw(real(shape))
    op = draw(
        st.sampled_from(
            ("index_put scatter_add scatter_reduce scatter.src scatter.value index_add "
            "index_copy index_fill").split()
        )
    )  # fmt: skip
    if op == "index_put":
        indexed = draw(indices(shape))
        read = torch.zeros(shape)[tuple(slice(None) if i is None else i for i in indexed)].shape
        return "aten.index_put.default", call(target, indexed, x(*draw(broadcast(read))), True)
    if op.startswith("index"):
        rows = distinct(shape[dim], draw(st.integers(1, shape[dim])))
        if op == "index_fill":
            return "aten.index_fill.int_Scalar", call(target, dim, rows, 0)
        part = list(shape)
        part[dim] = len(rows)
        return f"aten.{op}.default", call(target, dim, rows, draw(real(tuple(part))))
    part = [draw(st.sampled_from((n, n, draw(st.integers(1, n))))) for n in shape]
    order = ints(1 << 30, *shape).argsort(dim)  # no place twice
    places = order[tuple(slice(n) for n in part)]
    longer = tuple(draw(st.sampled_from((n, n, n + 1))) for n in part)
    if op == "scatter.value":
        return "aten.scatter.value", call(target, dim, places, draw(st.sampled_from((0, 1.5))))
    if op == "scatter_reduce":
        how = draw(st.sampled_from(("sum", "mean", "amax")))
        return "aten.scatter_reduce.two", call(target, dim, places, x(*part), how)
    name = "scatter.src" if op == "scatter.src" else "scatter_add.default"
    # Torch has no gradient of sources of which only a part is written.
    source = draw(real(longer)) if longer == places.shape else fixed(*longer)
    return f"aten.{name}", call(target, dim, places, source)


OF_ELEMENTS: tuple[tuple[str, Callable[..., Tensor]], ...] = (
    ("smooth_l1_loss", x),
    ("huber_loss", x),
    ("kl_div", positive),
    ("soft_margin_loss", fixed),
    ("binary_cross_entropy_with_logits", positive),
)


@st.composite
def losses(draw: st.DrawFn) -> Call:
    """Of classes, of rows and more dims, ignored labels, weights; and of elements."""
    reduction = draw(st.sampled_from((0, 2)))
    op = draw(st.sampled_from(("cross_entropy", "cross_entropy", "padded", "nll", "elements")))
    if op == "elements":
        shape = draw(shapes())
        name, target = draw(st.sampled_from(OF_ELEMENTS))
        return f"aten.{name}.default", call(draw(real(shape)), target(*shape), reduction=reduction)
    v, rows = draw(sizes()), draw(shapes(0, 3))
    assume(v * math.prod(rows) <= MOST_ELEMENTS)
    logits = draw(real((*rows[:1], v, *rows[1:])))
    valid = draw(st.integers(1, v)) if op == "padded" else v
    labels = ints(valid, *rows)
    if draw(st.booleans()):
        labels = labels.masked_fill(bools(*rows), -100)
    weights = fixed(v) if op != "padded" and draw(st.booleans()) else None
    if op == "nll":
        return "aten.nll_loss_nd.default", call(logits, labels, weights, reduction)
    smoothing = draw(st.sampled_from((0.0, 0.1)))
    arguments = (logits, labels, weights, reduction, -100, smoothing)
    if op == "padded":
        return "autopar.padded_cross_entropy.default", call(*arguments, n_valid=valid)
    return "aten.cross_entropy_loss.default", call(*arguments)


FAMILIES = {family.__name__: anew(family()) for family in (looked_up, written, losses)}
