"""Writes through views: new values for the base and for its other views (`rebuilt_after`).

    base' = inverse(written)    link by link, from the written view back to its base
    view' = view(base')         for every other view that is read later

A link is a call whose result lies in the memory of its first argument. It can be inverted where
each element of the result has a known place in the base (`_inverse`). Gradients do not follow a
write through `detach()`, so that is inverted for buffers alone. A view is rebuilt by calling it
again.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

aten = torch.ops.aten

# Meta key of the new content of memory, to the node that had the old one. It lies in memory of its
# inputs and is no view of them, and it has the dtype of the old content.
WRITTEN = "written"
# Result k is part k of the first argument along a dim; no two parts have an element in common.
CUTS = frozenset(
    {
        aten.chunk,
        aten.split,
        aten.split_with_sizes,
        aten.tensor_split,
        aten.unbind,
        aten.unsafe_chunk,
        aten.unsafe_split,
        aten.unsafe_split_with_sizes,
    }
)
PERMUTES = frozenset(
    {
        aten.transpose,
        aten.swapaxes,
        aten.swapdims,
        aten.t,
        aten.numpy_T,
        aten.mT,
        aten.permute,
        aten.movedim,
        aten.moveaxis,
    }
)
# The elements in the same order, in another shape or the same one.
RESHAPES = frozenset(
    {
        aten.view,
        aten.view_as,
        aten.reshape,
        aten.reshape_as,
        aten.flatten,
        aten.ravel,
        aten.unflatten,
        aten.unsqueeze,
        aten.squeeze,
        aten.contiguous,
        aten.alias,
        aten.to,
        aten.type_as,
        aten.dropout,
    }
)
# Their results depend on how the argument lies in memory.
BY_STRIDES = frozenset({aten.as_strided})

# (what is viewed, the value written to the view, new nodes) -> the new value of what is viewed
Inverse = Callable[[fx.Node, fx.Node, "_Inserted"], fx.Node]


class CannotRebuild(Exception):
    """`node` is read after the write, but its new value is not known."""

    def __init__(self, node: fx.Node) -> None:
        super().__init__(str(node))
        self.node = node


def rebuilt_after(
    write: fx.Node,
    target: fx.Node,
    read_later: Collection[fx.Node],
    content: Callable[[fx.Node], fx.Node],
) -> tuple[fx.Node, dict[fx.Node, fx.Node]]:
    """(the base of `target`, old node -> new node for that base and for the views in `read_later`).

    `write` is the new value of `target`; `content(base)` is what the memory of a base holds now.
    New nodes are inserted right after the write. Raises `CannotRebuild` before it changes anything.
    """
    links, base = _links(target, content)
    inverses = [_inverse(view, base) for view in links]
    for node in read_later:
        if _links(node, content)[1] is not base:
            raise CannotRebuild(node)
    inserted = _Inserted(write)
    # A part of `CUTS` stays when another is written, so what it views may be of an older base.
    before = _Views(base, base, content, inserted)
    value = write
    for view, inverse in zip(links, inverses, strict=True):
        value = inverse(before.of(_source(view)), value, inserted)
    value.meta[WRITTEN] = base
    after = _Views(base, value, content, inserted)
    return base, {base: value} | {node: after.of(node) for node in read_later}


class _Views:
    """Views of a base on its new value; those of `base` itself are the nodes there are."""

    def __init__(
        self,
        base: fx.Node,
        value: fx.Node,
        content: Callable[[fx.Node], fx.Node],
        inserted: _Inserted,
    ) -> None:
        self._content, self._inserted = content, inserted
        self._made = {base: value}

    def of(self, node: fx.Node) -> fx.Node:
        """The base, or a view of it, on the new value."""
        if not _is_view(node):
            node = self._content(node)
        if node not in self._made:
            source = node.args[0]
            assert isinstance(source, fx.Node)
            seen = self.of(source)
            self._made[node] = (
                node
                if seen is source
                else self._inserted.like(node, node.target, (seen, *node.args[1:]), node.kwargs)
            )
        return self._made[node]


def shares_memory(a: fx.Node, b: fx.Node) -> bool:
    """Have traced values a storage in common? Fake tensors share them as real ones do."""
    return bool(storages(a) & storages(b))


def storages(node: fx.Node) -> set[int]:
    """The storages of a traced value."""
    leaves = pytree.tree_leaves(node.meta.get("val"))
    return {v.untyped_storage()._cdata for v in leaves if isinstance(v, torch.Tensor)}


def bound_arguments(node: fx.Node) -> dict[str, Any]:
    """Every argument of a call by name, with defaults filled in."""
    assert isinstance(node.target, torch._ops.OpOverload)
    schema = node.target._schema.arguments
    given = dict(zip((a.name for a in schema), node.args, strict=False)) | dict(node.kwargs)
    return {a.name: given.get(a.name, a.default_value) for a in schema}


class _Inserted:
    """Nodes after a write, in order, with its source line."""

    def __init__(self, write: fx.Node) -> None:
        self._graph, self._last = write.graph, write
        self._origin = {
            key: value
            for key, value in write.meta.items()
            if isinstance(key, str) and key not in ("val", WRITTEN)
        }

    def like(
        self, of: fx.Node, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] = {}
    ) -> fx.Node:
        """A call with the fake value of a node."""
        return self._call(of.meta["val"], target, args, kwargs)

    def new(self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] = {}) -> fx.Node:
        """A call of which fake tensors say the value."""
        with torch.no_grad():
            value = target(*fx.node.map_arg(args, lambda n: n.meta["val"]), **kwargs)
        return self._call(value, target, args, kwargs)

    def _call(
        self, value: Any, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> fx.Node:
        with self._graph.inserting_after(self._last):
            self._last = self._graph.call_function(target, args, dict(kwargs))
        self._last.meta = {"val": value, **self._origin}
        return self._last


def _links(node: fx.Node, content: Callable[[fx.Node], fx.Node]) -> tuple[list[fx.Node], fx.Node]:
    """The views from `node` back to its base, and what the base holds now."""
    links = []
    while _is_view(node):
        links.append(node)
        node = _source(node)
    return links, content(node)


def _is_view(node: fx.Node) -> bool:
    """Is it a function of the elements of its first argument, and in that one's memory?"""
    if node.op != "call_function" or WRITTEN in node.meta or not node.args:
        return False
    source = node.args[0]
    if not isinstance(source, fx.Node) or _packet(node) in BY_STRIDES:
        return False
    return shares_memory(node, source)


def _source(view: fx.Node) -> fx.Node:
    """What a view is of; a part of `CUTS` is of the tensor that is cut."""
    source = view.args[0]
    assert isinstance(source, fx.Node)
    if view.target is operator.getitem and _packet(source) in CUTS:
        return _source(source)
    return source


def _packet(node: fx.Node) -> Any:
    return getattr(node.target, "overloadpacket", None)


def _inverse(view: fx.Node, base: fx.Node) -> Inverse:
    """What makes the value of the source of a view from the value written to the view."""
    packet, of = _packet(view), _source(view)
    if view.target is operator.getitem and view.all_input_nodes[0] is not of:
        return _inverse_of_part(view.all_input_nodes[0], view.args[1])
    if packet in (aten.slice, aten.select):
        scatter = {aten.slice: aten.slice_scatter, aten.select: aten.select_scatter}[packet]
        rest, kwargs = view.args[1:], view.kwargs
        return lambda source, value, inserted: inserted.like(
            of, scatter.default, (source, value, *rest), kwargs
        )
    if packet in RESHAPES or (packet is aten.detach and base.op == "placeholder"):
        shape = list(of.meta["val"].shape)
        return lambda _, value, inserted: inserted.like(of, aten.reshape.default, (value, shape))
    if packet in PERMUTES:
        order = _order_of_dims(view)
        back = sorted(range(len(order)), key=order.__getitem__)
        return lambda _, value, inserted: inserted.like(of, aten.permute.default, (value, back))
    arguments = bound_arguments(view) if packet in (aten.narrow, aten.diagonal) else {}
    if packet is aten.narrow and isinstance(start := arguments["start"], int):
        return _inverse_of_slice(of, arguments["dim"], start, arguments["length"])
    if packet is aten.diagonal:
        return _inverse_of_diagonal(view, of, arguments)
    raise CannotRebuild(view)


def _inverse_of_part(call: fx.Node, index: Any) -> Inverse:
    """Of part `index` of a call of `CUTS`."""
    of, dim = _source(call), bound_arguments(call).get("dim", 0)
    if _packet(call) is aten.unbind:
        return lambda source, value, inserted: inserted.like(
            of, aten.select_scatter.default, (source, value, dim, index)
        )
    sizes = [part.shape[dim] for part in call.meta["val"]]
    return _inverse_of_slice(of, dim, sum(sizes[:index]), sizes[index])


def _inverse_of_slice(of: fx.Node, dim: int, start: int, length: int) -> Inverse:
    return lambda source, value, inserted: inserted.like(
        of, aten.slice_scatter.default, (source, value, dim, start, start + length)
    )


def _inverse_of_diagonal(view: fx.Node, of: fx.Node, arguments: Mapping[str, Any]) -> Inverse:
    """`where(is on the diagonal, written, source)`, of square matrices."""
    where = [arguments[name] for name in ("offset", "dim1", "dim2")]
    shape, (_, dim1, dim2) = of.meta["val"].shape, where
    if shape[dim1] != shape[dim2]:
        raise CannotRebuild(view)

    def inverse(source: fx.Node, value: fx.Node, inserted: _Inserted) -> fx.Node:
        ones = inserted.new(aten.ones_like.default, (value,))
        written, is_written = (
            inserted.new(aten.diag_embed.default, (v, *where)) for v in (value, ones)
        )
        chosen = inserted.new(aten.ne.Scalar, (is_written, 0))
        return inserted.like(of, aten.where.self, (chosen, written, source))

    return inverse


def _order_of_dims(view: fx.Node) -> list[int]:
    """Dim k of the result is dim order[k] of the source."""
    n_dims = _source(view).meta["val"].dim()
    probe = torch.empty([k + 2 for k in range(n_dims)], device="meta")  # all sizes differ
    assert isinstance(view.target, torch._ops.OpOverload)
    return [size - 2 for size in view.target(probe, *view.args[1:], **view.kwargs).shape]
