"""Families: notations that depend on the call (pointwise, reductions, matmuls of any rank).

Each family is a function from a call to its notation. Dims are named by position, usually
`d0 d1 ...`. Names that begin with `_` multiply FLOPs: they are `lead` in `formulas.py`.
"""

from __future__ import annotations

import torch

from autopar.placement import Dim, Notation, Term
from autopar.rules.rule import LinearSets, OpCall, Shape


def names(n: int, prefix: str = "d") -> tuple[str, ...]:
    return tuple(f"{prefix}{i}" for i in range(n))


def named_term(shape: Shape, labels: tuple[str, ...]) -> Term:
    """A term with one name per dim; dims of size 1 have none."""
    return tuple((label,) if size != 1 else () for size, label in zip(shape, labels, strict=True))


def broadcast_term(shape: Shape, out_shape: Shape, labels: tuple[str, ...]) -> Term:
    """The term of `shape`, aligned to the right of `out_shape`; broadcast dims have no name."""
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
    """Elementwise in the first tensor. The dims of other tensors stay whole."""
    shape, *others = call.inputs
    term = named_term(shape, names(len(shape)))
    held = [names(len(other), f"t{i}_") for i, other in enumerate(others)]
    return Notation(
        (term, *(named_term(s, labels) for s, labels in zip(others, held, strict=True))),
        (term,),
        frozenset(label for labels in held for label in labels),
    )


def tensors_linear_alone(call: OpCall) -> LinearSets:
    """Products: linear in each tensor while the others are fixed."""
    return tuple((i,) for i in range(len(call.tensors)))


def tensors_linear_jointly(call: OpCall) -> LinearSets:
    """Sums of two tensors: linear in both together. With a scalar summand they are not linear."""
    both = len(call.tensors) == 2
    return ((0, 1),) if both else ()


def reduced_dims(call: OpCall) -> tuple[int, ...]:
    """The dims that a reduction runs over, as non-negative indices; by default all.

    A tensor without dims has none, whatever `dim` says: torch takes 0 and -1.
    """
    rank = len(call.inputs[0])
    dim = call.args.get("dim")
    if dim is None or dim == [] or rank == 0:
        return tuple(range(rank))
    dims = dim if isinstance(dim, (list, tuple)) else (dim,)
    return tuple(sorted(int(d) % rank for d in dims))


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
    """A sum: sharding a reduced dim leaves the result Partial."""
    return _reduction(call, frozen=False)


def reduced_whole(call: OpCall) -> Notation:
    """A reduction that is not a sum: reduced dims stay whole."""
    return _reduction(call, frozen=True)


def along_dims(call: OpCall) -> Notation:
    """Operators along some dims, by default all (softmax, cumsum, topk, roll, fft).

    These dims stay whole, and a result may have other sizes in them. All other dims are free.
    """
    shape, given = call.inputs[0], call.args.get("dim", call.args.get("dims"))
    dims = given if isinstance(given, (list, tuple)) else [given]
    along = {int(d) % max(len(shape), 1) for d in dims if d is not None} or set(range(len(shape)))
    labels = names(len(shape))

    def term(result: Shape) -> Term:
        changed = (f"y{i}" if n != shape[i] else labels[i] for i, n in enumerate(result))
        return named_term(result, tuple(changed))

    held = {f"{kind}{i}" for i in along for kind in "dy"} if shape else set()
    return Notation(
        (named_term(shape, labels),), tuple(term(s) for s in call.outputs), frozenset(held)
    )


def _free_leading(call: OpCall, leading: Shape) -> Notation:
    """Only the dims `leading` may be sharded, on all tensors whose shapes begin with them."""
    batch, n_inputs = names(len(leading)), len(call.inputs)
    held: set[str] = set()
    terms = []
    for k, shape in enumerate((*call.inputs, *call.outputs)):
        own = names(len(shape), f"x{k}_")
        held |= set(own)
        alike = shape[: len(leading)] == leading
        terms.append(named_term(shape, (*batch, *own)[: len(shape)] if alike else own))
    return Notation(tuple(terms[:n_inputs]), tuple(terms[n_inputs:]), frozenset(held))


def whole(call: OpCall) -> Notation:
    """Nothing may be sharded."""
    return _free_leading(call, ())


def counted_in_bins(call: OpCall) -> Notation:
    """Elements of each bin: counts of parts add up, if the bins do not depend on the elements."""
    if call.args["min"] == call.args["max"]:  # from the least element to the greatest
        return whole(call)
    counts = named_term(call.outputs[0], ("n",))
    elements = named_term(call.inputs[0], names(len(call.inputs[0])))
    return Notation((elements,), (counts,), frozenset({"n"}))


def matrices(call: OpCall) -> Notation:
    """Operators on each matrix of a batch (tril, inverse, solve): only batch dims are free."""
    return _free_leading(call, call.inputs[0][:-2])


def systems(call: OpCall) -> Notation:
    """Two batches of matrices that broadcast (a triangular matrix, right-hand sides)."""
    out = call.outputs[0]
    labels = names(len(out) - 2)
    held: set[str] = set()
    terms = []
    for k, shape in enumerate((*call.inputs, *call.outputs)):
        matrix = names(2, f"x{k}_")
        held |= set(matrix)
        terms.append(broadcast_term(shape[:-2], out[:-2], labels) + named_term(shape[-2:], matrix))
    return Notation(tuple(terms[:2]), tuple(terms[2:]), frozenset(held))


def along_others(call: OpCall) -> Notation:
    """`renorm`: each slice along a dim by itself; the other dims stay whole."""
    labels, dim = names(len(call.inputs[0])), call.dim()
    term = named_term(call.inputs[0], labels)
    return Notation((term,), (term,), frozenset({*labels} - {labels[dim]}))


def pointwise_along_dim(call: OpCall) -> Notation:
    """Elementwise with broadcasting, except along one dim, which stays whole.

    A reduction drops that dim (cosine similarity), others keep it (cross product).
    """
    shape = tuple(torch.broadcast_shapes(*call.inputs))
    labels, along = names(len(shape)), call.dim(rank=len(shape))
    kept = labels if len(call.outputs[0]) == len(shape) else labels[:along] + labels[along + 1 :]
    return Notation(
        tuple(broadcast_term(s, shape, labels) for s in call.inputs),
        (named_term(call.outputs[0], kept),),
        frozenset({labels[along]}),
    )


def outer_pairs(call: OpCall) -> Notation:
    """Distances between all pairs of rows: `... p k!, ... r k! -> ... p r`."""
    left, right = call.inputs
    out = call.outputs[0]
    labels = names(len(out) - 2)

    def term(shape: Shape, row: str) -> Term:
        return broadcast_term(shape[:-2], out[:-2], labels) + named_term(shape[-2:], (row, "k"))

    result = named_term(out, (*labels, "p", "r"))
    return Notation((term(left, "p"), term(right, "r")), (result,), frozenset({"k"}))


def differences(call: OpCall) -> Notation:
    """`diff` along a dim, which stays whole and has a different size in every tensor."""
    dim = call.dim()

    def term(shape: Shape, label: str) -> Term:
        labels = names(len(shape))
        return named_term(shape, (*labels[:dim], label, *labels[dim + 1 :]))

    inputs = tuple(term(shape, f"x{i}") for i, shape in enumerate(call.inputs))
    held = frozenset(f"x{i}" for i in range(len(inputs))) | {"y"}
    return Notation(inputs, (term(call.outputs[0], "y"),), held)


def matmul(call: OpCall) -> Notation:
    """torch.matmul of tensors of any rank: batch dims broadcast, `k` is summed over."""
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
    """The notation of an einsum is its equation. `_` before each name makes it count in FLOPs.

    Dims under `...` get names of their own, aligned to the right. Without an output in the
    equation, it is the names that occur once, in alphabetical order. A name that occurs twice in
    one tensor takes a diagonal: both dims stay whole.
    """
    equation = str(call.args["equation"]).replace(" ", "")
    left, arrow, right = equation.partition("->")
    words = left.split(",")
    widths = [len(s) - len(w.replace("...", "")) for s, w in zip(call.inputs, words, strict=True)]
    dots = tuple(f"_dot{i}" for i in range(max(widths)))
    if not arrow:
        single = sorted(c for c in set(left) if c.isalpha() and left.count(c) == 1)
        right = "..." * ("..." in left) + "".join(single)
    held: set[str] = set()

    def term(shape: Shape, word: str) -> Term:
        before, ellipsis, after = word.partition("...")
        n_dots = len(shape) - len(before) - len(after) if ellipsis else 0
        labels = [f"_{c}" for c in before]
        labels += dots[len(dots) - n_dots :]
        labels += [f"_{c}" for c in after]
        for i, label in enumerate(labels):
            if label in labels[:i]:
                labels[i] = f"{label}_{i}"
                held.update((label, labels[i]))
        return named_term(shape, tuple(labels))

    inputs = tuple(term(*pair) for pair in zip(call.inputs, words, strict=True))
    return Notation(inputs, (term(call.outputs[0], right),), frozenset(held))


def layer_norm(call: OpCall) -> Notation:
    """Normalised dims stay whole. Weight and bias have exactly those dims."""
    shape = call.inputs[0]
    n_held = len(call.args["normalized_shape"])
    labels = names(len(shape))
    held = labels[len(shape) - n_held :]
    term = named_term(shape, labels)
    affine = tuple(named_term(s, held) for s in call.inputs[1:])
    return Notation((term, *affine), (term,), frozenset(held))


def attention(call: OpCall) -> Notation:
    """scaled_dot_product_attention: batch, heads and the query's sequence `s` are free.

    The head dims `e` and `f` stay whole. The sequence `t` of keys is sharded only with that of the
    query, by a ring; not if there is a mask, if dims broadcast, or if a causal query has more or
    fewer rows than keys. The sequence of a causal query is named `c` instead of `s`: a shard needs
    to know its position, so `c` has a lowering.

    With enable_gqa, the query has n x g heads, key and value have n, and head i uses i // g. So the
    query's heads are (key heads, group `g`), and either may be sharded.
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

    rows = "c" if call.args.get("is_causal") else "s"
    terms = [
        lead(query[:-2], True) + named_term(query[-2:], (rows, "e")),
        lead(key[:-2], False) + named_term(key[-2:], ("t", "e")),
        lead(value[:-2], False) + named_term(value[-2:], ("t", "f")),
    ]
    scores = (*out[:-1], key[-2])
    result = lead(out[:-2], True)
    for mask in call.inputs[3:]:
        offset = len(scores) - len(mask)
        full = (*result, *named_term(scores[-2:], (rows, "t")))
        terms.append(
            tuple(
                full[offset + i] if size == scores[offset + i] and size != 1 else ()
                for i, size in enumerate(mask)
            )
        )
    results = (result + named_term(out[-2:], (rows, "f")),)
    shares = key[:-2] == value[:-2] and (
        query[:-2] == key[:-2] or (grouped and query[:heads] == key[:heads])
    )
    goes_round = shares and len(call.inputs) == 3 and (rows == "s" or query[-2] == key[-2])
    return Notation(tuple(terms), results, frozenset({"e", "f"} if goes_round else {"t", "e", "f"}))


def embedding(call: OpCall) -> Notation:
    """Rows of a table: `v h, ids -> ids h`; sharding `v` leaves the result Partial.

    With scale_grad_by_freq, ids and `v` stay whole: counting an id needs all ids on one rank.
    """
    ids = call.inputs[1]
    labels = names(len(ids), "_")
    counts = bool(call.args.get("scale_grad_by_freq"))
    return Notation(
        (named_term(call.inputs[0], ("v", "h")), named_term(ids, labels)),
        (named_term(ids, labels) + named_term(call.outputs[0][-1:], ("h",)),),
        frozenset({"v", *labels}) if counts else frozenset(),
    )


def cross_entropy(call: OpCall) -> Notation:
    """Class logits [n, v] or [n, v, ...] against class indices, summed or per row.

    Classes may be sharded only in the form that the lowered function supports: a sum over [n, v]
    without class weights.
    """
    logits, labels = call.inputs[0], call.inputs[1]
    rest = names(len(logits) - 2)
    rows = ("n",) if len(logits) > 1 else ()
    term = named_term(logits, (*rows, "v", *rest))
    target = named_term(labels, (*rows, *rest))
    weights = tuple(named_term(shape, ("v",)) for shape in call.inputs[2:])
    out = target if call.outputs[0] else ()
    is_sum = call.args["reduction"] == torch.nn._reduction.get_enum("sum")
    lowers = is_sum and len(logits) == 2 and not weights
    return Notation((term, target, *weights), (out,), frozenset() if lowers else frozenset({"v"}))
