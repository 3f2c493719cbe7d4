"""Hypothesis strategies of calls of operators that move elements (`drawn_calls.py`)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hypothesis import assume
from hypothesis import strategies as st

from tests.helpers.samples.drawn_calls import (
    MOST_ELEMENTS,
    Call,
    anew,
    broadcast,
    dim_of,
    real,
    shapes,
    sizes,
)
from tests.helpers.samples.rule_samples import call, x


@st.composite
def viewed(draw: st.DrawFn) -> Call:
    """The same elements under two groupings of their primes, with dims of 1 between."""
    primes = draw(st.lists(st.sampled_from((2, 2, 2, 3)), min_size=1, max_size=7))
    assume(math.prod(primes) <= MOST_ELEMENTS)

    def grouped(order: Sequence[int]) -> list[int]:
        cuts = sorted(draw(st.lists(st.integers(0, len(order)), max_size=3)))
        ends = zip([0, *cuts], [*cuts, len(order)], strict=True)
        return [math.prod(order[a:b]) for a, b in ends]

    source, target = grouped(primes), grouped(draw(st.permutations(primes)))
    if draw(st.booleans()):
        target = grouped(primes)
    op = draw(st.sampled_from(("view", "reshape", "_unsafe_view")))
    if draw(st.booleans()):
        target[draw(st.integers(0, len(target) - 1))] = -1
    return f"aten.{op}.default", call(draw(real(tuple(source))), target)


@st.composite
def rearranged(draw: st.DrawFn) -> Call:
    shape = draw(shapes(1))
    dim, tensor, rank = draw(dim_of(shape)), draw(real(shape)), len(shape)
    first, second = sorted((dim % rank, draw(dim_of(shape)) % rank))
    return draw(
        st.sampled_from(
            (
                ("aten.permute.default", call(tensor, draw(st.permutations(range(rank))))),
                ("aten.transpose.int", call(tensor, first, second - rank)),
                ("aten.unsqueeze.default", call(tensor, draw(st.integers(-rank - 1, rank)))),
                ("aten.squeeze.default", call(tensor)),
                ("aten.squeeze.dim", call(tensor, dim)),
                ("aten.squeeze.dims", call(tensor, [first] if first == second else [first, dim])),
                ("aten.flatten.using_ints", call(tensor, first, second)),
                ("aten.numpy_T.default", call(tensor)),
                ("aten.unflatten.int", call(tensor, dim, draw(factored(shape[dim])))),
                ("aten.unbind.int", call(tensor, dim)),
                ("aten.select.int", call(tensor, dim, draw(st.integers(0, shape[dim] - 1)))),
            )
        )
    )


@st.composite
def factored(draw: st.DrawFn, n: int) -> list[int]:
    """Sizes whose product is n; one may be left to torch."""
    first = draw(st.sampled_from([k for k in range(1, n + 1) if n % k == 0]))
    second = draw(st.sampled_from([k for k in range(1, n + 1) if (n // first) % k == 0]))
    found = [first, second, n // first // second]
    if draw(st.booleans()):
        found[draw(st.integers(0, 2))] = -1
    return found


@st.composite
def expanded(draw: st.DrawFn) -> Call:
    target = draw(shapes(1))
    source = draw(broadcast(target))
    missing = len(target) - len(source)
    given = [
        -1 if i >= missing and source[i - missing] == n and draw(st.booleans()) else n
        for i, n in enumerate(target)
    ]
    return "aten.expand.default", call(draw(real(source)), given)


@st.composite
def cut(draw: st.DrawFn) -> Call:
    """Parts of a tensor, equal or not, and where they begin."""
    shape, op = (
        list(draw(shapes(1, 3))),
        draw(st.sampled_from(("split", "sizes", "chunk", "slice"))),
    )
    dim = draw(dim_of(shape))
    if op == "sizes":
        parts = draw(st.lists(sizes(), min_size=1, max_size=4))
        shape[dim] = sum(parts)
        return "aten.split_with_sizes.default", call(draw(real(tuple(shape))), parts, dim)
    n = shape[dim] = shape[dim] * draw(st.sampled_from((1, 2, 3)))
    tensor = draw(real(tuple(shape)))
    if op == "split":
        return "aten.split.Tensor", call(tensor, draw(st.integers(1, n)), dim)
    if op == "chunk":
        return "aten.chunk.default", call(tensor, draw(st.integers(1, n)), dim)
    start, end = sorted((draw(st.integers(0, n)), draw(st.integers(0, n))))
    begin = start - n if draw(st.booleans()) and start < n else start
    step = draw(st.sampled_from((1, 1, 2)))
    return "aten.slice.Tensor", call(tensor, dim, begin, end, step)


@st.composite
def joined(draw: st.DrawFn) -> Call:
    shape, n = draw(shapes(1, 3)), draw(st.integers(1, 3))
    if draw(st.booleans()):
        dim = draw(st.integers(-len(shape) - 1, len(shape)))
        return "aten.stack.default", call([draw(real(shape)) for _ in range(n)], dim)
    dim = draw(dim_of(shape))
    lengths = [shape[dim]] * n if draw(st.booleans()) else [draw(sizes()) for _ in range(n)]
    parts = []
    for length in lengths:
        part = list(shape)
        part[dim] = length
        parts.append(draw(real(tuple(part))))
    return "aten.cat.default", call(parts, dim)


@st.composite
def written_or_padded(draw: st.DrawFn) -> Call:
    shape = draw(shapes(1, 3))
    dim, whole = draw(dim_of(shape)), draw(real(shape))
    op = draw(st.sampled_from(("slice", "select", "pad", "fill", "diagonal", "embed", "unfold")))
    n = shape[dim]
    if op == "slice":
        start = draw(st.integers(0, n - 1))
        end = draw(st.integers(start + 1, n))
        part = list(shape)
        part[dim] = end - start
        return "aten.slice_scatter.default", call(whole, x(*part), dim, start, end)
    if op == "select":
        dim %= len(shape)
        part = [*shape[:dim], *shape[dim + 1 :]]
        return "aten.select_scatter.default", call(whole, x(*part), dim, n - 1)
    if op == "pad":
        amounts = draw(st.lists(st.integers(0, 2), min_size=2, max_size=2 * len(shape)))
        amounts = amounts[: len(amounts) // 2 * 2]
        return "aten.constant_pad_nd.default", call(whole, amounts, 1.5)
    if op == "fill":
        return "aten.new_full.default", call(whole, draw(st.sampled_from(([*shape], [4, 2]))), 2.5)
    if op == "unfold":
        return "aten.unfold.default", call(whole, dim, draw(st.integers(1, n)), 2)
    if op == "embed":
        return "aten.diag_embed.default", call(whole, 0, draw(st.sampled_from((0, -2))), -1)
    assume(len(shape) > 1)
    return "aten.diagonal.default", call(whole, 0, 0, -1)


FAMILIES = {
    family.__name__: anew(family())
    for family in (viewed, rearranged, expanded, cut, joined, written_or_padded)
}
