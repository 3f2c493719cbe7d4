"""Rows that are sorted by expert, multiplied in groups and put back: without the sort.

    order = sort(ids)                              ids [m]: k for each of n tokens, m = n k
    out[order // k] += f(x[order // k], ends)      or y[order] = f(..)

becomes out + sum over k of f(x repeated k times, ids). The matmul by ids sorts the rows that a rank
has; behind a sort of all rows, no rank could have some of them. f is any function row by row: an
operator whose rule shards the rows computes each alone.

`ends` are where the groups of `F.grouped_mm` end. They are those of ids if they sum up how many
rows each expert has, counted as `_ids_counted` knows. Other ends stay as they are: then the sort
stays too, on every rank.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autopar import operators
from autopar.capture.builder import Builder, TracedCall
from autopar.capture.dependence import is_random
from autopar.rules import row_dim

aten = torch.ops.aten
_LINEAR = operators.experts.expert_linear._opoverload
_SORTS = (aten.sort.default, aten.sort.stable)
_ZEROS = (aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default)
_ONES = (aten.ones.default, aten.ones_like.default, aten.new_ones.default)
_SAME = (aten.reshape.default, aten.unsqueeze.default, aten.expand.default, aten.to.dtype)
_COUNTING = (torch.int32, torch.int64, torch.float32, torch.float64)


def unsort_rows(b: Builder, results: Sequence[Any]) -> tuple[Any, ...]:
    """Rewrite the graph of `b`; returns what stands for its `results`."""
    for sort in [n for n in b.graph.nodes if _sorts_up(n)]:
        ids = _source(_args(sort)[0])
        groups = [_args(n)[2] for n in b.graph.nodes if n.target is _LINEAR]
        if any(_ids_of_groups(numbers) is ids for numbers in groups):
            now = _Sorted(b, sort, ids).unsort(results)
            results = [now.get(value, value) for value in results]
    return tuple(results)


@dataclass
class _Sorted:
    """The rows that one sort of ids puts in order.

    places   indices of rows: node -> k, for order // k; every row of the node has the same one
    back     indices that put rows back
    own      node of sorted rows -> node of the same in their own order
    now      node that is gone -> what stands for it
    """

    b: Builder
    sort: fx.Node
    ids: fx.Node
    places: dict[fx.Node, int] = field(default_factory=dict)
    back: set[fx.Node] = field(default_factory=set)
    own: dict[fx.Node, fx.Node] = field(default_factory=dict)
    now: dict[fx.Node, fx.Node] = field(default_factory=dict)
    computed: list[fx.Node] = field(default_factory=list)

    def unsort(self, results: Sequence[Any]) -> dict[fx.Node, fx.Node]:
        """Rewrite what reads sorted rows; returns what stands for nodes that are gone."""
        nodes = list(self.b.graph.nodes)
        for node in nodes[nodes.index(self.sort) + 1 :]:
            self.b.origin = node
            with self.b.graph.inserting_before(node):
                self._follow(node)
        for node, new in self.now.items():
            node.replace_all_uses_with(new)
        for node in self.computed:
            users = [n for n in node.users if n not in self.own and n not in self.now]
            if isinstance(node.meta["val"], torch.Tensor) and (users or node in results):
                self._sort_again(node, users)
        return self.now

    def _sort_again(self, node: fx.Node, users: Sequence[fx.Node]) -> None:
        """For readers that do not compute rows alone."""
        self.b.origin = node
        order = next(n for n, k in self.places.items() if k == 1)
        with self.b.graph.inserting_before(node.next):
            self.now[node] = self.b.op(aten.index.Tensor, self.own[node], [order])
        for user in users:
            user.replace_input_with(node, self.now[node])

    @property
    def n_rows(self) -> int:
        return int(_args(self.sort)[0].meta["val"].numel())

    def _follow(self, node: fx.Node) -> None:
        """Note what `node` is."""
        if node.target is operator.getitem:
            source, which = _args(node)
            if source is self.sort and which == 0:
                self.own[node] = _args(source)[0]
            elif source is self.sort:
                self.places[node] = 1
            elif source in self.back:
                self.back.add(node)
            elif source in self.own:
                self.own[node] = self.b.getitem(self.own[source], which)
        elif _sorts_up(node) and self.places.get(_args(node)[0]) == 1:
            self.back.add(node)
        elif k := self._repeats(node):
            self.places[node] = k
        elif _is_by_groups(node) and _ids_of_groups(node) is self.ids:
            self.own[node] = self.b.cast(_args(self.sort)[0], node.meta["val"].dtype)
        elif (put := self._put_back(node)) is not None:
            self.now[node] = put
        elif (read := self._looked_up(node)) is not None:
            self.own[node] = read
        elif self._is_by_row(node):
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), self._of_own)
            self.own[node] = self.b.emit(_target(node), args, kwargs)
            self.computed.append(node)

    def _of_own(self, node: fx.Node) -> fx.Node:
        return self.own.get(node, node)

    def _repeats(self, node: fx.Node) -> int | None:
        """k, if `node` has order // k in each row."""
        args = _args(node)
        k = self.places.get(args[0]) if args and isinstance(args[0], fx.Node) else None
        if k is None or _shape(node)[:1] != (self.n_rows,):
            return None
        if node.target in _SAME and node.meta["val"].dtype in (torch.int32, torch.int64):
            return k
        call = TracedCall.of(node)
        is_quotient = node.target is aten.floor_divide.default or (
            node.target is aten.div.Tensor_mode and call.bind()["rounding_mode"] is not None
        )
        return args[1] if is_quotient and k == 1 and isinstance(args[1], int) else None

    def _looked_up(self, node: fx.Node) -> fx.Node | None:
        """What `node` is of rows in their own order, if it puts rows in order."""
        x, places = _read_at(node)
        k = self.places.get(places)
        if k is None or x in self.own or len(x.meta["val"]) * k != self.n_rows:
            return None
        if k == 1:
            return x
        wide = self.b.op(aten.unsqueeze.default, x, 1)
        n, *rest = _shape(x)
        wide = self.b.op(aten.expand.default, wide, [n, k, *rest])
        return self.b.op(aten.reshape.default, wide, [n * k, *rest])

    def _put_back(self, node: fx.Node) -> fx.Node | None:
        """What `node` is without the sort, if it puts rows back to where they were."""
        x, back = _read_at(node)
        if x in self.own and back in self.back:
            return self.own[x]
        into, places, rows, adds = _written_at(node)
        k = self.places.get(places)
        if k is None or into is None or len(into.meta["val"]) * k != self.n_rows:
            return None
        if rows not in self.own:
            if k == 1 and not adds and _counts_up(rows, self.n_rows):
                self.back.add(node)
            return None
        own, (n, *rest) = self.own[rows], _shape(into)
        if not adds:
            return own if k == 1 else None
        if k > 1:
            each = self.b.op(aten.reshape.default, own, [n, k, *rest])
            own = self.b.op(aten.sum.dim_IntList, each, [1])
        return own if into.target in _ZEROS else self.b.op(aten.add.Tensor, into, own)

    def _is_by_row(self, node: fx.Node) -> bool:
        """Does it read sorted rows, and compute each alone?"""
        sources = node.all_input_nodes
        if not any(n in self.own for n in sources):
            return False
        if is_random(node) or self.b.random_seed in sources:
            return False  # numbers are drawn by position
        return row_dim(node, {n: 0 for n in sources if n in self.own}) == 0


def _sorts_up(node: fx.Node) -> bool:
    """Does it sort one list, ascending?"""
    if node.target not in _SORTS:
        return False
    bound = TracedCall.of(node).bind()
    return len(_shape(bound["self"])) == 1 and not bound["descending"]


def _read_at(node: fx.Node) -> tuple[Any, Any]:
    """(x, i) for x[i], rows of x at the indices i; else nothing."""
    args = _args(node)
    if node.target is aten.index.Tensor and len(args[1]) == 1:
        return (args[0], args[1][0]) if len(_shape(args[1][0])) == 1 else (None, None)
    if node.target is aten.gather.default and args[1] == 0:
        x, _, places = args[:3]
        return (x, places) if _shape(places)[1:] == _shape(x)[1:] else (None, None)
    return None, None


def _written_at(node: fx.Node) -> tuple[Any, Any, Any, bool]:
    """(x, i, v, adds) for x[i] = v or x[i] += v, of whole rows; else nothing."""
    args, nothing = _args(node), (None, None, None, False)
    if node.target is aten.index_put.default and len(args[1]) == 1:
        x, (places,), rows, *more = args
        adds = any(more)
    elif node.target in (aten.index_add.default, aten.index_copy.default):
        x, dim, places, rows = args[:4]
        adds = node.target is aten.index_add.default
        if dim != 0 or node.kwargs.get("alpha", 1) != 1:
            return nothing
    elif node.target in (aten.scatter_add.default, aten.scatter.src):
        x, dim, places, rows = args[:4]
        adds = node.target is aten.scatter_add.default
        if dim != 0 or _shape(places) != _shape(rows):
            return nothing
    else:
        return nothing
    is_whole = _shape(rows)[1:] == _shape(x)[1:] and len(_shape(rows)) == len(_shape(x))
    return (
        (x, places, rows, adds) if is_whole and _shape(rows)[:1] == _shape(places)[:1] else nothing
    )


def _is_by_groups(node: fx.Node) -> bool:
    """Is it the number of the group that each row is in (`trace/replaced.py`)?"""
    if node.target is not aten.searchsorted.Tensor or not node.kwargs.get("right"):
        return False
    return _counts_up(_args(node)[1], node.meta["val"].numel())


def _ids_of_groups(node: fx.Node) -> fx.Node | None:
    """The ids that number the rows' groups, if they are sorted by them."""
    if not _is_by_groups(node):
        return None
    ends = _source(_args(node)[0])
    n_groups = ends.meta["val"].numel()
    if ends.target is aten.cumsum.default and _args(ends)[1] in (0, -1):
        return _ids_counted(_source(_args(ends)[0]), n_groups)
    if not _is_by_groups(ends):
        return None
    rows = _source(_args(ends)[0])  # where each id ends in those that are sorted
    sort, which = _args(rows) if rows.target is operator.getitem else (None, None)
    if rows.target is aten.index.Tensor:
        ids, (order, *_) = _args(rows)
        sort, which = _args(order) if order.target is operator.getitem else (None, None)
        if which != 1 or not _sorts_up(sort) or _source(_args(sort)[0]) is not _source(ids):
            return None
    elif which != 0 or not _sorts_up(sort):
        return None
    return _source(_args(sort)[0])


def _ids_counted(counts: fx.Node, n_groups: int) -> fx.Node | None:
    """The ids of which `counts` says how often each of so many appears."""
    if counts.target is aten.histc.default:
        bound = TracedCall.of(counts).bind()
        bins = bound["bins"], bound["min"]
        is_each = bins == (n_groups, 0) and bound["max"] in (n_groups - 1, n_groups)
        return _source(bound["self"]) if is_each else None
    into, places, ones, adds = _written_at(counts)
    if adds and into.target in _ZEROS and ones.target in _ONES and _shape(into) == (n_groups,):
        return _source(places)
    if counts.target is aten.sum.dim_IntList:  # of rows that are one-hot
        hot, dims = _source(_args(counts)[0]), _args(counts)[1]
        is_over_rows = [*dims] == [*range(len(_shape(hot)) - 1)]
        if is_over_rows and hot.target is aten.eq.Tensor and _counts_up(_args(hot)[1], n_groups):
            ids = _args(hot)[0]
            return _source(ids) if _shape(ids) == (*_shape(hot)[:-1], 1) else None
    return None


def _counts_up(node: Any, n: int) -> bool:
    """Is it 0, 1, ... n - 1?"""
    is_range = isinstance(node, fx.Node) and node.op == "call_function"
    if not is_range or getattr(node.target, "overloadpacket", None) is not aten.arange:
        return False
    bound = TracedCall.of(node).bind()
    return (bound.get("start", 0), bound["end"], bound.get("step", 1)) == (0, n, 1)


def _source(node: fx.Node) -> fx.Node:
    """What `node` has the elements of, in another shape or dtype that holds them."""
    while node.target in (aten.reshape.default, aten.unsqueeze.default, aten.to.dtype):
        if node.meta["val"].dtype not in _COUNTING:
            break
        node = _args(node)[0]
    return node


def _args(node: fx.Node) -> tuple[Any, ...]:
    return node.args


def _target(node: fx.Node) -> torch._ops.OpOverload:
    assert isinstance(node.target, torch._ops.OpOverload)
    return node.target


def _shape(node: fx.Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)
