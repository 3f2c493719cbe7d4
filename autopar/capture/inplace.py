"""Makes in-place operators functional, or refuses where the meaning could change.

`y = x.add_(b)` becomes `y = add(x, b)`, and every later use of `x` reads `y`. This is correct if
no input or parameter shares the memory of x. Two other writes are treated alike:
`torch.add(a, b, out=x)`, and writes that the schema does not show (`HIDDEN_WRITES`).

Other values may alias x and be read later. If they are plain views of one base, they are rebuilt
from the written value (`view_writes.py`); else the write is refused. Aliasing is
over-approximated by union-find over values (`_Aliases`): from the operator schemas, from a few
composites that may return their input, and from the memory that traced values share. Schemas of
composites that are made of views (`meshgrid`, `einsum`, `atleast_3d`) do not say so.

A write to a buffer is allowed. The last value written is the buffer's content after the forward
pass.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autopar.capture.names import source_line
from autopar.capture.overlaps import are_one_view, overlaps_itself, share_elements
from autopar.capture.view_writes import (
    CUTS,
    WRITTEN,
    CannotRebuild,
    bound_arguments,
    rebuilt_after,
    shares_memory,
    storages,
)
from autopar.errors import NotSupportedError

aten = torch.ops.aten

# Composites that may return their input itself although their schema does not say so.
MAY_RETURN_INPUT = frozenset(
    {
        aten.dropout,
        aten.type_as,
        aten.feature_dropout,
        aten.unsafe_chunk,
        aten.unsafe_split,
        aten.unsafe_split_with_sizes,
    }
)
# They change the shape of their input in place, and no element.
SHAPED_IN_PLACE: dict[Any, torch._ops.OpOverload] = {
    aten.transpose_.default: aten.transpose.int,
    aten.t_.default: aten.t.default,
    aten.squeeze_.default: aten.squeeze.default,
    aten.squeeze_.dim: aten.squeeze.dim,
    aten.squeeze_.dims: aten.squeeze.dims,
    aten.unsqueeze_.default: aten.unsqueeze.default,
}
# In-place operators whose functional form has another name.
OTHER_NAMES = {
    aten.bernoulli_.float: aten.bernoulli.p,
    aten.normal_.default: aten.normal_functional.default,
    aten.__iand__.Tensor: aten.bitwise_and.Tensor,
    aten.__iand__.Scalar: aten.bitwise_and.Scalar,
    aten.__ior__.Tensor: aten.bitwise_or.Tensor,
    aten.__ior__.Scalar: aten.bitwise_or.Scalar,
    aten.__ixor__.Tensor: aten.bitwise_xor.Tensor,
    aten.__ixor__.Scalar: aten.bitwise_xor.Scalar,
    aten.__ilshift__.Tensor: aten.bitwise_left_shift.Tensor,
    aten.__ilshift__.Scalar: aten.bitwise_left_shift.Tensor_Scalar,
    aten.__irshift__.Tensor: aten.bitwise_right_shift.Tensor,
    aten.__irshift__.Scalar: aten.bitwise_right_shift.Tensor_Scalar,
}
# The functional form of batch norm in training, and the positions of the new statistics.
BATCH_NORM = aten._native_batch_norm_legit_functional.default
HIDDEN_WRITES = (("running_mean", 3), ("running_var", 4))


def functionalise(
    graph: fx.Graph, stored: Mapping[str, str], buffers: Collection[str] = ()
) -> dict[str, fx.Node]:
    """Rewrite `graph` in place. Returns the new value of every buffer that changes.

    stored     descriptions of placeholders, for error messages
    buffers    placeholders that may change

    Raises `NotSupportedError`, naming the line, for any other visible mutation.
    """
    for node in list(graph.find_nodes(op="call_function", target=aten.fill_diagonal_.default)):
        _fill_through_view(node)
    return _Functionaliser(graph, stored, frozenset(buffers)).run()


class _Functionaliser:
    """One walk over the graph; `contents` maps the values that buffers hold here to their names."""

    def __init__(self, graph: fx.Graph, stored: Mapping[str, str], buffers: frozenset[str]) -> None:
        self.graph, self.stored = graph, stored
        self.order = {node: i for i, node in enumerate(graph.nodes)}
        self.aliases = _Aliases()
        self.newer: dict[fx.Node, fx.Node] = {}  # a base -> the value that was written over it
        self.contents = {
            n: n.name for n in self.order if n.op == "placeholder" and n.name in buffers
        }

    def run(self) -> dict[str, fx.Node]:
        for node in self.order:  # before any argument is another value
            _refuse_moved_reads(node)
        for node in self.order:
            if node.op != "call_function":
                continue
            if isinstance(node.target, torch._ops.OpOverload):
                if node.target == aten.detach_.default:  # shares memory, changes no value
                    node.target = aten.detach.default
                if node.target == aten.batch_norm.default and self._keeps_statistics(node):
                    self._batch_norm(node)
                    continue
                if node.target in SHAPED_IN_PLACE and node.all_input_nodes[0].op == "call_function":
                    self._reshape(node)
                    continue
                if node.target._schema.is_mutable:
                    self._in_place(node)
                    continue
            for source in _may_alias(node):
                self.aliases.union(source, node)
        return {name: node for node, name in self.contents.items() if node.op != "placeholder"}

    def _in_place(self, node: fx.Node) -> None:
        """`add_(x, b)`, or `add.out(a, b, out=x)`."""
        functional, written = functional_form(node.target), _written(node)
        if functional is None or written is None:
            raise _refusal(node, "has no functional form that autopar knows")
        node.target = functional
        node.kwargs = {k: v for k, v in node.kwargs.items() if k != "out"}
        self._write(node, written, node)

    def _reshape(self, node: fx.Node) -> None:
        """`x.transpose_(0, 1)`: later uses of x read the view."""
        (source,) = node.all_input_nodes
        node.target = SHAPED_IN_PLACE[node.target]
        self.aliases.union(source, node)
        later = {user for user in source.users if self.order.get(user, -1) > self.order[node]}
        source.replace_all_uses_with(node, delete_user_cb=later.__contains__)

    def _batch_norm(self, node: fx.Node) -> None:
        """Make the new running statistics results; the first result stays the normalised tensor."""
        bound = bound_arguments(node)
        node.target = BATCH_NORM
        node.args = tuple(bound[argument.name] for argument in BATCH_NORM._schema.arguments)
        node.kwargs = {}
        with torch.no_grad():
            values = BATCH_NORM(*fx.node.map_arg(node.args, lambda n: n.meta["val"]))
        node.meta["val"] = values
        results = {}
        with self.graph.inserting_before(node.next):
            for index in (0, *(i for _, i in HIDDEN_WRITES)):
                results[index] = self.graph.call_function(operator.getitem, (node, index))
                results[index].meta = dict(node.meta) | {"val": values[index]}
        node.replace_all_uses_with(results[0], delete_user_cb=lambda user: user in self.order)
        for name, index in HIDDEN_WRITES:
            self._write(node, bound[name], results[index])

    def _keeps_statistics(self, node: fx.Node) -> bool:
        bound = bound_arguments(node)
        return bool(bound["training"]) and bound["running_mean"] is not None

    def _write(self, node: fx.Node, target: fx.Node, value: fx.Node) -> None:
        """After `node`, `target` reads `value`, and so do the views that share its memory."""
        value.meta[WRITTEN] = target
        members = self.aliases.members(target)
        for other in members:
            may_change = other.op == "call_function" or other in self.contents
            if not may_change and other not in self.newer:
                what = self.stored.get(other.name, f"input `{other.name}`")
                raise _refusal(node, f"changes {what}")

        def is_later(user: fx.Node) -> bool:
            return self.order.get(user, -1) > self.order[node]  # -1: made by an earlier write

        def redirect(old: fx.Node, new: fx.Node) -> None:
            old.replace_all_uses_with(new, delete_user_cb=is_later)

        held = [m for m in members if m in self.contents]
        to_rebuild = [
            m
            for m in members
            if m in held or (any(map(is_later, m.users)) and not _are_apart(m, target))
        ]
        if all(member is target for member in to_rebuild):
            new = {target: value}
        else:
            if value.users and target not in to_rebuild:
                to_rebuild.append(target)  # what the call returns
            new = self._rebuilt(node, target, value, to_rebuild, is_later)
        for old, made in new.items():
            redirect(old, made)
        if new.get(target, value) is not value:
            redirect(value, new[target])
        for member in held:
            self.contents[new[member]] = self.contents.pop(member)

    def _rebuilt(
        self,
        node: fx.Node,
        target: fx.Node,
        value: fx.Node,
        to_rebuild: Sequence[fx.Node],
        is_later: Callable[[fx.Node], bool],
    ) -> dict[fx.Node, fx.Node]:
        try:
            base, new = rebuilt_after(value, target, to_rebuild, self._content)
        except CannotRebuild as error:
            reader = next(filter(is_later, error.node.users), error.node)
            why = f"changes memory that `{reader}` reads through another view"
            raise _refusal(node, why) from error
        for made in new.values():
            self.aliases.union(target, made)
        self.newer[base] = new[base]
        return new

    def _content(self, base: fx.Node) -> fx.Node:
        """What the memory of a base holds now."""
        while base in self.newer:
            base = self.newer[base]
        return base


def _fill_through_view(node: fx.Node) -> None:
    """`x.fill_diagonal_(v)` is `x.diagonal().fill_(v)`, if x is no higher than wide."""
    matrix, value = node.args[:2]
    assert isinstance(matrix, fx.Node)
    shape = matrix.meta["val"].shape
    if len(shape) != 2 or shape[0] > shape[1]:
        return
    with node.graph.inserting_before(node):
        view = node.graph.call_function(aten.diagonal.default, (matrix,))
        fill = node.graph.call_function(aten.fill_.Scalar, (view, value))
    for made in (view, fill):
        made.meta = {**node.meta, "val": matrix.meta["val"].diagonal()}
    node.replace_all_uses_with(matrix)
    node.graph.erase_node(node)


def _may_alias(node: fx.Node) -> list[fx.Node]:
    """The inputs that may share memory with the result."""
    sources, value = node.all_input_nodes, node.meta.get("val")
    if not isinstance(value, torch.Tensor) or _is_fresh_output(node):
        return []
    own = storages(node)
    if not isinstance(node.target, torch._ops.OpOverload):  # one of several results
        return [source for source in sources[0].all_input_nodes if own & storages(source)]
    if node.target.overloadpacket in MAY_RETURN_INPUT:
        named = set(sources[:1])
    else:
        named = {
            leaf for i in _viewed(node.target) for leaf in pytree.tree_leaves(node.args[i : i + 1])
        }
    # A schema names what may be copied instead. Strides decide, and need not be eager's; so do
    # dtypes, which are.
    return [
        source
        for source in sources
        if own & storages(source) or (source in named and source.meta["val"].dtype == value.dtype)
    ]


def _viewed(target: torch._ops.OpOverload) -> list[int]:
    """The positions of arguments whose memory results may have, by the schema."""
    return [i for i, a in enumerate(target._schema.arguments) if a.alias_info is not None]


def _is_fresh_output(node: fx.Node) -> bool:
    """Is it one of several results that each have new memory, as `topk(x)[0]`?"""
    source = node.args[0] if node.args else None
    if node.target is not operator.getitem or not isinstance(source, fx.Node):
        return False
    if not isinstance(source.target, torch._ops.OpOverload):
        return False
    returns = source.target._schema.returns
    return len(returns) > 1 and all(r.alias_info is None for r in returns)


def _parts(node: fx.Node) -> dict[fx.Node, Any]:
    """The calls that cut tensors apart to which a value belongs -> which part it is of."""
    found = {}
    while node.op == "call_function" and node.args and isinstance(node.args[0], fx.Node):
        source = node.args[0]
        is_cut = getattr(source.target, "overloadpacket", None) in CUTS
        whole = source.all_input_nodes[0] if is_cut else None
        if whole is not None and node.target is operator.getitem and not _is_expanded(whole):
            found[source] = node.args[1]
        node = source
    return found


def _refuse_moved_reads(node: fx.Node) -> None:
    """`x.add_(x[:, :1])` reads elements that it has written, or not yet: torch leaves that open."""
    if not isinstance(node.target, torch._ops.OpOverload) or not node.target._schema.is_mutable:
        return
    if (written := _written(node)) is None:
        return
    target = written.meta["val"]
    for source in node.all_input_nodes:
        read = source.meta.get("val")
        if source is written or not isinstance(read, torch.Tensor):
            continue
        if not shares_memory(source, written) or are_one_view(target, read):
            continue
        if target.itemsize != read.itemsize or share_elements(target, read):
            raise NotSupportedError(
                f"in-place operator `{node.target}` reads elements that it writes, at other places:"
                " torch leaves its result open",
                where=source_line(node),
                hint="let it read a copy: x.add_(x[:, :1].clone())",
            )


def _is_expanded(node: fx.Node) -> bool:
    return overlaps_itself(node.meta["val"])


def _are_apart(a: fx.Node, b: fx.Node) -> bool:
    """Are they (views of) two parts of one cut?"""
    ours, theirs = _parts(a), _parts(b)
    return any(theirs.get(call, part) != part for call, part in ours.items())


def functional_form(target: object) -> torch._ops.OpOverload | None:
    """`aten.add_.Tensor` or `aten.add.out` -> `aten.add.Tensor`; None if there is none."""
    if not isinstance(target, torch._ops.OpOverload):
        return None
    schema = target._schema
    name = schema.name.split("::")[1]
    if len([a for a in schema.arguments if _is_written(a)]) != 1:
        return None
    if schema.arguments[-1].is_out:
        return _with_arguments(target.overloadpacket, _described(schema.arguments[:-1]))
    if target in OTHER_NAMES:
        return OTHER_NAMES[target]
    if not _is_written(schema.arguments[0]) or not name.endswith("_") or name.endswith("__"):
        return None
    packet = getattr(aten, name[:-1], None)
    if packet is None:
        return None
    # Overloads may have other names: `x.pow_(2)` is `pow_.Scalar`, and `pow.Scalar` is 2 ** x.
    found = _with_arguments(packet, _described(schema.arguments))
    return found or getattr(packet, target._overloadname, None)


def _with_arguments(
    packet: torch._ops.OpOverloadPacket, described: Sequence[tuple[str, str]]
) -> torch._ops.OpOverload | None:
    overloads = (getattr(packet, name) for name in packet.overloads())
    return next((o for o in overloads if _described(o._schema.arguments) == described), None)


def _described(arguments: Sequence[torch.Argument]) -> list[tuple[str, str]]:
    return [(a.name, str(a.type)) for a in arguments]


def _is_written(argument: torch.Argument) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _written(node: fx.Node) -> fx.Node | None:
    """The tensor that a mutable operator changes."""
    target = node.kwargs.get("out", node.args[0] if node.args else None)
    return target if isinstance(target, fx.Node) else None


def _refusal(node: fx.Node, why: str) -> NotSupportedError:
    if getattr(node.target, "overloadpacket", None) in (
        aten.embedding_renorm,
        aten.embedding_renorm_,
    ):
        return NotSupportedError(
            "max_norm= of an embedding changes its table in forward",
            where=source_line(node),
            hint="leave it out, and renormalise the table after the optimizer, under no_grad",
        )
    return NotSupportedError(
        f"in-place operator `{node.target}` {why}",
        where=source_line(node),
        hint="use the out-of-place form (x = x + y), or keep what changes in a registered buffer",
    )


class _Aliases:
    """Union-find over nodes that may share memory."""

    def __init__(self) -> None:
        self._class: dict[fx.Node, list[fx.Node]] = {}

    def members(self, node: fx.Node) -> list[fx.Node]:
        return self._class.setdefault(node, [node])

    def union(self, a: fx.Node, b: fx.Node) -> None:
        left, right = self.members(a), self.members(b)
        if left is not right:
            left.extend(right)
            for node in right:
                self._class[node] = left
