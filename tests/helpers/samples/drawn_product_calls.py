"""Hypothesis strategies of calls of matmuls, attention and dropout (`drawn_calls.py`)."""

from __future__ import annotations

import math
from typing import Any

import torch
from hypothesis import assume
from hypothesis import strategies as st

from autopar.operators import seed_tensor
from tests.helpers.samples.drawn_calls import (
    MOST_ELEMENTS,
    Call,
    anew,
    broadcast,
    real,
    shapes,
    sizes,
)
from tests.helpers.samples.rule_samples import bools, call, fixed, ints, x


@st.composite
def products(draw: st.DrawFn) -> Call:
    m, k, n = draw(sizes()), draw(sizes()), draw(sizes())
    lead = draw(shapes(0, 2))
    op = draw(st.sampled_from(("mm", "bmm", "linear", "mv", "dot")))
    if op == "mm":
        return "aten.mm.default", call(draw(real((m, k))), draw(real((k, n))))
    if op == "bmm":
        b = draw(sizes())
        return "aten.bmm.default", call(draw(real((b, m, k))), draw(real((b, k, n))))
    if op == "mv":
        return "aten.mv.default", call(draw(real((m, k))), draw(real((k,))))
    if op == "dot":
        return "aten.dot.default", call(draw(real((k,))), draw(real((k,))))
    return "aten.linear.default", call(draw(real((*lead, k))), draw(real((n, k))))


@st.composite
def matmuls(draw: st.DrawFn) -> Call:
    m, k, n = draw(sizes()), draw(sizes()), draw(sizes())
    batch = draw(shapes(0, 2))
    assume(math.prod(batch) * m * k * n <= 4 * MOST_ELEMENTS)
    left = (*draw(broadcast(batch)), m, k) if draw(st.integers(0, 4)) else (k,)
    right = (*draw(broadcast(batch)), k, n) if draw(st.integers(0, 4)) else (k,)
    return "aten.matmul.default", call(draw(real(left)), draw(real(right)))


@st.composite
def einsums(draw: st.DrawFn) -> Call:
    """Up to three tensors of named dims, diagonals and `...` among them."""
    size = {name: draw(sizes()) for name in "abcd"}
    dots = draw(shapes(0, 1)) if draw(st.booleans()) else None
    words, tensors = [], []
    for _ in range(draw(st.integers(1, 3))):
        word = "".join(draw(st.lists(st.sampled_from("abcd"), min_size=1, max_size=3)))
        shape = tuple(size[c] for c in word)
        if dots is not None and draw(st.booleans()):
            word, shape = "..." + word, (*dots, *shape)
        assume(math.prod(shape) <= MOST_ELEMENTS)
        words.append(word)
        tensors.append(draw(real(shape)))
    equation = ",".join(words)
    if draw(st.integers(0, 3)):
        used = sorted({c for word in words for c in word} - {"."})
        kept: list[str] = draw(st.lists(st.sampled_from(used), unique=True))
        equation += "->" + "..." * ("..." in equation) + "".join(kept)
    assume(math.prod(size.values()) <= 8 * MOST_ELEMENTS)
    return "aten.einsum.default", call(equation, tensors)


@st.composite
def attentions(draw: st.DrawFn) -> Call:
    """With batch and heads, any of them missing, masks of every form, and grouped queries."""
    lead = list(draw(shapes(0, 2)))
    s, t, e, f = draw(sizes()), draw(sizes()), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    group = draw(st.sampled_from((0, 1, 2, 3))) if lead else 0
    assume(math.prod(lead) <= 24)
    query = [*lead[:-1], lead[-1] * group] if group else lead
    options: dict[str, Any] = {"enable_gqa": True} if group else {}
    form = draw(st.sampled_from(("none", "causal", "bools", "numbers", "learned")))
    mask = None
    if form == "causal":
        options["is_causal"] = True
    elif form != "none":
        shape = draw(broadcast((*query, s, t)))
        if len(shape) < 2:
            shape = (s, t)
        # A row without a key has no weights.
        allowed = bools(*shape) | (torch.arange(shape[-1]) == 0)
        mask = allowed if form == "bools" else (x if form == "learned" else fixed)(*shape)
    if draw(st.booleans()):
        options["scale"] = 0.3
    return "aten.scaled_dot_product_attention.default", call(
        draw(real((*query, s, e))), draw(real((*lead, t, e))), draw(real((*lead, t, f))), mask,
        **options,
    )  # fmt: skip


@st.composite
def dropped_attentions(draw: st.DrawFn) -> Call:
    """The drawn attentions whose masks are not learned, with dropout by position."""
    _, (arguments, options) = draw(attentions())
    q, k, v, mask = arguments
    assume(mask is None or not mask.requires_grad)
    is_causal, grouped = options.get("is_causal", False), options.get("enable_gqa", False)
    positions = [torch.arange(n) for n in (*q.shape[:-1], k.shape[-2])]
    return "autopar.attention_dropout.default", call(
        q, k, v, mask, seed_tensor(3), positions, 0.4, 1, is_causal, q.shape[-2],
        options.get("scale", 0.5), grouped,
    )  # fmt: skip


@st.composite
def experts(draw: st.DrawFn) -> Call:
    n, e, i, o = draw(sizes()), draw(sizes()), draw(sizes()), draw(sizes())
    transposed = draw(st.booleans())
    matrices = draw(real((e, i, o) if transposed else (e, o, i)))
    return "autopar.expert_linear.default", call(
        draw(real((n, i))), matrices, ints(e, n), transposed
    )


@st.composite
def dropouts(draw: st.DrawFn) -> Call:
    """Of elements, or of whole rows along some dims."""
    shape = draw(shapes())
    positions = [torch.arange(draw(st.sampled_from((n, n, 1)))) for n in shape]
    return "autopar.dropout.default", call(draw(real(shape)), seed_tensor(3), positions, 0.4, 1)


DRAWN = (products, matmuls, einsums, attentions, dropped_attentions, experts, dropouts)
FAMILIES = {family.__name__: anew(family()) for family in DRAWN}
