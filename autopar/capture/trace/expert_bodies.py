"""What every expert of a loop computes of its rows, as one function of all rows (`Body`).

A matmul with the matrix of each expert is one with `weight[ids]`; another tensor of each is looked
up by ids. Every operator must compute its rows alone (`row_dim`), and be the same for all experts.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx

from autopar.capture.trace.replaced import insert_like
from autopar.rules import row_dim

aten = torch.ops.aten
VIEWS = (
    aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.unsqueeze.default,
    aten.squeeze.dim,
)  # fmt: skip
_MATMULS = (aten.matmul.default, aten.mm.default)
_TURNS = (aten.t.default, aten.mT.default, aten.numpy_T.default)


class OtherLoopError(Exception):
    """A loop over experts is not of the form that is known."""


class Choice(NamedTuple):
    """The rows of one expert: where `ids` are `expert`. `dims` of ids are those of the mask."""

    ids: fx.Node
    expert: int
    dims: tuple[int, ...]


@dataclass(frozen=True)
class Place:
    """The indices of an expert's rows in a dim of ids."""

    dim: int


@dataclass(frozen=True)
class Each:
    """A tensor of each expert."""

    nodes: tuple[fx.Node, ...]


@dataclass(frozen=True)
class AllRows:
    """The number of all rows, where a trace has that of an expert's."""

    n: int


@dataclass
class Body:
    """The function of all rows, under construction.

    expert    what depends on the rows of an expert, and of which; `choices` where that begins
    first     node of an expert -> that of expert 0
    places    node of expert 0 -> the dim of ids whose indices it has
    merged    node of expert 0 -> that of all rows; `dims` has its dim of rows
    """

    graph: fx.Graph
    ids: fx.Node
    expert: Mapping[fx.Node, int]
    choices: Mapping[fx.Node, Choice]
    first: dict[fx.Node, fx.Node] = field(default_factory=dict)
    places: dict[fx.Node, int] = field(default_factory=dict)
    merged: dict[fx.Node, fx.Node] = field(default_factory=dict)
    dims: dict[fx.Node, int] = field(default_factory=dict)
    made: dict[Any, fx.Node] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, ...]:
        return shape_of(self.ids)

    @property
    def n_rows(self) -> int:
        return math.prod(self.shape)

    def merge(self, nodes: Sequence[fx.Node]) -> None:
        """One node for those of all experts."""
        first, target = nodes[0], nodes[0].target
        self.first |= dict.fromkeys(nodes, first)
        if target is operator.getitem and args_of(first)[0] in self.choices:
            dims = {self.choices[source].dims[i] for source, i in map(args_of, nodes)}
            check(len(dims) == 1)
            (self.places[first],) = dims
            return
        if first in self.choices:
            check(all(is_equal(args_of(n)[0], args_of(first)[0]) for n in nodes))
            self._look_up(first, args_of(first)[0], 0, self.choices[first].dims)
            return
        args = self._joined([n.args for n in nodes])
        kwargs = self._joined([n.kwargs for n in nodes])
        if target is aten.index.Tensor:
            source, indices = args
            places = [n for n in indices if n is not None]
            n_before = len(indices) - len(places)
            check(all(isinstance(n, Place) for n in places) and None not in indices[n_before:])
            self._look_up(first, source, n_before, tuple(n.dim for n in places))
        elif target is aten.dropout.default:
            check(args[1] == 0 or not args[2])
            self._put(first, args[0], self.dims[args[0]])
        elif target is aten.linear.default and isinstance(args[1], Each):
            x, w, bias = (*args, None)[:3]
            self._matmul(first, x, w, bias, on_right=False)
        elif target in _MATMULS and isinstance(args[1], Each):
            x, w = args
            self._matmul(first, x, w, None, on_right=True)
        else:
            self._call(first, args, kwargs)

    def _joined(self, values: Sequence[Any]) -> Any:
        """The same argument of all experts, as one of all rows."""
        value = values[0]
        if isinstance(value, (list, tuple)):
            check(len({len(v) for v in values}) == 1)
            return tuple(self._joined(of) for of in zip(*values, strict=True))
        if isinstance(value, dict):
            check(len({tuple(v) for v in values}) == 1)
            return {key: self._joined([v[key] for v in values]) for key in value}
        if not isinstance(value, fx.Node):
            check(all(type(v) is type(value) and v == value for v in values))
            return value
        check(all(isinstance(v, fx.Node) for v in values))
        if value in self.expert:
            if value.target is aten.sym_size.int:
                return self._size(values)
            check({self.first.get(v) for v in values} == {value})
            return Place(self.places[value]) if value in self.places else self.merged[value]
        check(not any(v in self.expert for v in values))
        if all(is_equal(v, value) for v in values):
            return value
        check(len({shape_of(v) for v in values}) == 1)
        return Each(tuple(values))

    def _size(self, sizes: Sequence[fx.Node]) -> Any:
        """The number of an expert's rows, as that of all."""
        source, dim = args_of(sizes[0])
        sources = {self.first.get(args_of(n)[0]) for n in sizes}
        check(sources == {source} and {args_of(n)[1] for n in sizes} == {dim})
        check(dim == (0 if source in self.places else self.dims[self.merged[source]]))
        return AllRows(self.n_rows)

    def _look_up(self, node: fx.Node, x: Any, n_before: int, dims: tuple[int, ...]) -> None:
        """Rows of x, at indices of these dims of ids behind other dims, for all of ids."""
        check(isinstance(x, fx.Node) and x not in self.dims)
        shape, ids = shape_of(x), self.shape
        before, rest = shape[:n_before], shape[n_before + len(dims) :]
        check(shape[n_before : n_before + len(dims)] == tuple(ids[d] for d in dims))
        check(dims == tuple(sorted({*dims})))
        if len(dims) < len(ids):
            apart = [n if d in dims else 1 for d, n in enumerate(ids)]
            x = self.make(node, aten.reshape.default, x, [*before, *apart, *rest])
            x = self.make(node, aten.expand.default, x, [*before, *ids, *rest])
        x = self.make(node, aten.reshape.default, x, [*before, self.n_rows, *rest])
        self._put(node, x, n_before)

    def _matmul(self, node: fx.Node, x: Any, w: Each, bias: Any, on_right: bool) -> None:
        """Rows with the matrices of their experts: w x, or x w if that is `on_right`."""
        check(self.dims.get(x) == 0 and len(shape_of(x)) == len(shape_of(w.nodes[0])) == 2)
        column = self.make(node, aten.unsqueeze.default, x, 1 if on_right else 2)
        factors = (column, self._by_ids(node, w)) if on_right else (self._by_ids(node, w), column)
        y = self.make(node, aten.bmm.default, *factors)
        y = self.make(node, aten.squeeze.dim, y, 1 if on_right else 2)
        if bias is not None:
            added = self._by_ids(node, bias) if isinstance(bias, Each) else bias
            added = self.make(node, aten.type_as.default, added, y)  # as autocast casts a bias
            y = self.make(node, aten.add.Tensor, y, added)
        self._put(node, y, 0)

    def _call(self, node: fx.Node, args: Any, kwargs: Any) -> None:
        """An operator that computes each row alone."""
        target: Any = node.target
        if target is operator.getitem:
            self._put(node, self.make(node, target, *args), self.dims[args[0]])
            return
        check(not target._schema.is_mutable and _draws_nothing(target))
        is_view = target in VIEWS
        rank = max((len(shape_of(n)) for n in _flat(args) if n in self.dims), default=0)

        def plain(value: Any) -> Any:
            check(not isinstance(value, Place))
            if isinstance(value, (list, tuple)):
                return [plain(v) for v in value]
            if isinstance(value, AllRows):
                check(is_view or target is aten.expand.default)
                return value.n
            return self._beside(node, value, rank) if isinstance(value, Each) else value

        made = self.make(node, target, *plain(args), **{k: plain(v) for k, v in kwargs.items()})
        rows = {n: self.dims[n] for n in made.all_input_nodes if n in self.dims}
        dim = _dim_of_view(made, rows) if is_view else row_dim(made, rows)
        check(dim is not None)
        self._put(node, made, dim)

    def _beside(self, node: fx.Node, each: Each, rank: int) -> fx.Node:
        """A tensor of each expert, for each row, to be broadcast to so many dims."""
        own = shape_of(each.nodes[0])
        check(len(own) < rank)
        found = self._by_ids(node, each)
        shape = [self.n_rows, *[1] * (rank - 1 - len(own)), *own]
        found = self.make(node, aten.reshape.default, found, shape)
        self.dims[found] = 0
        return found

    def _by_ids(self, node: fx.Node, each: Each) -> fx.Node:
        """What each row's expert has."""
        ids = self.make(node, aten.reshape.default, self.ids, [self.n_rows])
        return self.make(node, aten.index.Tensor, self._stacked(node, each.nodes), [ids])

    def _stacked(self, node: fx.Node, nodes: tuple[fx.Node, ...]) -> fx.Node:
        """Tensors of all experts, one after another; those that are parts of one are not copied."""
        parts = [_part(n) for n in nodes]
        whole = parts[0][0]
        if parts == [(whole, e) for e in range(0 if whole is None else shape_of(whole)[0])]:
            return whole
        if (
            all(n.target is nodes[0].target in _TURNS for n in nodes)
            and len(shape_of(nodes[0])) == 2
        ):
            stack = self._stacked(node, tuple(args_of(n)[0] for n in nodes))
            return self.make(node, aten.transpose.int, stack, 1, 2)
        return self.make(node, aten.stack.default, list(nodes))

    def make(self, like: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A call at the end of the loop; the same one for the same arguments."""
        key = target, repr(args), repr(kwargs)
        if key not in self.made:
            try:
                self.made[key] = insert_like(self.graph, like, target, *args, **kwargs)
            except Exception as error:  # of shapes that only rows of one expert have
                raise OtherLoopError from error
        return self.made[key]

    def _put(self, node: fx.Node, merged: fx.Node, dim: Any) -> None:
        self.merged[node], self.dims[merged] = merged, dim


def _part(node: fx.Node) -> tuple[Any, int]:
    """A tensor, and the number of its part along dim 0 that `node` is."""
    args = args_of(node)
    if node.target is aten.select.int and args[1] == 0:
        return args[0], args[2]
    if node.target is operator.getitem and args[0].target is aten.unbind.int:
        source, *dims = args_of(args[0])
        return (source, args[1]) if dims in ([], [0]) else (None, 0)
    return None, 0


def _dim_of_view(node: fx.Node, rows: dict[fx.Node, int]) -> int | None:
    """Where the dim of rows is in another shape of the same elements."""
    ((source, dim),) = rows.items()
    shape, other = shape_of(source), shape_of(node)
    n_before = math.prod(shape[:dim])
    return next(
        (i for i, n in enumerate(other) if n == shape[dim] and math.prod(other[:i]) == n_before),
        None,
    )


def _draws_nothing(target: torch._ops.OpOverload) -> bool:
    return torch.Tag.nondeterministic_seeded not in target.tags


def _flat(values: Any) -> list[fx.Node]:
    if isinstance(values, (list, tuple)):
        return [v for value in values for v in _flat(value)]
    return [values] if isinstance(values, fx.Node) else []


def is_equal(value: Any, other: Any, depth: int = 6) -> bool:
    """Are they the same node, or the same function of the same, or equal literals?"""
    if not isinstance(value, fx.Node) or not isinstance(other, fx.Node):
        return type(value) is type(other) and bool(value == other)
    target = value.target
    if value is other or target is not other.target or value.op != "call_function":
        return value is other
    if isinstance(target, torch._ops.OpOverload) and not _draws_nothing(target):
        return False
    pairs = zip(args_of(value), args_of(other), strict=False)
    is_long = len(value.args) == len(other.args) and value.kwargs == other.kwargs
    return depth > 0 and is_long and all(is_equal(a, b, depth - 1) for a, b in pairs)


def check(holds: bool) -> None:
    """Raises `OtherLoopError` unless it holds."""
    if not holds:
        raise OtherLoopError


def args_of(node: fx.Node) -> tuple[Any, ...]:
    return node.args


def shape_of(node: fx.Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)
