"""Notations of operators that move elements without computing: views, slices, cat, pad, fills.

The notation of a reshape follows from the two shapes. Both are cut into segments: shortest groups
of dims with equal products. Within a segment, the suffix products of both sides are cut points. If
every cut divides the next, both sides are products of the same names, one per pair of neighbouring
cuts. If not, the dims of that segment are frozen.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from autopar.placement import Dim, Notation, Term
from autopar.rules.families import broadcast_term, named_term, names
from autopar.rules.rule import OpCall, Shape


def _suffix_cuts(sizes: Sequence[int]) -> list[int]:
    cuts, product = [], 1
    for size in reversed(sizes):
        product *= size
        cuts.append(product)
    return cuts


def view_notation(source: Shape, target: Shape) -> Notation:
    """The notation of a reshape, with the names that both shapes are products of."""
    frozen: set[str] = set()
    counter = iter(range(1 << 30))
    left = [i for i, n in enumerate(source) if n != 1]
    right = [i for i, n in enumerate(target) if n != 1]
    terms: tuple[list[Dim], list[Dim]] = ([()] * len(source), [()] * len(target))
    while left or right:
        left_part, right_part = _last_segment(source, left, target, right)
        cuts = sorted(
            {1}
            | set(_suffix_cuts([source[i] for i in left_part]))
            | set(_suffix_cuts([target[i] for i in right_part]))
        )
        divides = all(b % a == 0 for a, b in itertools.pairwise(cuts))
        shared = {cut: f"v{next(counter)}" for cut in cuts[:-1]} if divides else {}
        for side, (shape, part) in enumerate(((source, left_part), (target, right_part))):
            low = 1
            for i in reversed(part):
                high = low * shape[i]
                if divides:
                    terms[side][i] = tuple(
                        shared[c] for c in reversed(cuts[:-1]) if low <= c < high
                    )
                else:
                    name = f"v{next(counter)}"
                    frozen.add(name)
                    terms[side][i] = (name,)
                low = high
    return Notation((tuple(terms[0]),), (tuple(terms[1]),), frozenset(frozen))


def _last_segment(
    source: Shape, left: list[int], target: Shape, right: list[int]
) -> tuple[list[int], list[int]]:
    """Pop the shortest run of trailing dims with equal products from both sides."""
    left_part, right_part = [left.pop()], [right.pop()]
    a, b = source[left_part[0]], target[right_part[0]]
    while a != b:
        if a < b:
            left_part.insert(0, left.pop())
            a *= source[left_part[0]]
        else:
            right_part.insert(0, right.pop())
            b *= target[right_part[0]]
    return left_part, right_part


def view(call: OpCall) -> Notation:
    if 0 in call.inputs[0]:
        held = names(len(call.inputs[0]), "i"), names(len(call.outputs[0]), "o")
        terms = named_term(call.inputs[0], held[0]), named_term(call.outputs[0], held[1])
        return Notation((terms[0],), (terms[1],), frozenset(held[0] + held[1]))
    return view_notation(call.inputs[0], call.outputs[0])


def permuted(order: Sequence[int], shape: Shape) -> Notation:
    term = named_term(shape, names(len(shape)))
    return Notation((term,), (tuple(term[i] for i in order),))


def permute(call: OpCall) -> Notation:
    rank = len(call.inputs[0])
    return permuted([int(d) % rank for d in call.args["dims"]], call.inputs[0])


def transpose(call: OpCall) -> Notation:
    rank = len(call.inputs[0])
    order = list(range(rank))
    if "dim0" in call.args:
        a, b = call.dim("dim0"), call.dim("dim1")
    else:
        a, b = max(rank - 2, 0), max(rank - 1, 0)
    if rank:
        order[a], order[b] = order[b], order[a]
    return permuted(order, call.inputs[0])


def reverse(call: OpCall) -> Notation:
    """`x.T` of any rank."""
    return permuted(range(len(call.inputs[0]))[::-1], call.inputs[0])


def squeeze(call: OpCall) -> Notation:
    """A view. Dims that may be squeezed stay whole: a shard of one element would be dropped."""
    shape, notation = call.inputs[0], view(call)
    dim = call.args.get("dim", list(range(len(shape))))
    dims = dim if isinstance(dim, (list, tuple)) else (dim,)
    dropped = {name for d in dims if shape for name in notation.inputs[0][d % len(shape)]}
    return Notation(notation.inputs, notation.outputs, notation.frozen | dropped)


def localise_unflatten(
    call: OpCall, inputs: Sequence[Shape], outputs: Sequence[Shape]
) -> dict[str, Any]:
    start = call.dim()
    return {"sizes": list(outputs[0][start : start + len(call.args["sizes"])])}


def _cut_dim(whole: int, part: int, start: int = 0) -> bool:
    """Is the part of `part` elements at `start` one of equal parts that tile `whole`?"""
    return part > 0 and whole % part == 0 and start % part == 0


def _parts(call: OpCall, dim: int, whole: Shape, parts: Sequence[Shape]) -> tuple[Term, list[Term]]:
    """The terms of `whole` and its `parts` along `dim`.

    If all parts are equal, `whole` is (n x) along `dim` and every part is x. Otherwise `whole` is n
    and part i is xi.
    """
    labels = names(len(whole))
    base = named_term(whole, labels)
    equal = all(shape[dim] == parts[0][dim] for shape in parts)
    if equal and _cut_dim(whole[dim], parts[0][dim]):
        inner: Dim = ("x",) if parts[0][dim] != 1 else ()
        outer: Dim = ("n",) if whole[dim] != parts[0][dim] else ()
        return (
            (*base[:dim], outer + inner, *base[dim + 1 :]),
            [(*base[:dim], inner, *base[dim + 1 :]) for _ in parts],
        )
    return (
        (*base[:dim], ("n",), *base[dim + 1 :]),
        [
            (*base[:dim], (f"x{i}",) if shape[dim] != 1 else (), *base[dim + 1 :])
            for i, shape in enumerate(parts)
        ],
    )


def _held(whole: Term, parts: Sequence[Term], dim: int) -> frozenset[str]:
    """The names along `dim` that stay whole: all but those that whole and parts share."""
    shared = set(whole[dim]) & set(parts[0][dim])
    return frozenset((set(whole[dim]) | {n for p in parts for n in p[dim]}) - shared)


def split(call: OpCall) -> Notation:
    dim = call.dim()
    whole, parts = _parts(call, dim, call.inputs[0], call.outputs)
    return Notation((whole,), tuple(parts), _held(whole, parts, dim))


def localise_split(
    call: OpCall, inputs: Sequence[Shape], outputs: Sequence[Shape]
) -> dict[str, Any]:
    dim = call.dim()
    sizes = [shape[dim] for shape in outputs]
    if "split_sizes" in call.args:
        return {"split_sizes": sizes}
    return {"split_size": sizes[0]} if "split_size" in call.args else {}


def unbind(call: OpCall) -> Notation:
    shape, dim = call.inputs[0], call.dim()
    labels = names(len(shape))
    term = named_term(shape, labels)
    rest = (*term[:dim], *term[dim + 1 :])
    return Notation((term,), (rest,) * len(call.outputs), frozenset({labels[dim]}))


def select(call: OpCall) -> Notation:
    return unbind(call)


def slice_bounds(call: OpCall) -> tuple[int, int, int]:
    size = call.inputs[0][call.dim()]
    return slice(call.args["start"], call.args["end"], call.args["step"]).indices(size)


def slice_(call: OpCall) -> Notation:
    shape, dim = call.inputs[0], call.dim()
    start, _, step = slice_bounds(call)
    part = call.outputs[0]
    if step == 1 and _cut_dim(shape[dim], part[dim], start):
        whole, parts = _parts(call, dim, shape, [part])
        return Notation((whole,), (parts[0],), _held(whole, parts, dim))
    labels = names(len(shape))
    term = named_term(shape, labels)
    out = (*term[:dim], ("x",) if part[dim] != 1 else (), *term[dim + 1 :])
    return Notation((term,), (out,), frozenset({labels[dim], "x"}))


def localise_slice(
    call: OpCall, inputs: Sequence[Shape], outputs: Sequence[Shape]
) -> dict[str, Any]:
    dim = call.dim()
    if inputs[0][dim] == call.inputs[0][dim]:
        return {}
    start, _, _ = slice_bounds(call)
    index, local = start // call.outputs[0][dim], outputs[0][dim]
    return {"start": index * local, "end": (index + 1) * local}


def scattered(call: OpCall) -> Notation:
    """`slice_scatter` and `select_scatter`: a part written into a tensor; the dim stays whole."""
    whole, part = call.inputs
    dim, labels = call.dim(), names(len(whole))
    term = named_term(whole, labels)
    along: Term = () if len(part) < len(whole) else (("x",) if part[dim] != 1 else (),)
    source = (*term[:dim], *along, *term[dim + 1 :])
    return Notation((term, source), (term,), frozenset({labels[dim], "x"}))


def cat(call: OpCall) -> Notation:
    rank = len(call.outputs[0])
    dim = call.dim(rank=rank)
    whole, parts = _parts(call, dim, call.outputs[0], call.inputs)
    return Notation(tuple(parts), (whole,), _held(whole, parts, dim))


def stack(call: OpCall) -> Notation:
    dim = call.dim(rank=len(call.outputs[0]))
    labels = names(len(call.inputs[0]))
    term = named_term(call.inputs[0], labels)
    new: Dim = ("n",) if len(call.inputs) != 1 else ()
    out = (*term[:dim], new, *term[dim:])
    return Notation((term,) * len(call.inputs), (out,), frozenset({"n"}))


def expand(call: OpCall) -> Notation:
    out = call.outputs[0]
    labels = names(len(out))
    return Notation((broadcast_term(call.inputs[0], out, labels),), (named_term(out, labels),))


def localise_size(name: str) -> Any:
    """Replace the argument `name` by the local shape of the output."""

    def localise(call: OpCall, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> dict[str, Any]:
        return {name: list(outputs[0])}

    return localise


def created(call: OpCall) -> Notation:
    """A filled tensor of a given size: every dim may be sharded."""
    return Notation((), (named_term(call.outputs[0], names(len(call.outputs[0]))),))


def created_like(call: OpCall) -> Notation:
    """A filled tensor with the dtype of its input. Their dims are the same if the shapes are."""
    out, labels = call.outputs[0], names(len(call.outputs[0]))
    if call.inputs[0] == out:
        term = named_term(out, labels)
        return Notation((term,), (term,))
    held = names(len(call.inputs[0]), "i")
    return Notation(
        (named_term(call.inputs[0], held),), (named_term(out, labels),), frozenset(held)
    )


def pad(call: OpCall) -> Notation:
    """Padding; padded dims stay whole."""
    shape, out = call.inputs[0], call.outputs[0]
    amounts = call.args["pad"]  # (before, after) of the last dim, then of the one before it
    padded = [any(amounts[2 * i : 2 * i + 2]) for i in reversed(range(len(shape)))]
    labels, after = names(len(shape)), names(len(shape), "p")
    source = named_term(shape, labels)
    target = tuple(
        new if changed else dim
        for dim, new, changed in zip(source, named_term(out, after), padded, strict=True)
    )
    held = {n for i, changed in enumerate(padded) if changed for n in (labels[i], after[i])}
    return Notation((source,), (target,), frozenset(held))


def diagonal(call: OpCall) -> Notation:
    """The diagonal of two dims, which stay whole. It becomes the last dim."""
    shape = call.inputs[0]
    taken = {call.dim("dim1"), call.dim("dim2")}
    labels = names(len(shape))
    source = named_term(shape, labels)
    rest = tuple(dim for i, dim in enumerate(source) if i not in taken)
    last: Dim = ("x",) if call.outputs[0][-1] != 1 else ()
    return Notation((source,), ((*rest, last),), frozenset({"x", *(labels[i] for i in taken)}))


def diagonal_embedded(call: OpCall) -> Notation:
    """The last dim, which stays whole, becomes the diagonal of two new dims."""
    out = call.outputs[0]
    new = [call.dim("dim1", len(out)), call.dim("dim2", len(out))]
    labels = names(len(out))
    target = named_term(out, labels)
    rest = tuple(dim for i, dim in enumerate(target) if i not in new)
    last: Dim = ("x",) if call.inputs[0][-1] != 1 else ()
    return Notation(((*rest, last),), (target,), frozenset({"x", *(labels[i] for i in new)}))


def folded(call: OpCall) -> Notation:
    """`unfold_backward`: windows, whose elements are the last dim, are added up along a dim."""
    shape, dim = call.outputs[0], call.dim("dim", len(call.outputs[0]))
    labels = names(len(shape))
    windows = (*labels[:dim], "w", *labels[dim + 1 :], "x")
    return Notation(
        (named_term(call.inputs[0], windows),),
        (named_term(shape, labels),),
        frozenset({"w", "x", labels[dim]}),
    )


def unfold(call: OpCall) -> Notation:
    """Windows along a dim, which stays whole. Their elements become the last dim."""
    shape, out, dim = call.inputs[0], call.outputs[0], call.dim("dimension")
    labels = names(len(shape))
    windows = (*labels[:dim], "w", *labels[dim + 1 :], "x") if shape else ("x",)
    return Notation(
        (named_term(shape, labels),),
        (named_term(out, windows),),
        frozenset({"w", "x", *labels[dim : dim + 1]}),
    )
