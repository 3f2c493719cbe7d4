"""Factor refinement: fused projections, grouped queries, views that conflict."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.placement import Notation, TensorType
from autopar.program.graph import Factors, Types, name_sizes
from autopar.rules import resolve, view_notation

Shape = tuple[int, ...]


class Graph:
    """Tensors by name, and operators as notation between them."""

    def __init__(self, **shapes: Shape) -> None:
        self.shapes = shapes
        self.factors = Factors()
        for name, shape in shapes.items():
            self.factors.add(name, shape)

    def join(self, notation: str, inputs: str, outputs: str) -> Graph:
        self.factors.join(Notation.parse(notation), inputs.split(), outputs.split())
        return self

    def view(self, source: str, target: str) -> Graph:
        notation = view_notation(self.shapes[source], self.shapes[target])
        self.factors.join(notation, [source], [target])
        return self

    def sizes(self, name: str) -> tuple[Shape, ...]:
        return self.factors.sizes(name)

    def labels(self, notation: Notation, source: str, target: str) -> set[int]:
        """Sizes of the factors that one operator may shard."""
        types = [TensorType(self.sizes(name), 8, True) for name in (source, target)]
        sizes = name_sizes(notation, [self.shapes[source]], [self.shapes[target]])
        return set(resolve(notation, types[:1], types[1:], sizes).sizes.values())


def test_a_fused_projection_is_three_by_heads_by_head_dim() -> None:
    """qkv = x w; q, k and v are its thirds, viewed as heads: the weight gets their factors."""
    graph = Graph(x=(4, 32), w=(96, 32), qkv=(4, 96), q=(4, 32), k=(4, 32), heads=(4, 8, 4))
    graph.join("b i, o i -> b o", "x w", "qkv")
    graph.join("b (n! o) -> b o, b o", "qkv", "q k").view("q", "heads")
    assert graph.sizes("w") == ((3, 8, 4), (32,))
    assert graph.sizes("qkv") == ((4,), (3, 8, 4))
    assert graph.sizes("k") == ((4,), (8, 4))  # through the name it shares with q
    assert graph.sizes("x") == ((4,), (32,))


def test_grouped_queries_split_the_heads() -> None:
    """8 query heads share 4 key heads, so the query weight's dim is 4 x 2 x head_dim."""
    graph = Graph(
        wq=(16, 8), wk=(8, 8), x=(6, 8), q=(6, 16), k=(6, 8), qh=(6, 8, 2), kh=(6, 4, 2), y=(6, 8)
    )
    graph.join("b i, o i -> b o", "x wq", "q").join("b i, o i -> b o", "x wk", "k")
    graph.view("q", "qh").view("k", "kh").join("b (h g) d, b h d -> b (h g)", "qh kh", "y")
    assert graph.sizes("wq") == ((4, 2, 2), (8,))
    assert graph.sizes("wk") == ((4, 2), (8,))
    assert graph.sizes("y") == ((6,), (4, 2))


def test_a_split_reaches_tensors_joined_before_it() -> None:
    graph = Graph(a=(4, 12), b=(4, 12), c=(12,), d=(4, 3, 4))
    graph.join("r n, r n -> n", "a b", "c").view("a", "d")
    assert graph.sizes("b") == ((4,), (3, 4))
    assert graph.sizes("c") == ((3, 4),)


def test_conflicting_views_freeze_only_the_operator_that_conflicts() -> None:
    graph = Graph(x=(8, 12), first=(8, 3, 4), second=(8, 4, 3))
    graph.view("x", "first").view("x", "second")
    assert graph.sizes("x") == ((8,), (3, 4))
    assert graph.labels(view_notation((8, 12), (8, 3, 4)), "x", "first") == {8, 3, 4}
    assert graph.labels(view_notation((8, 12), (8, 4, 3)), "x", "second") == {8}


def test_a_view_without_common_factors_freezes_only_that_segment() -> None:
    notation = view_notation((4, 6, 4, 5), (4, 4, 6, 5))
    graph = Graph(x=(4, 6, 4, 5), y=(4, 4, 6, 5))
    graph.view("x", "y")
    assert graph.labels(notation, "x", "y") == {4, 5}
    assert len(notation.frozen) == 4


@pytest.mark.parametrize(
    ("source", "target", "text"),
    [
        ((4, 24), (4, 3, 8), "v2 (v1 v0) -> v2 v1 v0"),
        ((4, 8), (32,), "v1 v0 -> (v1 v0)"),
        ((1, 4, 1), (4,), "1 v0 1 -> v0"),
        ((4, 6), (6, 4), "v1! v0! -> v3! v2!"),
        ((2, 12), (6, 4), "v2 (v1 v0) -> (v2 v1) v0"),
        ((), (1, 1), " -> 1 1"),
    ],
)
def test_views_as_notation(source: Shape, target: Shape, text: str) -> None:
    assert view_notation(source, target) == Notation.parse(text)


def test_sizes_of_names_inside_products_are_solved() -> None:
    notation = Notation.parse("(a b) c, b -> (c a)")
    assert name_sizes(notation, [(6, 4), (3,)], [(8,)]) == {"a": 2, "b": 3, "c": 4}


def reshaped(sizes: list[int], data: st.DataObject) -> Shape:
    """A shape with as many elements, made by reordering and merging prime factors."""
    shape: list[int] = []
    merges: list[bool] = data.draw(st.lists(st.booleans(), min_size=len(sizes)))
    order: list[int] = data.draw(st.permutations(sizes))
    for size, merge in zip(order, merges, strict=False):
        if shape and merge:
            shape[-1] *= size
        else:
            shape.append(size)
    return tuple(shape)


@given(st.lists(st.sampled_from((2, 2, 3, 5)), min_size=1, max_size=6), st.data())
def test_factors_multiply_to_their_dims_whatever_the_views(
    primes: list[int], data: st.DataObject
) -> None:
    shapes = {f"t{i}": reshaped(primes, data) for i in range(data.draw(st.integers(2, 5)))}
    graph = Graph(**shapes)
    pairs = [data.draw(st.tuples(*[st.sampled_from(sorted(shapes))] * 2)) for _ in range(5)]
    for source, target in pairs:
        graph.view(source, target)
    for name, shape in shapes.items():
        assert tuple(math.prod(factors) for factors in graph.sizes(name)) == shape
        assert all(n > 1 for factors in graph.sizes(name) for n in factors)


def test_types_of_one_microbatch() -> None:
    types = Types(
        {"x": TensorType(((8,), (4, 2)), 4, True), "w": TensorType(((8,),), 4, True)},
        {"x": ((0,), (1, 2)), "w": ((3,),)},
    )
    divided = types.divide_rows(types.by_cell({"x": (0, 0)}), 4)
    assert divided.tensors["x"].dims == ((2,), (4, 2))
    assert divided.tensors["w"] == types.tensors["w"]
