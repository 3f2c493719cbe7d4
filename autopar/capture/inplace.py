"""In-place operators become functional where that provably means the same.

`y = x.add_(b)` is `y = add(x, b)` with every later use of `x` reading `y`, if no input,
parameter or buffer shares x's memory. Other values that may alias x and are used afterwards
are made anew from what was written, where they are plain views of one base (`view_writes.py`).
Aliasing is over-approximated from the operator schemas (plus a few composites that return
their input without saying so), by union-find over values.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from autopar.capture.names import source_line
from autopar.capture.view_writes import CannotRebuild, rebuilt_after
from autopar.errors import NotSupportedError

aten = torch.ops.aten

# Meta key: the result must be cast back to the dtype the mutated tensor had.
WAS_IN_PLACE = "was_in_place"
# Composites whose schema hides that they may return their input itself.
MAY_RETURN_INPUT = frozenset({aten.dropout, aten.type_as, aten.feature_dropout})
# Operators that mutate buffers without an alias annotation: (packet, training flag, buffers).
HIDDEN_MUTATION = {
    aten.batch_norm: ("training", ("running_mean", "running_var")),
    aten.instance_norm: ("use_input_stats", ("running_mean", "running_var")),
}


def functionalise(graph: fx.Graph, stored: dict[str, str]) -> None:
    """Rewrite `graph` in place; `stored` maps placeholder names to what they hold.

    Raises `NotSupportedError` naming the line when a mutation is visible elsewhere.
    """
    order = {node: i for i, node in enumerate(graph.nodes)}
    aliases = _Aliases()
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if isinstance(node.target, torch._ops.OpOverload):
            _check_hidden(node, stored)
            if node.target == aten.detach_.default:  # shares memory, changes no value
                node.target = aten.detach.default
            if node.target._schema.is_mutable:
                _replace(node, order, aliases, stored)
                continue
        for source in _may_alias(node):
            aliases.union(source, node)


def _may_alias(node: fx.Node) -> list[fx.Node]:
    """The inputs whose memory the result may share."""
    if _is_fresh_output(node):
        return []
    if not isinstance(node.target, torch._ops.OpOverload):
        return [n for n in node.all_input_nodes if n.op != "get_attr"]  # getitem, regions
    if node.target.overloadpacket in MAY_RETURN_INPUT:
        return list(node.all_input_nodes[:1])
    found: list[fx.Node] = []
    for argument, value in zip(node.target._schema.arguments, node.args, strict=False):
        if argument.alias_info is not None:
            values = value if isinstance(value, (list, tuple)) else (value,)
            found += [v for v in values if isinstance(v, fx.Node)]
    return found


def _is_fresh_output(node: fx.Node) -> bool:
    """`topk(x)[0]`: one of several results, each with memory of its own."""
    source = node.args[0] if node.args else None
    if node.target is not operator.getitem or not isinstance(source, fx.Node):
        return False
    if not isinstance(source.target, torch._ops.OpOverload):
        return False
    returns = source.target._schema.returns
    return len(returns) > 1 and all(r.alias_info is None for r in returns)


def _replace(
    node: fx.Node, order: dict[fx.Node, int], aliases: _Aliases, stored: dict[str, str]
) -> None:
    target = node.args[0] if node.args else None
    functional = functional_form(node.target)
    if functional is None or not isinstance(target, fx.Node):
        raise _refusal(node, "has no functional form that autopar knows")
    for other in aliases.members(target):
        if other.op != "call_function":
            what = stored.get(other.name, f"input `{other.name}`")
            raise _refusal(node, f"changes {what}")

    def is_later(user: fx.Node) -> bool:
        return order.get(user, -1) > order[node]  # nodes inserted so far belong to earlier writes

    def redirect(old: fx.Node, value: fx.Node) -> None:
        old.replace_all_uses_with(value, delete_user_cb=is_later)

    read_later = [
        m for m in aliases.members(target) if any(map(is_later, m.users)) and not _is_region(m)
    ]
    node.target = functional
    node.meta[WAS_IN_PLACE] = True
    if all(member is target for member in read_later):
        redirect(target, node)
        return
    if node.users and target not in read_later:
        read_later.append(target)  # what the call returns
    try:
        new = rebuilt_after(node, target, read_later)
    except CannotRebuild as error:
        reader = next(filter(is_later, error.node.users), error.node)
        why = f"changes memory that `{reader}` reads through another view"
        raise _refusal(node, why) from error
    for value in new.values():
        aliases.union(next(iter(new.values())), value)
    for old, value in new.items():
        redirect(old, value)
    if new.get(target, node) is not node:
        redirect(node, new[target])


def functional_form(target: object) -> torch._ops.OpOverload | None:
    """`aten.add_.Tensor` -> `aten.add.Tensor`; None if there is no counterpart."""
    if not isinstance(target, torch._ops.OpOverload):
        return None
    schema = target._schema
    written = [a for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    name = schema.name.split("::")[1]
    if len(written) != 1 or written[0] is not schema.arguments[0]:
        return None
    if not name.endswith("_") or name.endswith("__"):
        return None
    packet = getattr(aten, name[:-1], None)
    return getattr(packet, target._overloadname, None) if packet is not None else None


def _check_hidden(node: fx.Node, stored: dict[str, str]) -> None:
    rule = HIDDEN_MUTATION.get(node.target.overloadpacket)  # type: ignore[union-attr]
    if rule is None:
        return
    flag, buffers = rule
    names = [a.name for a in node.target._schema.arguments]  # type: ignore[union-attr]
    values = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    if values.get(flag):
        held = [values[b] for b in buffers if isinstance(values.get(b), fx.Node)]
        if held:
            what = ", ".join(stored.get(b.name, b.name) for b in held)
            raise _refusal(node, f"updates {what}")


def _is_region(node: fx.Node) -> bool:
    """A no-grad region: its results are read through getitem, which is in the class too."""
    return not isinstance(node.target, torch._ops.OpOverload) and node.target != operator.getitem


def _refusal(node: fx.Node, why: str) -> NotSupportedError:
    return NotSupportedError(
        f"in-place operator `{node.target}` {why}",
        where=source_line(node),
        hint="use the out-of-place form (x = x + y), or put the module in eval mode if it keeps "
        "running statistics",
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
