"""Writes through views: new values for the base and for its other views (`rebuilt_after`).

    base' = scatter(base, written)    link by link, from the written view back to its base
    view' = view(base')               for every other view that is read later

A link can be undone only if it selects a known part of the base (`SCATTERS`), or all of a buffer
(`buffer.detach()`; of a result, autograd would not see the write). A view can be rebuilt only if it
is never a copy (`VIEWS`).
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import fx

aten = torch.ops.aten

SCATTERS: dict[object, torch._ops.OpOverload] = {
    aten.slice.Tensor: aten.slice_scatter.default,
    aten.select.int: aten.select_scatter.default,
}
VIEWS = frozenset(
    {
        *SCATTERS,
        aten.detach.default,
        aten.view.default,
        aten.expand.default,
        aten.unsqueeze.default,
        aten.squeeze.dim,
        aten.permute.default,
        aten.transpose.int,
        aten.t.default,
    }
)


class CannotRebuild(Exception):
    """`node` is read after the write, but its new value is not known."""

    def __init__(self, node: fx.Node) -> None:
        super().__init__(str(node))
        self.node = node


def rebuilt_after(
    write: fx.Node, target: fx.Node, read_later: Collection[fx.Node]
) -> dict[fx.Node, fx.Node]:
    """Old node -> new node, for the base of `target` and for the views in `read_later`.

    `write` is the new value of `target`. New nodes are inserted right after it. Raises
    `CannotRebuild` before it changes anything.
    """
    links = _links(target)
    base = _source(links[-1]) if links else target
    for view in links:
        is_same = view.target is aten.detach.default and base.op == "placeholder"
        if view.target not in SCATTERS and not is_same:
            raise CannotRebuild(view)
    for node in read_later:
        if (_source(above[-1]) if (above := _links(node)) else node) is not base:
            raise CannotRebuild(node)
    at = write
    for view in links:
        if view.target not in SCATTERS:
            continue
        arguments = (_source(view), at, *view.args[1:])
        at = _insert(write, at, SCATTERS[view.target], arguments, view.kwargs, _source(view))
    new = {base: at}
    for node in read_later:
        for view in reversed(_links(node)):  # outermost first
            if view not in new:
                arguments = (new[_source(view)], *view.args[1:])
                at = _insert(write, at, view.target, arguments, view.kwargs, view)
                new[view] = at
    return new


def _links(node: fx.Node) -> list[fx.Node]:
    """The views from `node` back to its base, without the base."""
    links = []
    while node.op == "call_function" and node.target in VIEWS:
        links.append(node)
        node = _source(node)
    return links


def _source(view: fx.Node) -> fx.Node:
    source = view.args[0]
    assert isinstance(source, fx.Node)
    return source


def _insert(
    write: fx.Node, after: fx.Node, target: object, args: object, kwargs: object, like: fx.Node
) -> fx.Node:
    """A new node with the source line of `write` and the fake value of `like`."""
    with write.graph.inserting_after(after):
        node = write.graph.call_function(target, args, kwargs)  # type: ignore[arg-type]
    node.meta = {k: v for k, v in write.meta.items() if isinstance(k, str)}
    node.meta["val"] = like.meta["val"]
    return node
