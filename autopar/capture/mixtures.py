"""Mixtures of experts: two matmuls by equal ids, with an activation between them, as one operator.

    h = expert_linear(x, w_in, ids)         perhaps + b_in[ids]
    a = act(h), or act(gate) * up with gate and up the halves of h, or its columns in turns
    y = expert_linear(a, w_out, ids)                        becomes expert_mlp(x, w_in, w_out, ids)

    gate, up = (expert_linear(x, w, ids) for w in (w_gate, w_up))
    y = expert_linear(act(gate) * up, w_out, ids)           becomes expert_gated_mlp(x, w_gate, ..)

for the activations of `operators/gates.py`. Sharded experts then exchange rows once a mixture, not
once a matmul. If anything else reads what is in between, or the activation is another one, they
stay two matmuls. A bias of y stays behind the mixture.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import fx

from autopar.capture.trace import REGION
from autopar.operators.experts import EXPERT_GATED_MLP, EXPERT_LINEAR, EXPERT_MLP
from autopar.operators.gates import CLAMPED

aten = torch.ops.aten
_ACTIVATIONS = {aten.silu.default: "silu", aten.gelu.default: "gelu", aten.relu.default: "relu"}
_HALVES = (aten.chunk.default, aten.split.Tensor, aten.split_with_sizes.default)


class _Hidden(NamedTuple):
    """The first matmul, its bias and the ids of that, and what is between the two and a reader; or
    two, of gate and up."""

    matmul: fx.Node
    bias: fx.Node | None = None
    bias_ids: fx.Node | None = None
    between: tuple[fx.Node, ...] = ()
    up: fx.Node | None = None


class _Mixture(NamedTuple):
    """What may be a mixture, up to the second matmul."""

    hidden: _Hidden
    activation: str
    interleaved: bool
    between: frozenset[fx.Node]


class _Part(NamedTuple):
    """A half of the features: the first, or the second; columns in turns?"""

    of: fx.Node
    which: int
    interleaved: bool
    between: frozenset[fx.Node]


def join_mixtures(graph: fx.Graph) -> None:
    """Make one operator of every mixture, in place; `graph` has no dead nodes.

    The node of the second matmul becomes that of the mixture.
    """
    for node in [n for n in graph.nodes if n.target == EXPERT_LINEAR]:
        _, w_out, other_ids, transposed = _matmul(node)
        for hidden, activation, interleaved, between in _candidates(node):
            x, w_in, ids, first_transposed = _matmul(hidden.matmul)
            inside = {hidden.matmul, *hidden.between, *between}
            ups = [] if hidden.up is None else [_matmul(hidden.up)]
            if (
                transposed == first_transposed
                and _is_same(ids, other_ids)
                and (hidden.bias_ids is None or _is_same(ids, hidden.bias_ids))
                and all(rows is x and _is_same(ids, by) for rows, _, by, _ in ups)
                and all(turned == transposed for *_, turned in ups)
                and all(user in inside or user is node for n in inside for user in n.users)
                and len({n.meta.get(REGION) for n in (*inside, node)}) == 1
            ):
                node.target = EXPERT_GATED_MLP if ups else EXPERT_MLP
                more = (hidden.bias, interleaved) if hidden.bias or interleaved else ()
                weights = w_in, *(w for _, w, *_ in ups), w_out
                node.args = (x, *weights, ids, activation, transposed, *more)
                node._rename(node.target._opname)
                for n in [n for n in reversed(graph.nodes) if n in inside]:
                    graph.erase_node(n)
                for unread in (other_ids, hidden.bias_ids, *(by for *_, by, _ in ups)):
                    if unread not in (None, ids) and not unread.users:
                        graph.erase_node(unread)
                break


def _candidates(second: fx.Node) -> Iterator[_Mixture]:
    """What a second matmul may be of."""
    features = _args(second)[0]
    if features.target != aten.mul.Tensor:
        if activation := _activation(features):
            hidden = _hidden(_args(features)[0])
            if hidden is not None:
                yield _Mixture(hidden, activation, False, frozenset({features}))
        return
    left, right = _args(features)
    for gated, other in ((left, right), (right, left)):
        if activation := _activation(gated):
            yield from _of_halves(activation, _args(gated)[0], other, {features, gated})
        if clamped := _clamped(gated, other):
            activation, gate, up, between = clamped
            yield from _of_halves(activation, gate, up, {features, *between})


def _of_halves(activation: str, gate: Any, up: Any, between: set[fx.Node]) -> Iterator[_Mixture]:
    """The mixture, if `gate` and `up` are the halves of the features of a first matmul, or those of
    two."""
    if _is_call(gate, EXPERT_LINEAR) and _is_call(up, EXPERT_LINEAR):
        yield _Mixture(_Hidden(gate, up=up), activation, False, frozenset({*between, up}))
    first, second = _part(gate), _part(up)
    if first is None or second is None or (first.which, second.which) != (0, 1):
        return
    hidden = _hidden(first.of)
    if hidden is None or second[::2] != (first.of, first.interleaved):
        return
    inside = frozenset({*between, gate, up}) | first.between | second.between
    yield _Mixture(hidden, activation, first.interleaved, inside)


def _hidden(node: Any) -> _Hidden | None:
    """A first matmul, with its bias if one is added."""
    if node.target == EXPERT_LINEAR:
        return _Hidden(node)
    for left, right in _sums(node):
        if left.target == EXPERT_LINEAR and right.target == aten.index.Tensor:
            bias, indices = _args(right)
            rows = left.meta["val"].shape
            is_row_each = len(indices) == 1 and bias.meta["val"].shape[1:] == rows[1:]
            if is_row_each and right.meta["val"].shape == rows:
                return _Hidden(left, bias, indices[0], (node, right))
    return None


def _sums(node: Any) -> Iterator[tuple[fx.Node, fx.Node]]:
    """The two tensors of a sum, in both orders."""
    if node.target == aten.add.Tensor and not node.kwargs:
        left, right = _args(node)
        if isinstance(left, fx.Node) and isinstance(right, fx.Node):
            yield from ((left, right), (right, left))


def _activation(node: Any) -> str | None:
    if not isinstance(node, fx.Node) or node.target not in _ACTIVATIONS:
        return None
    name = _ACTIVATIONS[node.target]
    if name != "gelu":
        return name
    how = node.args[1] if len(node.args) > 1 else node.kwargs.get("approximate", "none")
    return "gelu" if how == "none" else "gelu_tanh"


def _clamped(gated: Any, other: Any) -> tuple[str, Any, Any, set[fx.Node]] | None:
    """gpt-oss's: gated = c sigmoid(alpha c), c = clamp(gate, max=limit); other = clamp(up) + 1."""
    if not (_is_call(gated, aten.mul.Tensor) and _is_call(other, aten.add.Tensor)):
        return None
    bounded, *more = _args(other)
    if more != [1] or other.kwargs or not _is_call(bounded, aten.clamp.default):
        return None
    up, *bounds = _args(bounded)
    for clamped, share in (_args(gated), _args(gated)[::-1]):
        if not _is_call(clamped, aten.clamp.default) or not _is_call(share, aten.sigmoid.default):
            continue
        (scaled,) = _args(share)
        if not _is_call(scaled, aten.mul.Tensor) or _args(scaled)[0] is not clamped:
            continue
        alpha, (gate, *limits) = _args(scaled)[1], _args(clamped)
        if isinstance(alpha, fx.Node) or len(bounds) < 2 or limits != [None, bounds[1]]:
            continue
        if bounds[0] is not None and bounds[1] is not None and bounds[0] == -bounds[1]:
            between = {gated, other, bounded, clamped, share, scaled}
            return f"{CLAMPED} {float(alpha)} {float(bounds[1])}", gate, up, between
    return None


def _is_call(node: Any, target: Any) -> bool:
    return isinstance(node, fx.Node) and node.target == target


def _part(node: Any) -> _Part | None:
    """Which half of some features `node` is."""
    if not isinstance(node, fx.Node) or not isinstance(node.meta["val"], torch.Tensor):
        return None
    shape, between, is_stepped = node.meta["val"].shape, frozenset[fx.Node](), False
    if len(shape) != 2:
        return None
    if node.target is operator.getitem:
        source, which = _args(node)
        if source.target not in _HALVES:
            return None
        between, source = frozenset({source}), _args(source)[0]
    elif node.target == aten.slice.Tensor and _args(node)[1] in (1, -1):
        source, _, start, *more = _args(node)
        steps = more[1:]
        is_stepped = steps == [2]
        which, rest = (start, 0) if is_stepped else divmod(start, shape[-1])
        if rest or (not is_stepped and steps not in ([], [1])):
            return None
    else:
        return None
    # Equal heights and half the width: of the two parts of it, or every second of its columns.
    n_rows, n_features = source.meta["val"].shape
    is_half = shape == (n_rows, n_features / 2)
    return _Part(source, which, is_stepped, between) if is_half else None


def _is_same(ids: fx.Node, others: fx.Node) -> bool:
    """Are they the same ids? They may be reshaped twice."""
    if ids is others:
        return True
    if not ids.target == others.target == aten.reshape.default:
        return False
    (source, shape), (other, other_shape) = _args(ids), _args(others)
    return shape == other_shape and _is_same(source, other)


def _matmul(node: fx.Node) -> tuple[Any, ...]:
    """Rows, weight, ids, and whether the weight is transposed."""
    rows, weight, ids, *transposed = _args(node)
    return rows, weight, ids, any(transposed)


def _args(node: fx.Node) -> tuple[Any, ...]:
    return node.args
