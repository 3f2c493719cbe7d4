"""A loop over experts, each with the rows that chose it, as one function of all rows.

    for e in range(E):                                      ids [n, k], or [m] in one dim
        token, slot = torch.where(ids == e)
        out.index_add_(0, token, f(x[token], W[e]) * gates[token, slot, None])

becomes, of m = n k rows, one for each token and slot,

    rows = f(x repeated k times, W by ids) * gates          out = sum of rows over slots

How many rows an expert has depends on the data, so no rank could know the shapes. A matmul with the
matrix of each expert is `expert_linear` of their stack; another tensor of each is looked up by ids.
f must be a function row by row, the same for all experts but for their tensors, and every expert
must be in the loop. All else stays, and is refused as any shape that depends on data.

Rows may be chosen by a mask, too (`y[ids == e] = f(x[ids == e])`), of `one_hot` of ids, and be
written by `+=` if a token has each expert once, as `topk` chooses them.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx

from autopar.capture.trace.replaced import insert_like
from autopar.rules import row_dim

aten = torch.ops.aten
_WHERE = (aten.where.default, aten.nonzero_numpy.default)
_ADDS = (aten.index_add_.default, aten.index_add.default)
_PUTS = (aten.index_put_.default, aten.index_put.default)
_MATMULS = (aten.matmul.default, aten.mm.default)
_SUMS = (aten.add.Tensor, aten.add_.Tensor)
_FRESH = (
    aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default, aten.empty.memory_format,
    aten.empty_like.default, aten.new_empty.default,
)  # fmt: skip
_VIEWS = (
    aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.unsqueeze.default,
    aten.squeeze.dim,
)  # fmt: skip
_TURNS = (aten.t.default, aten.mT.default, aten.numpy_T.default)


class _Choice(NamedTuple):
    """The rows of one expert: where `ids` are `expert`. `dims` of ids are those of the mask."""

    ids: fx.Node
    expert: int
    dims: tuple[int, ...]


class _Write(NamedTuple):
    """into[places] = rows, or += if it adds; `places` may be one mask. `sum`: nodes that read what
    is there and add to it, before it is written."""

    into: fx.Node
    places: tuple[fx.Node, ...]
    rows: fx.Node
    adds: bool
    sum: tuple[fx.Node, ...] = ()


class _OtherwiseError(Exception):
    """The loop is not of this form."""


def join_loops(graph: fx.Graph) -> None:
    """Rewrite every loop over experts, in place."""
    found: list[fx.Node] = []
    for node in graph.nodes:
        choice = _choice_of(node)
        if choice is not None and not any(_is_equal(choice.ids, ids) for ids in found[-1:]):
            found.append(choice.ids)
    for ids in found:
        try:
            _Loop(graph, ids).join()
        except _OtherwiseError:
            continue


def _choice_of(node: fx.Node) -> _Choice | None:
    """Of a node that reads rows of one expert, or says where they are."""
    if node.target in _WHERE:
        return _chosen(node.args[0])
    if node.target is aten.index.Tensor:
        _, (first, *others) = _args(node)
        return None if first is None or others else _chosen(first)
    return None


def _chosen(mask: Any) -> _Choice | None:
    """Whose rows a mask has."""
    if mask.meta["val"].dtype is torch.bool and mask.target is aten.eq.Scalar:
        ids, expert = _args(mask)
        is_count = isinstance(expert, int) and not ids.meta["val"].is_floating_point()
        return _Choice(ids, expert, tuple(range(len(_shape(ids))))) if is_count else None
    while mask.target in (aten.to.dtype, aten.squeeze.dim) and _is_whole(mask):
        mask = _args(mask)[0]
    if mask.target is not aten.select.int:
        return None
    hot, dim, expert = _args(mask)
    order = [*range(len(_shape(hot)))]
    if hot.target is aten.permute.default:
        hot, order = _args(hot)
    if hot.target is not aten.one_hot.default:
        return None
    order = [d % len(order) for d in order]
    dims = tuple(d for i, d in enumerate(order) if i != dim % len(order))
    return _Choice(_args(hot)[0], expert, dims) if len(order) - 1 not in dims else None


def _is_whole(node: fx.Node) -> bool:
    return _shape(node) == _shape(_args(node)[0])


class _Each(NamedTuple):
    """A tensor of each expert."""

    nodes: tuple[fx.Node, ...]


@dataclass
class _Loop:
    """The loop over the experts that `ids` name.

    expert    what depends on the rows of an expert, and of which
    writes    expert -> the node that writes its rows, and what that does
    first     node of an expert -> that of expert 0
    places    node of expert 0 -> the dim of ids whose indices it has
    merged    node of expert 0 -> that of all rows; `dims` has its dim of rows
    """

    graph: fx.Graph
    ids: fx.Node
    expert: dict[fx.Node, int] = field(default_factory=dict)
    writes: dict[int, tuple[fx.Node, _Write]] = field(default_factory=dict)
    first: dict[fx.Node, fx.Node] = field(default_factory=dict)
    places: dict[fx.Node, int] = field(default_factory=dict)
    merged: dict[fx.Node, fx.Node] = field(default_factory=dict)
    dims: dict[fx.Node, int] = field(default_factory=dict)
    made: dict[Any, fx.Node] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, ...]:
        return _shape(self.ids)

    @property
    def n_rows(self) -> int:
        return math.prod(self.shape)

    def join(self) -> None:
        """Raises `_OtherwiseError`, and leaves the graph as it is, if it is another loop."""
        self._find()
        experts = [*range(len(self.writes))]
        _check({*self.writes} == {*self.expert.values()} == {*experts})
        _check(_n_named(self.ids) == len(experts))
        writes = [self.writes[e] for e in experts]
        last = self._check_writes(writes)
        unread = {node for _, write in writes for node in write.sum}
        bodies = [
            [n for n, e in self.expert.items() if e == k and n not in unread and _has_values(n)]
            for k in experts
        ]
        _check(len({tuple(n.target for n in body) for body in bodies}) == 1)
        before = {*self.graph.nodes}
        try:
            with self.graph.inserting_before(last):
                for nodes in zip(*bodies, strict=True):
                    self._merge(nodes)
                result = self._write(writes[0][1])
        except _OtherwiseError:
            for node in [n for n in reversed(self.graph.nodes) if n not in before]:
                self.graph.erase_node(node)
            raise
        last.target, last.args, last.kwargs = result
        gone = {*self.expert, *(node for node, _ in writes)} - {last}
        for node in [n for n in reversed(self.graph.nodes) if n in gone]:
            self.graph.erase_node(node)

    def _find(self) -> None:
        """Find what depends on rows of an expert, up to where they are written."""
        for node in self.graph.nodes:
            choice = _choice_of(node)
            if choice is not None and _is_equal(choice.ids, self.ids):
                self.expert[node] = choice.expert
                continue
            of = {self.expert[n] for n in node.all_input_nodes if n in self.expert}
            write = _write_of(node)
            if write is not None and write.rows in self.expert and write.into not in self.expert:
                expert = self.expert[write.rows]
                _check(of == {expert} and expert not in self.writes)
                self.writes[expert] = node, write
            elif of:
                _check(len(of) == 1 and node.op == "call_function")
                self.expert[node] = of.pop()

    def _check_writes(self, writes: Sequence[tuple[fx.Node, _Write]]) -> fx.Node:
        """All write what one before wrote, alone, to the rows that they were; returns the last."""
        order = {node: i for i, node in enumerate(self.graph.nodes)}
        chain = sorted(writes, key=lambda w: order[w[0]])
        into = chain[0][1].into
        _check(into.target in _FRESH)
        for node, write in chain:
            _check(write.into is into and {*into.users} <= {node, *write.sum})
            _check(
                (write.adds, len(write.sum)) == (chain[0][1].adds, len(chain[0][1].sum))
                and self._dims(write) == self._dims(chain[0][1])
            )
            into = node
        own = {n for node, write in chain for n in (node, *write.sum)}
        begin = min(order[n] for n in self.expert)
        for node, i in order.items():
            is_inside = begin < i < order[into] and isinstance(node.target, torch._ops.OpOverload)
            _check(not is_inside or node in own or not node.target._schema.is_mutable)
        return into

    def _dims(self, write: _Write) -> tuple[int, ...]:
        """The dims of ids whose indices say where rows are written."""
        found: list[int] = []
        for place in write.places:
            if place.target is operator.getitem:
                where, which = _args(place)
                choice = _choice_of(where)
                _check(choice is not None)
                found.append(choice.dims[which])
            else:
                choice = _chosen(place)
                _check(choice is not None)
                found += choice.dims
            _check(_is_equal(choice.ids, self.ids) and choice.expert == self.expert[write.rows])
        return tuple(found)

    def _merge(self, nodes: Sequence[fx.Node]) -> None:
        """One node for those of all experts."""
        first, target = nodes[0], nodes[0].target
        self.first |= dict.fromkeys(nodes, first)
        if target is operator.getitem and _choice_of(_args(first)[0]) is not None:
            dims = {_choice_of(_args(n)[0]).dims[_args(n)[1]] for n in nodes}  # type: ignore[union-attr]
            _check(len(dims) == 1)
            (self.places[first],) = dims
            return
        if target is aten.index.Tensor and _choice_of(first) is not None:
            _check(len({_args(n)[0] for n in nodes}) == 1)
            self._look_up(first, _args(first)[0], 0, _choice_of(first).dims)  # type: ignore[union-attr]
            return
        args, kwargs = (
            self._joined([n.args for n in nodes]),
            self._joined([n.kwargs for n in nodes]),
        )
        if target is aten.index.Tensor:
            source, indices = args
            places = [n for n in indices if n is not None]
            n_before = len(indices) - len(places)
            _check(all(isinstance(n, int) for n in places) and None not in indices[n_before:])
            self._look_up(first, source, n_before, tuple(places))
        elif target is aten.dropout.default:
            _check(args[1] == 0 or not args[2])
            self._put(first, args[0], self.dims[args[0]])
        elif target is aten.linear.default and isinstance(args[1], _Each):
            x, w, *biases = args
            self._matmul(first, x, w, False, *biases)
        elif target in _MATMULS and isinstance(args[1], _Each):
            self._matmul(first, *args, True)
        else:
            self._call(first, args, kwargs)

    def _joined(self, values: Sequence[Any]) -> Any:
        """The same argument of all experts, as one of all rows."""
        value = values[0]
        if isinstance(value, (list, tuple)):
            _check(len({len(v) for v in values}) == 1)
            return tuple(self._joined(of) for of in zip(*values, strict=True))
        if isinstance(value, dict):
            _check(len({tuple(v) for v in values}) == 1)
            return {key: self._joined([v[key] for v in values]) for key in value}
        if not isinstance(value, fx.Node):
            _check(all(type(v) is type(value) and v == value for v in values))
            return value
        _check(all(isinstance(v, fx.Node) for v in values))
        if value in self.expert:
            if value.target is aten.sym_size.int:
                return self._size(values)
            _check({self.first.get(v) for v in values} == {value})
            return self.places[value] if value in self.places else self.merged[value]
        _check(not any(v in self.expert for v in values))
        if all(_is_equal(v, value) for v in values):
            return value
        _check(len({_shape(v) for v in values}) == 1)
        return _Each(tuple(values))

    def _size(self, sizes: Sequence[fx.Node]) -> Any:
        """The number of an expert's rows, as that of all."""
        source, dim = _args(sizes[0])
        sources = {self.first.get(_args(n)[0]) for n in sizes}
        _check(sources == {source} and {_args(n)[1] for n in sizes} == {dim})
        _check(dim == (0 if source in self.places else self.dims[self.merged[source]]))
        return _AllRows(self.n_rows)

    def _look_up(self, node: fx.Node, x: Any, n_before: int, dims: tuple[int, ...]) -> None:
        """Rows of x, at indices of these dims of ids behind other dims, for all of ids."""
        _check(isinstance(x, fx.Node) and x not in self.dims)
        shape, ids = _shape(x), self.shape
        before, rest = shape[:n_before], shape[n_before + len(dims) :]
        _check(shape[n_before : n_before + len(dims)] == tuple(ids[d] for d in dims))
        _check(dims == tuple(sorted({*dims})))
        if len(dims) < len(ids):
            apart = [n if d in dims else 1 for d, n in enumerate(ids)]
            x = self._make(node, aten.reshape.default, x, [*before, *apart, *rest])
            x = self._make(node, aten.expand.default, x, [*before, *ids, *rest])
        x = self._make(node, aten.reshape.default, x, [*before, self.n_rows, *rest])
        self._put(node, x, n_before)

    def _matmul(self, node: fx.Node, x: Any, w: Any, on_right: bool, bias: Any = None) -> None:
        """Rows with the matrices of their experts: w x, or x w if that is `on_right`."""
        _check(self.dims.get(x) == 0 and len(_shape(x)) == len(_shape(w.nodes[0])) == 2)
        column = self._make(node, aten.unsqueeze.default, x, 1 if on_right else 2)
        factors = (column, self._by_ids(node, w)) if on_right else (self._by_ids(node, w), column)
        y = self._make(node, aten.bmm.default, *factors)
        y = self._make(node, aten.squeeze.dim, y, 1 if on_right else 2)
        if bias is not None:
            added = self._by_ids(node, bias) if isinstance(bias, _Each) else bias
            added = self._make(node, aten.type_as.default, added, y)  # as autocast casts a bias
            y = self._make(node, aten.add.Tensor, y, added)
        self._put(node, y, 0)

    def _call(self, node: fx.Node, args: Any, kwargs: Any) -> None:
        """An operator that computes each row alone."""
        target: Any = node.target
        if target is operator.getitem:
            self._put(node, self._make(node, target, *args), self.dims[args[0]])
            return
        _check(not target._schema.is_mutable and _draws_nothing(target))
        is_view = target in _VIEWS
        rank = max((len(_shape(n)) for n in _flat(args) if n in self.dims), default=0)

        def plain(value: Any) -> Any:
            if isinstance(value, (list, tuple)):
                return [plain(v) for v in value]
            if isinstance(value, _AllRows):
                _check(is_view or target is aten.expand.default)
                return value.n
            return self._beside(node, value, rank) if isinstance(value, _Each) else value

        made = self._make(node, target, *plain(args), **{k: plain(v) for k, v in kwargs.items()})
        rows = {n: self.dims[n] for n in made.all_input_nodes if n in self.dims}
        dim = _dim_of_view(made, rows) if is_view else row_dim(made, rows)
        _check(dim is not None)
        self._put(node, made, dim)

    def _beside(self, node: fx.Node, each: _Each, rank: int) -> fx.Node:
        """A tensor of each expert, for each row, to be broadcast to so many dims."""
        own = _shape(each.nodes[0])
        _check(len(own) < rank)
        found = self._by_ids(node, each)
        shape = [self.n_rows, *[1] * (rank - 1 - len(own)), *own]
        found = self._make(node, aten.reshape.default, found, shape)
        self.dims[found] = 0
        return found

    def _by_ids(self, node: fx.Node, each: _Each) -> fx.Node:
        """What each row's expert has."""
        ids = self._make(node, aten.reshape.default, self.ids, [self.n_rows])
        return self._make(node, aten.index.Tensor, self._stacked(node, each.nodes), [ids])

    def _stacked(self, node: fx.Node, nodes: tuple[fx.Node, ...]) -> fx.Node:
        """Tensors of all experts, one after another; those that are parts of one are not copied."""
        target, sources = nodes[0].target, tuple(n.args[0] if n.args else n for n in nodes)
        if all(n.target is target for n in nodes):
            source = sources[0]
            is_one = len({*sources}) == 1
            if target is operator.getitem and is_one and source.target is aten.unbind.int:
                source, *dims = _args(source)
                if dims in ([], [0]) and [n.args[1] for n in nodes] == [
                    *range(len(source.meta["val"]))
                ]:
                    return source
            if target is aten.select.int and is_one:
                parts = [n.args[1:] for n in nodes]
                if parts == [(0, e) for e in range(len(source.meta["val"]))]:
                    return source
            if target in _TURNS and len(_shape(nodes[0])) == 2:
                stack = self._stacked(node, sources)
                return self._make(node, aten.transpose.int, stack, 1, 2)
        return self._make(node, aten.stack.default, list(nodes))

    def _write(self, write: _Write) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """The operator that writes all rows."""
        rows, dims = self.merged[write.rows], self._dims(write)
        into, ids = write.into.meta["val"], self.shape
        _check(self.dims[rows] == 0 and rows.meta["val"].dtype == into.dtype)
        others = [d for d in range(len(ids)) if d not in dims]
        _check(dims == tuple(sorted({*dims})))
        shape = (*ids, *_shape(rows)[1:])
        _check(tuple(into.shape) == tuple(n for d, n in enumerate(shape) if d not in others))
        adds = write.adds
        if write.sum:
            _check(not others or _is_top(self.ids))
            adds = True
        if not adds:
            _check(not others)
            return aten.reshape.default, (rows, [*shape]), {}
        rows = self._make(write.rows, aten.reshape.default, rows, [*shape])
        if others:
            rows = self._make(write.rows, aten.sum.dim_IntList, rows, others)
        return aten.add.Tensor, (write.into, rows), {}

    def _make(self, like: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        key = target, repr(args), repr(kwargs)
        if key not in self.made:
            self.made[key] = insert_like(self.graph, like, target, *args, **kwargs)
        return self.made[key]

    def _put(self, node: fx.Node, merged: fx.Node, dim: Any) -> None:
        self.merged[node], self.dims[merged] = merged, dim


class _AllRows(NamedTuple):
    """The number of all rows, where a trace has that of an expert's."""

    n: int


def _write_of(node: fx.Node) -> _Write | None:
    """What a node writes to rows."""
    if node.target in _ADDS:
        into, dim, place, rows = _args(node)[:4]
        is_plain = dim == 0 and node.kwargs.get("alpha", 1) == 1
        return _Write(into, (place,), rows, True) if is_plain else None
    if node.target not in _PUTS:
        return None
    into, places, rows, *more = _args(node)
    if None in places:
        return None
    if rows.target in _SUMS and not any(more) and not rows.kwargs:
        read, other = _args(rows)
        for one, added in ((read, other), (other, read)):
            is_read = isinstance(one, fx.Node) and one.target is aten.index.Tensor
            if is_read and one.args[0] is into and tuple(one.args[1]) == tuple(places):
                return _Write(into, tuple(places), added, False, (one, rows))
    return _Write(into, tuple(places), rows, any(more))


def _is_equal(value: Any, other: Any, depth: int = 6) -> bool:
    """Are they the same node, or the same function of the same, or equal literals?"""
    if not isinstance(value, fx.Node) or not isinstance(other, fx.Node):
        return type(value) is type(other) and bool(value == other)
    if value is other or value.target is not other.target or value.op != "call_function":
        return value is other
    is_operator = isinstance(value.target, torch._ops.OpOverload)
    if is_operator and not _draws_nothing(value.target):
        return False
    pairs = zip(_args(value), _args(other), strict=False)
    is_long = len(value.args) == len(other.args) and value.kwargs == other.kwargs
    return depth > 0 and is_long and all(_is_equal(a, b, depth - 1) for a, b in pairs)


def _chooser(ids: fx.Node) -> fx.Node:
    """What chooses the ids."""
    while ids.target in (*_VIEWS, aten.to.dtype, aten.flatten.using_ints) or (
        ids.target is operator.getitem and ids.args[1] == 1
    ):
        ids = _args(ids)[0]
    return ids


def _is_top(ids: fx.Node) -> bool:
    """Are they of `topk`, which takes none twice?"""
    return _chooser(ids).target is aten.topk.default


def _n_named(ids: fx.Node) -> int | None:
    """How many experts the ids are of, where their scores say so."""
    chooser = _chooser(ids)
    if chooser.target is aten.topk.default:
        scores, _, *dims = _args(chooser)
        dims = dims[:1] or [-1]
    elif chooser.target in (aten.argmax.default, aten.max.dim):
        scores, *dims = _args(chooser)[:2]
    else:
        return None
    shape = _shape(scores)
    return shape[-1] if dims in ([-1], [len(shape) - 1]) else None


def _dim_of_view(node: fx.Node, rows: dict[fx.Node, int]) -> int | None:
    """Where the dim of rows is in another shape of the same elements."""
    ((source, dim),) = rows.items()
    shape, other = _shape(source), _shape(node)
    n_before = math.prod(shape[:dim])
    return next(
        (i for i, n in enumerate(other) if n == shape[dim] and math.prod(other[:i]) == n_before),
        None,
    )


def _draws_nothing(target: torch._ops.OpOverload) -> bool:
    return torch.Tag.nondeterministic_seeded not in target.tags


def _has_values(node: fx.Node) -> bool:
    """Are its results tensors, and is it more than the places of rows?"""
    values = node.meta.get("val")
    values = values if isinstance(values, (list, tuple)) else [values]
    return node.target not in _WHERE and all(isinstance(v, torch.Tensor) for v in values)


def _flat(values: Any) -> list[Any]:
    if isinstance(values, (list, tuple)) and not isinstance(values, _Each):
        return [v for value in values for v in _flat(value)]
    return [values] if isinstance(values, fx.Node) else []


def _check(holds: bool) -> None:
    if not holds:
        raise _OtherwiseError


def _args(node: fx.Node) -> tuple[Any, ...]:
    return node.args


def _shape(node: fx.Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)
