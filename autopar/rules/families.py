"""Notations that depend on the call: pointwise, reductions, products of any rank.

Each family is a function of the call. Names of dims are the position's letter: `d0 d1 ...`
for the output's dims.
"""

from __future__ import annotations

import torch

from autopar.notation import Dim, Notation, Term
from autopar.rules.rule import LinearSets, OpCall, Shape


def names(n: int, prefix: str = "d") -> tuple[str, ...]:
    return tuple(f"{prefix}{i}" for i in range(n))


def named_term(shape: Shape, labels: tuple[str, ...]) -> Term:
    """One name per dim; dims of size 1 have none."""
    return tuple((label,) if size != 1 else () for size, label in zip(shape, labels, strict=True))


def broadcast_term(shape: Shape, out_shape: Shape, labels: tuple[str, ...]) -> Term:
    """`shape` aligned to the right of `out_shape`; a dim that is broadcast has no name."""
    offset = len(out_shape) - len(shape)
    return tuple(
        (labels[offset + i],) if size == out_shape[offset + i] and size != 1 else ()
        for i, size in enumerate(shape)
    )


def pointwise(call: OpCall) -> Notation:
    """Elementwise with broadcasting."""
    out = call.outputs[0]
    labels = names(len(out))
    return Notation(
        tuple(broadcast_term(shape, out, labels) for shape in call.inputs),
        tuple(named_term(shape, labels) for shape in call.outputs),
    )


def pointwise_first(call: OpCall) -> Notation:
    """Elementwise in the first tensor; of the others only the type is used."""
    shape, *others = call.inputs
    term = named_term(shape, names(len(shape)))
    held = [names(len(other), f"t{i}_") for i, other in enumerate(others)]
    return Notation(
        (term, *(named_term(s, labels) for s, labels in zip(others, held, strict=True))),
        (term,),
        frozenset(label for labels in held for label in labels),
    )


def tensors_linear_alone(call: OpCall) -> LinearSets:
    """Products: linear in each tensor when the others are fixed."""
    return tuple((i,) for i in range(len(call.tensors)))


def tensors_linear_jointly(call: OpCall) -> LinearSets:
    """Sums of tensors; a scalar summand breaks linearity."""
    both = len(call.tensors) == 2
    return ((0, 1),) if both else ()


def reduced_dims(call: OpCall) -> tuple[int, ...]:
    """The dims a reduction runs over, counted from 0; all of them when none is given."""
    rank = len(call.inputs[0])
    dim = call.args.get("dim")
    if dim is None or dim == []:
        return tuple(range(rank))
    dims = dim if isinstance(dim, (list, tuple)) else (dim,)
    return tuple(sorted(int(d) % max(rank, 1) for d in dims))


def _reduction(call: OpCall, frozen: bool) -> Notation:
    shape, reduced = call.inputs[0], reduced_dims(call)
    labels = names(len(shape))
    term = named_term(shape, labels)
    kept: list[Dim] = []
    for i, dim in enumerate(term):
        if i not in reduced:
            kept.append(dim)
        elif call.args.get("keepdim"):
            kept.append(())
    held = frozenset(labels[i] for i in reduced) if frozen else frozenset()
    return Notation((term,), (tuple(kept),) * len(call.outputs), held)


def summed(call: OpCall) -> Notation:
    """A sum: sharding a reduced dim leaves a partial sum."""
    return _reduction(call, frozen=False)


def reduced_whole(call: OpCall) -> Notation:
    """A reduction that is not a sum: reduced dims stay whole."""
    return _reduction(call, frozen=True)


def along_dim(call: OpCall) -> Notation:
    """Same shape in and out, with one dim that must stay whole (softmax, cumsum)."""
    shape = call.inputs[0]
    labels = names(len(shape))
    term = named_term(shape, labels)
    held = frozenset({labels[call.dim()]}) if shape else frozenset()
    return Notation((term,), (term,) * len(call.outputs), held)


def differences(call: OpCall) -> Notation:
    """`diff` along a dim: it stays whole, and has another length in every tensor."""
    dim = call.dim()

    def term(shape: Shape, label: str) -> Term:
        labels = names(len(shape))
        return named_term(shape, (*labels[:dim], label, *labels[dim + 1 :]))

    inputs = tuple(term(shape, f"x{i}") for i, shape in enumerate(call.inputs))
    held = frozenset(f"x{i}" for i in range(len(inputs))) | {"y"}
    return Notation(inputs, (term(call.outputs[0], "y"),), held)


def matmul(call: OpCall) -> Notation:
    """torch.matmul of any ranks: batch dims broadcast, `k` is summed over."""
    left, right = call.inputs
    out = call.outputs[0]
    n_batch = max(len(left), len(right)) - 2
    labels = names(max(n_batch, 0), "_")
    batch_shape = out[: max(n_batch, 0)]

    def term(shape: Shape, matrix: tuple[str, ...]) -> Term:
        batch = shape[: len(shape) - len(matrix)]
        leading = broadcast_term(batch, batch_shape, labels) if batch else ()
        tail = shape[len(shape) - len(matrix) :]
        return leading + named_term(tail, matrix)

    rows = ("m",) if len(left) > 1 else ()
    columns = ("n",) if len(right) > 1 else ()
    return Notation(
        (term(left, (*rows, "k")), term(right, ("k", *columns))),
        (term(out, (*rows, *columns)),),
    )


def einsum(call: OpCall) -> Notation:
    """The equation is the notation; `_` makes every name count in flops."""
    left, _, right = str(call.args["equation"]).replace(" ", "").partition("->")

    def term(shape: Shape, letters: str) -> Term:
        return named_term(shape, tuple(f"_{letter}" for letter in letters))

    inputs = zip(call.inputs, left.split(","), strict=True)
    return Notation(tuple(term(*pair) for pair in inputs), (term(call.outputs[0], right),))


def explicit_einsum(call: OpCall) -> str | None:
    """Why an equation is no notation."""
    equation = str(call.args["equation"]).replace(" ", "")
    left, arrow, right = equation.partition("->")
    if not arrow or "." in equation:
        return f"einsum({equation!r}) does not write out all dims of its inputs and output"
    if any(len(set(word)) < len(word) for word in (*left.split(","), right)):
        return f"einsum({equation!r}) takes a diagonal"
    return None


def layer_norm(call: OpCall) -> Notation:
    """Normalised dims stay whole; weight and bias have exactly those dims."""
    shape = call.inputs[0]
    n_held = len(call.args["normalized_shape"])
    labels = names(len(shape))
    held = labels[len(shape) - n_held :]
    term = named_term(shape, labels)
    affine = tuple(named_term(s, held) for s in call.inputs[1:])
    return Notation((term, *affine), (term,), frozenset(held))


def attention(call: OpCall) -> Notation:
    """scaled_dot_product_attention: batch and heads are free, the query's sequence too
    unless the mask is implicit; keys and head_dim stay whole.

    With enable_gqa, n x g heads of the query share n of key and value: head i uses i // g,
    so the query's are (key heads, group) and either may be sharded.
    """
    query, key, value = call.inputs[:3]
    out = call.outputs[0]
    labels = names(len(query) - 2, "_")
    heads = len(query) - 3  # the dim of the heads
    grouped = bool(call.args.get("enable_gqa")) and heads >= 0 and query[heads] != key[heads]

    def lead(shape: Shape, is_query: bool) -> Term:
        term = list(broadcast_term(shape, out[: len(shape)], labels))
        if grouped and shape[heads] != 1:
            kept: Dim = (labels[heads],) if key[heads] != 1 else ()
            term[heads] = (*kept, "g") if is_query else kept
        return tuple(term)

    terms = [
        lead(query[:-2], True) + named_term(query[-2:], ("s", "e")),
        lead(key[:-2], False) + named_term(key[-2:], ("t", "e")),
        lead(value[:-2], False) + named_term(value[-2:], ("t", "f")),
    ]
    scores = (*out[:-1], key[-2])
    result = lead(out[:-2], True)
    for mask in call.inputs[3:]:
        offset = len(scores) - len(mask)
        full = (*result, *named_term(scores[-2:], ("s", "t")))
        terms.append(
            tuple(
                full[offset + i] if size == scores[offset + i] and size != 1 else ()
                for i, size in enumerate(mask)
            )
        )
    held = {"t", "e", "f"} | ({"s"} if call.args.get("is_causal") else set())
    return Notation(tuple(terms), (result + named_term(out[-2:], ("s", "f")),), frozenset(held))


def embedding(call: OpCall) -> Notation:
    """Rows of a table: `v h, ids -> ids h`; a sharded `v` leaves a partial sum.

    Gradients scaled by the frequency of an id need all ids and all rows in one place.
    """
    ids = call.inputs[1]
    labels = names(len(ids), "_")
    counts = bool(call.args.get("scale_grad_by_freq"))
    return Notation(
        (named_term(call.inputs[0], ("v", "h")), named_term(ids, labels)),
        (named_term(ids, labels) + named_term(call.outputs[0][-1:], ("h",)),),
        frozenset({"v", *labels}) if counts else frozenset(),
    )


def gather(call: OpCall) -> Notation:
    """`gather` along a dim, in which the source is whole; so are both where the index is
    shorter than the source, since its rows are the source's first."""
    source, index = call.inputs
    along, labels, held = call.dim(), names(len(index)), names(len(source), "x")
    same = [i != along and n == index[i] for i, n in enumerate(source)]
    mixed = tuple(d if ok else x for ok, d, x in zip(same, labels, held, strict=True))
    shorter = {d for i, d in enumerate(labels) if i != along and not same[i]}
    term = named_term(index, labels)
    return Notation((named_term(source, mixed), term), (term,), frozenset(held) | shorter)


def cross_entropy(call: OpCall) -> Notation:
    """Class logits [n, v] or [n, v, ...] against class indices, summed or per row.

    Classes may be sharded where the lowered function knows the form: a sum over [n, v].
    """
    logits, labels = call.inputs[0], call.inputs[1]
    rest = names(len(logits) - 2)
    rows = ("n",) if len(logits) > 1 else ()
    term = named_term(logits, (*rows, "v", *rest))
    target = named_term(labels, (*rows, *rest))
    out = target if call.outputs[0] else ()
    is_sum = call.args["reduction"] == torch.nn._reduction.get_enum("sum")
    lowers = is_sum and len(logits) == 2
    return Notation((term, target), (out,), frozenset() if lowers else frozenset({"v"}))
