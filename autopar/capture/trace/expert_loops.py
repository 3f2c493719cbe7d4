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

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx

from autopar.capture.trace.expert_bodies import (
    VIEWS,
    Body,
    Choice,
    OtherLoopError,
    args_of,
    check,
    is_equal,
    shape_of,
)

aten = torch.ops.aten
_WHERE = (aten.where.default, aten.nonzero_numpy.default)
_ADDS = (aten.index_add_.default, aten.index_add.default)
_PUTS = (aten.index_put_.default, aten.index_put.default)
_SUMS = (aten.add.Tensor, aten.add_.Tensor)
_FRESH = (
    aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default, aten.empty.memory_format,
    aten.empty_like.default, aten.new_empty.default,
)  # fmt: skip


class _Write(NamedTuple):
    """into[places] = rows, or += if it adds; `places` may be one mask. `sum`: nodes that read what
    is there and add to it, before it is written."""

    into: fx.Node
    places: tuple[fx.Node, ...]
    rows: fx.Node
    adds: bool
    sum: tuple[fx.Node, ...] = ()


def join_loops(graph: fx.Graph) -> None:
    """Rewrite every loop over experts, in place."""
    found: list[fx.Node] = []
    for node in graph.nodes:
        choice = _choice_of(node)
        if choice is not None and not any(is_equal(choice.ids, ids) for ids in found[-1:]):
            found.append(choice.ids)
    for ids in found:
        try:
            _Loop(graph, ids).join()
        except OtherLoopError:
            continue


@dataclass
class _Loop:
    """The loop over the experts that `ids` name.

    expert    what depends on the rows of an expert, and of which; `choices` where that begins
    writes    expert -> the node that writes its rows, and what that does
    """

    graph: fx.Graph
    ids: fx.Node
    expert: dict[fx.Node, int] = field(default_factory=dict)
    choices: dict[fx.Node, Choice] = field(default_factory=dict)
    writes: dict[int, tuple[fx.Node, _Write]] = field(default_factory=dict)

    def join(self) -> None:
        """Raises `OtherLoopError`, and leaves the graph as it is, if it is another loop."""
        self._find()
        experts = [*range(len(self.writes))]
        check({*self.writes} == {*self.expert.values()} == {*experts})
        check(_n_named(self.ids) == len(experts))
        writes = [self.writes[e] for e in experts]
        last = self._check_writes(writes)
        unread = {node for _, write in writes for node in write.sum}
        computed = [
            [n for n, e in self.expert.items() if e == k and n not in unread and _has_values(n)]
            for k in experts
        ]
        check(len({tuple(n.target for n in of) for of in computed}) == 1)
        body, before = Body(self.graph, self.ids, self.expert, self.choices), {*self.graph.nodes}
        try:
            with self.graph.inserting_before(last):
                for nodes in zip(*computed, strict=True):
                    body.merge(nodes)
                result = self._write(body, writes[0][1])
        except OtherLoopError:
            for node in [n for n in reversed(self.graph.nodes) if n not in before]:
                self.graph.erase_node(node)
            raise
        last.target, last.args = result
        last.kwargs = {}
        gone = {*self.expert, *(node for node, _ in writes)} - {last}
        for node in [n for n in reversed(self.graph.nodes) if n in gone]:
            self.graph.erase_node(node)

    def _find(self) -> None:
        """Find what depends on rows of an expert, up to where they are written."""
        for node in self.graph.nodes:
            choice = _choice_of(node)
            if choice is not None and is_equal(choice.ids, self.ids):
                self.expert[node], self.choices[node] = choice.expert, choice
                continue
            of = {self.expert[n] for n in node.all_input_nodes if n in self.expert}
            write = _write_of(node)
            if write is not None and write.rows in self.expert and write.into not in self.expert:
                expert = self.expert[write.rows]
                check(of == {expert} and expert not in self.writes)
                self.writes[expert] = node, write
            elif of:
                check(len(of) == 1 and node.op == "call_function")
                self.expert[node] = of.pop()

    def _check_writes(self, writes: Sequence[tuple[fx.Node, _Write]]) -> fx.Node:
        """Each writes into what the one before wrote, in the same way, and nobody else reads or
        writes that. Returns the last."""
        order = {node: i for i, node in enumerate(self.graph.nodes)}
        chain = sorted(writes, key=lambda w: order[w[0]])
        into = chain[0][1].into
        check(into.target in _FRESH)
        for node, write in chain:
            check(write.into is into and {*into.users} <= {node, *write.sum})
            into = node
        ways = {(write.adds, len(write.sum), self._dims(write)) for _, write in chain}
        check(len(ways) == 1)
        # Indices and masks must list an expert's rows in the same order.
        check(len({choice.dims for choice in self.choices.values()}) == 1)
        own = {n for node, write in chain for n in (node, *write.sum)}
        begin = min(order[n] for n in self.expert)
        for node in [n for n, i in order.items() if begin < i < order[into] and n not in own]:
            target = node.target
            check(not isinstance(target, torch._ops.OpOverload) or not target._schema.is_mutable)
        return into

    def _dims(self, write: _Write) -> tuple[int, ...]:
        """The dims of ids whose indices say where rows are written."""
        found: list[int] = []
        for place in write.places:
            is_index = place.target is operator.getitem
            choice = _choice_of(args_of(place)[0]) if is_index else _chosen(place)
            if choice is None or not is_equal(choice.ids, self.ids):
                raise OtherLoopError
            check(choice.expert == self.expert[write.rows])
            check(is_index or choice.dims == tuple(range(len(shape_of(self.ids)))))
            found += [choice.dims[args_of(place)[1]]] if is_index else choice.dims
        return tuple(found)

    def _write(self, body: Body, write: _Write) -> tuple[Any, tuple[Any, ...]]:
        """The operator that writes all rows, and its arguments."""
        rows, dims, ids = body.merged[write.rows], self._dims(write), shape_of(self.ids)
        into = write.into.meta["val"]
        check(body.dims[rows] == 0 and rows.meta["val"].dtype == into.dtype)
        check(dims == tuple(sorted({*dims})))
        others = [d for d in range(len(ids)) if d not in dims]
        shape = [*ids, *shape_of(rows)[1:]]
        check([*into.shape] == [n for d, n in enumerate(shape) if d not in others])
        if not write.adds and not others and not write.sum:
            return aten.reshape.default, (rows, shape)
        check(
            write.adds or (bool(write.sum) and (not others or _takes_none_twice(self.ids, others)))
        )
        rows = body.make(write.rows, aten.reshape.default, rows, shape)
        if others:
            rows = body.make(write.rows, aten.sum.dim_IntList, rows, others)
        return aten.add.Tensor, (write.into, rows)


def _choice_of(node: fx.Node) -> Choice | None:
    """Of a node that reads rows of one expert, or says where they are."""
    if node.target in _WHERE:
        return _chosen(args_of(node)[0])
    if node.target is aten.index.Tensor:
        _, (first, *others) = args_of(node)
        return None if first is None or others else _chosen(first)
    return None


def _chosen(mask: Any) -> Choice | None:
    """Whose rows a mask has."""
    if mask.meta["val"].dtype is torch.bool and mask.target is aten.eq.Scalar:
        ids, expert = args_of(mask)
        is_count = isinstance(expert, int) and not ids.meta["val"].is_floating_point()
        return Choice(ids, expert, tuple(range(len(shape_of(ids))))) if is_count else None
    while mask.target in (aten.to.dtype, aten.squeeze.dim) and _is_whole(mask):
        mask = args_of(mask)[0]
    if mask.target is not aten.select.int:
        return None
    hot, dim, expert = args_of(mask)
    order = [*range(len(shape_of(hot)))]
    if hot.target is aten.permute.default:
        hot, order = args_of(hot)
    if hot.target is not aten.one_hot.default:
        return None
    order = [d % len(order) for d in order]
    dims = tuple(d for i, d in enumerate(order) if i != dim % len(order))
    return Choice(args_of(hot)[0], expert, dims) if len(order) - 1 not in dims else None


def _is_whole(node: fx.Node) -> bool:
    return shape_of(node) == shape_of(args_of(node)[0])


def _write_of(node: fx.Node) -> _Write | None:
    """What a node writes to rows."""
    if node.target in _ADDS:
        into, dim, place, rows = args_of(node)[:4]
        is_plain = dim == 0 and node.kwargs.get("alpha", 1) == 1
        return _Write(into, (place,), rows, True) if is_plain else None
    if node.target not in _PUTS:
        return None
    into, places, rows, *more = args_of(node)
    if None in places:
        return None
    if rows.target in _SUMS and not any(more) and not rows.kwargs:
        read, other = args_of(rows)
        for one, added in ((read, other), (other, read)):
            is_read = isinstance(one, fx.Node) and one.target is aten.index.Tensor
            if is_read and one.args[0] is into and tuple(one.args[1]) == tuple(places):
                return _Write(into, tuple(places), added, False, (one, rows))
    return _Write(into, tuple(places), rows, any(more))


def _chooser(ids: fx.Node) -> fx.Node:
    """What chooses the ids."""
    while ids.target in (*VIEWS, aten.to.dtype, aten.flatten.using_ints) or (
        ids.target is operator.getitem and ids.args[1] == 1
    ):
        ids = args_of(ids)[0]
    return ids


def _takes_none_twice(ids: fx.Node, dims: Sequence[int]) -> bool:
    """Are ids along the dims those that one `topk` chose?"""
    chooser, shape = _chooser(ids), shape_of(ids)
    if chooser.target is not aten.topk.default or [*dims] != [len(shape) - 1]:
        return False
    return _n_named(ids) is not None and args_of(chooser)[1] == shape[-1]


def _n_named(ids: fx.Node) -> int | None:
    """How many experts the ids are of, where their scores say so."""
    chooser = _chooser(ids)
    if chooser.target is aten.topk.default:
        scores, _, *dims = args_of(chooser)
        dims = dims[:1] or [-1]
    elif chooser.target in (aten.argmax.default, aten.max.dim):
        scores, *dims = args_of(chooser)[:2]
    else:
        return None
    shape = shape_of(scores)
    return shape[-1] if dims in ([-1], [len(shape) - 1]) else None


def _has_values(node: fx.Node) -> bool:
    """Are its results tensors, and is it more than the places of rows?"""
    values = node.meta.get("val")
    values = values if isinstance(values, (list, tuple)) else [values]
    return node.target not in _WHERE and all(isinstance(v, torch.Tensor) for v in values)
