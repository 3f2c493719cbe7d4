"""Hypothesis strategies of operator calls: any shapes and arguments a family of rules takes.

    FAMILIES    name -> strategy of (operator, its arguments): elementwise, and along dims

Sizes include 1, 3 and 6, which 2 or 4 ranks may not divide. Only shapes and arguments are
drawn, so that examples shrink; the numbers inside follow from them (`rule_samples.restart`).
Other families are in `drawn_*_calls.py`; what they are drawn from is here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from hypothesis import assume
from hypothesis import strategies as st
from torch import Tensor

from tests.helpers.samples.rule_samples import (
    Sample,
    bools,
    call,
    fixed,
    ints,
    positive,
    restart,
    x,
)

Shape = tuple[int, ...]
Call = tuple[str, Sample]

SIZES = (4, 8, 4, 8, 6, 1, 2, 3)
MOST_ELEMENTS = 384

UNARY = (
    "relu gelu tanh sigmoid exp abs neg clone erf silu square expm1 softplus zeros_like detach "
    "hardswish log_sigmoid contiguous nan_to_num sign isnan"
).split()
BINARY = (
    "add.Tensor sub.Tensor mul.Tensor div.Tensor maximum.default minimum.default atan2.default "
    "rsub.Tensor hypot.default eq.Tensor lt.Tensor ge.Tensor remainder.Tensor"
).split()
SCALAR = "add.Tensor sub.Tensor mul.Tensor div.Tensor add.Scalar mul.Scalar gt.Scalar".split()


@st.composite
def shapes(draw: st.DrawFn, least: int = 0, most: int = 4) -> Shape:
    shape = tuple(draw(st.lists(st.sampled_from(SIZES), min_size=least, max_size=most)))
    assume(math.prod(shape) <= MOST_ELEMENTS)
    return shape


def sizes(*others: int) -> st.SearchStrategy[int]:
    return st.sampled_from((*SIZES, *others))


@st.composite
def broadcast(draw: st.DrawFn, shape: Shape) -> Shape:
    """A shape that broadcasts to `shape`."""
    kept = shape[draw(st.integers(0, len(shape))) :]
    return tuple(draw(st.sampled_from((n, n, 1))) for n in kept)


@st.composite
def real(draw: st.DrawFn, shape: Shape) -> Tensor:
    """With gradient or, now and then, without."""
    return draw(st.sampled_from((x, x, x, fixed)))(*shape)


def dim_of(shape: Sequence[int]) -> st.SearchStrategy[int]:
    """One of its dims, counted from either end."""
    return st.integers(-len(shape), len(shape) - 1)


def some_dims(shape: Sequence[int], least: int = 1) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, len(shape) - 1), min_size=least, unique=True)


def anew(drawn: st.SearchStrategy[Call]) -> st.SearchStrategy[Call]:
    """Numbers begin anew with every example."""
    return st.builds(restart).flatmap(lambda _: drawn)


# -- elementwise -------------------------------------------------------------------------------


@st.composite
def pointwise(draw: st.DrawFn) -> Call:
    shape = draw(shapes())
    kind = draw(st.sampled_from(("unary", "binary", "scalar", "chosen", "three", "typed")))
    if kind == "unary":
        return f"aten.{draw(st.sampled_from(UNARY))}.default", call(draw(real(shape)))
    left, right = draw(broadcast(shape)), draw(broadcast(shape))
    if kind == "binary":
        op = draw(st.sampled_from(BINARY))
        options = {"alpha": 2} if op in ("add.Tensor", "sub.Tensor") else {}
        return f"aten.{op}", call(draw(real(left)), draw(real(right)), **options)
    if kind == "scalar":
        return f"aten.{draw(st.sampled_from(SCALAR))}", call(draw(real(shape)), 1.5)
    if kind == "typed":
        op, tensors = draw(st.sampled_from(OF_INTEGERS))
        return op, call(tensors(left), tensors(right))
    if kind == "three":
        op = draw(st.sampled_from(("addcmul.default", "addcdiv.default", "lerp.Tensor")))
        return f"aten.{op}", call(draw(real(shape)), draw(real(left)), positive(*right))
    return draw(st.sampled_from(CHOSEN))(draw(real(left)), bools(*right), draw(real(shape)))


OF_INTEGERS: tuple[tuple[str, Callable[[Shape], Tensor]], ...] = (
    ("aten.add.Tensor", lambda s: ints(9, *s)),
    ("aten.mul.Tensor", lambda s: bools(*s)),
    ("aten.logical_and.default", lambda s: bools(*s)),
    ("aten.bitwise_or.Tensor", lambda s: ints(9, *s)),
    ("aten.floor_divide.default", lambda s: ints(9, *s) + 1),
    ("aten.pow.Tensor_Tensor", lambda s: positive(*s)),
)
CHOSEN: tuple[Callable[[Tensor, Tensor, Tensor], Call], ...] = (
    lambda a, m, b: ("aten.where.self", call(m, a, b)),
    lambda a, m, b: ("aten.where.ScalarOther", call(m, a, 0.0)),
    lambda a, m, b: ("aten.where.ScalarSelf", call(m, 2.0, a)),
    lambda a, m, b: ("aten.masked_fill.Scalar", call(a, m, 0.0)),
    lambda a, m, b: ("aten.masked_fill.Scalar", call(a, m, -1.5)),
    lambda a, m, b: ("aten.masked_fill.Tensor", call(a, m, x())),
    lambda a, m, b: ("aten.clamp.default", call(a, -0.5, 0.5)),
    lambda a, m, b: ("aten.to.dtype", call(m, torch.float64)),
)


# -- along dims --------------------------------------------------------------------------------

BY_DIMS = (
    "sum.dim_IntList mean.dim amax.default amin.default logsumexp.default var.correction "
    "std.correction linalg_vector_norm.default var_mean.correction"
).split()
BY_DIM = "max.dim min.dim argmax.default argmin.default prod.dim_int median.dim".split()
OF_ALL = (
    "sum.default mean.default max.default min.default argmax.default prod.default "
    "linalg_vector_norm.default"
).split()


@st.composite
def reductions(draw: st.DrawFn) -> Call:
    shape, keepdim = draw(shapes(1)), draw(st.booleans())
    kind = draw(st.sampled_from(("dims", "dim", "all", "bools")))
    if kind == "dim":
        op, dim = draw(st.sampled_from(BY_DIM)), draw(dim_of(shape))
        return f"aten.{op}", call(draw(real(shape)), dim, keepdim)
    if kind == "all":
        return f"aten.{draw(st.sampled_from(OF_ALL))}", call(draw(real(shape)))
    if kind == "bools":
        op = draw(st.sampled_from(("any.dim", "all.dim", "sum.dim_IntList")))
        dim = draw(dim_of(shape))
        return f"aten.{op}", call(bools(*shape), [dim] if "sum" in op else dim, keepdim)
    op, dims = draw(st.sampled_from(BY_DIMS)), draw(some_dims(shape))
    given = [d - len(shape) if draw(st.booleans()) else d for d in dims]
    if "var" in op or "std" in op:
        assume(math.prod(shape[d] for d in dims) > 1)  # the deviation of one number is NaN
        return f"aten.{op}", call(draw(real(shape)), given, keepdim=keepdim)
    order = (2,) if "norm" in op else ()
    return f"aten.{op}", call(draw(real(shape)), *order, given, keepdim)


ALONG = (
    "softmax.int log_softmax.int cumsum.default cumprod.default logcumsumexp.default "
    "cummax.default sort.default topk flip roll diff"
).split()


@st.composite
def along_dims(draw: st.DrawFn) -> Call:
    shape, op = draw(shapes(1)), draw(st.sampled_from(ALONG))
    dim, tensor = draw(dim_of(shape)), draw(real(shape))
    if op == "topk":
        return "aten.topk.default", call(tensor, draw(st.integers(1, shape[dim])), dim)
    if op == "flip":
        return "aten.flip.default", call(tensor, draw(some_dims(shape)))
    if op == "roll":
        dims = draw(some_dims(shape))
        return "aten.roll.default", call(tensor, [draw(st.integers(-2, 3)) for _ in dims], dims)
    if op == "diff":
        assume(shape[dim] > 1)
        return "aten.diff.default", call(tensor, 1, dim)
    return f"aten.{op}", call(tensor, dim)


FAMILIES = {family.__name__: anew(family()) for family in (pointwise, reductions, along_dims)}
