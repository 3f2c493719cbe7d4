"""Rules of operators that read or write at indices given by tensors.

    index        x[i, j, :]     a! b! c, (p q), (p q) -> p q c
    index put    x[i, j] = v    a! b! c, p!, p!, (p! c) -> a! b! c
    scatter      along a dim    a! c, i! c, s! c -> a! c
    index add    along a dim    a! c, i!, s! c -> a! c

Dims that are indexed stay whole, and all other dims may be sharded. Index tensors may be sharded
for reads: each rank reads the whole source at its own indices, and the gradient of the source is
then Partial. They stay whole for writes: a rank would see only its own writes. With fixed indices,
all these operators are linear in the tensors that they read and write.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar.placement import Notation, Term
from autopar.rules.families import broadcast_term, named_term, names, whole
from autopar.rules.rule import LinearSets, OpCall, OpRule, Shape

SUMS = ("sum", "mean")


def _is_mask(index: Any) -> bool:
    value = index.meta["val"] if isinstance(index, fx.Node) else index
    return value.dtype in (torch.bool, torch.uint8)


@dataclass(frozen=True)
class _IndexNames:
    """`x[indices]` in notation.

    source       the term of x
    indices      terms of the index tensors
    read         the term of the result; `read_shape` is its shape
    addressed    names of the indexed dims of x
    block        names of the index tensors, broadcast together
    """

    source: Term
    indices: tuple[Term, ...]
    read: Term
    read_shape: Shape
    addressed: frozenset[str]
    block: frozenset[str]

    @staticmethod
    def of(call: OpCall) -> _IndexNames:
        shape = call.inputs[0]
        dims = [i for i, index in enumerate(call.args["indices"]) if index is not None]
        index_shapes = call.inputs[1 : 1 + len(dims)]
        block_shape = torch.broadcast_shapes(*index_shapes)
        labels, block = names(len(shape)), names(len(block_shape), "p")
        source = named_term(shape, labels)
        # The block stands in place of the indexed dims if they are adjacent, and else comes first.
        adjacent = dims[-1] - dims[0] + 1 == len(dims)
        start = dims[0] if adjacent else 0
        rest = [i for i in range(len(shape)) if i not in dims]
        before, after = [i for i in rest if i < start], [i for i in rest if i >= start]
        middle = named_term(tuple(block_shape), block)
        return _IndexNames(
            source,
            tuple(broadcast_term(s, tuple(block_shape), block) for s in index_shapes),
            (*(source[i] for i in before), *middle, *(source[i] for i in after)),
            (*(shape[i] for i in before), *block_shape, *(shape[i] for i in after)),
            frozenset(labels[i] for i in dims),
            frozenset(block),
        )


def index(call: OpCall) -> Notation:
    """`x[i, j]` with integer tensors."""
    places = _IndexNames.of(call)
    return Notation((places.source, *places.indices), (places.read,), places.addressed)


def refuse_masks(call: OpCall) -> str | None:
    if any(_is_mask(i) for i in call.args["indices"] if i is not None):
        return "x[mask] has a shape that depends on the data\nuse torch.where or masked_fill"
    return None


def index_put(call: OpCall) -> Notation:
    """`x[i, j] = v`, with v broadcast to the shape of x[i, j]. With masks, all dims stay whole."""
    if any(_is_mask(i) for i in call.args["indices"] if i is not None):
        return whole(call)
    places = _IndexNames.of(call)
    shape, offset = call.inputs[-1], len(places.read_shape) - len(call.inputs[-1])
    values = tuple(
        places.read[offset + i] if size == places.read_shape[offset + i] else ()
        for i, size in enumerate(shape)
    )
    return Notation(
        (places.source, *places.indices, values),
        (places.source,),
        places.addressed | places.block,
    )


def gather(call: OpCall) -> Notation:
    """`gather` along a dim, which stays whole in the source.

    Another dim stays whole in both if the index is shorter than the source there: the index then
    addresses only the source's first rows.
    """
    source, places = call.inputs
    along, labels, held = call.dim(), names(len(places)), names(len(source), "x")
    same = [i != along and n == places[i] for i, n in enumerate(source)]
    mixed = tuple(d if ok else x for ok, d, x in zip(same, labels, held, strict=True))
    shorter = {d for i, d in enumerate(labels) if i != along and not same[i]}
    term = named_term(places, labels)
    return Notation((named_term(source, mixed), term), (term,), frozenset(held) | shorter)


def scatter(call: OpCall) -> Notation:
    """`scatter` along a dim: other dims are free if they have the same size in all tensors."""
    along, rank = call.dim(), len(call.inputs[0])
    alike = [
        i != along and len({shape[i] for shape in call.inputs if shape}) == 1 for i in range(rank)
    ]
    terms, held = [], set()
    for k, shape in enumerate(call.inputs):
        own = names(len(shape), f"x{k}_")
        held |= set(own)
        labels = tuple(f"d{i}" if alike[i] else own[i] for i in range(len(shape)))
        terms.append(named_term(shape, labels))
    return Notation(tuple(terms), (terms[0],), frozenset(held))


def along_index(call: OpCall) -> Notation:
    """`index_add`, `index_copy`, `index_fill`: the index lists rows of one dim."""
    along, labels = call.dim(), names(len(call.inputs[0]))

    def term(shape: Shape, name: str) -> Term:
        return named_term(shape, tuple(name if i == along else d for i, d in enumerate(labels)))

    target, places, *values = call.inputs
    return Notation(
        (
            term(target, "a"),
            named_term(places, names(len(places), "i")),
            *(term(shape, "s") if shape else () for shape in values),
        ),
        (term(target, "a"),),
        frozenset({"a", "s", "i0"}),
    )


def searched(call: OpCall) -> Notation:
    """`searchsorted`: the sequences stay whole; they are one, or one for each row of values."""
    sequence, values = call.inputs[:2]
    labels = names(len(values))
    rows = labels[:-1] if len(sequence) > 1 else ()
    term, found = named_term(sequence, (*rows, "v")), named_term(values, labels)
    return Notation((term, found, *[term] * len(call.inputs[2:])), (found,), frozenset({"v"}))


def segments(call: OpCall) -> Notation:
    """`segment_reduce`: what the segments are of stays whole; so do all dims before it."""
    data, *others = call.inputs
    axis = int(call.args["axis"]) % len(data)
    labels = names(len(data))
    held = [names(len(s), f"s{k}_") for k, s in enumerate(others)]
    out = (*labels[:axis], "y", *labels[axis + 1 :])
    return Notation(
        (named_term(data, labels), *(named_term(s, t) for s, t in zip(others, held, strict=True))),
        (named_term(call.outputs[0], out),),
        frozenset({"y", *labels[: axis + 1], *(n for t in held for n in t)}),
    )


def _ends_jointly(call: OpCall) -> LinearSets:
    """Linear in the tensor that is written into (the first) and the values (the last)."""
    return ((0, len(call.inputs) - 1),)


def _reduces_jointly(call: OpCall) -> LinearSets:
    return _ends_jointly(call) if call.args.get("reduce", "sum") in SUMS else ()


def refuse_sparse(call: OpCall) -> str | None:
    """Gradients of a table are dense."""
    if not call.args["sparse"]:
        return None
    return "sparse gradients of an embedding are not supported\nset sparse=False"


def _writes_zero(call: OpCall) -> LinearSets:
    return ((0,),) if call.args["value"] == 0 else ()


INDEXING = (
    OpRule("aten.index.Tensor", index, linear=((0,),), check=refuse_masks),
    OpRule("aten.index_put.default", index_put, linear=_ends_jointly),
    OpRule("aten.gather.default", gather, linear=((0,),)),
    OpRule("aten.scatter.src", scatter, linear=_ends_jointly),
    OpRule("aten.scatter.value", scatter, linear=_writes_zero),
    OpRule("aten.scatter_add.default", scatter, linear=_ends_jointly),
    OpRule("aten.scatter_reduce.two", scatter, linear=_reduces_jointly),
    OpRule("aten.index_add.default", along_index, linear=_ends_jointly),
    OpRule("aten.index_copy.default", along_index, linear=_ends_jointly),
    OpRule("aten.index_fill.int_Scalar", along_index, linear=_writes_zero),
    OpRule("aten.index_fill.int_Tensor", along_index, linear=_ends_jointly),
    OpRule("aten._embedding_bag.default", whole, check=refuse_sparse),
    OpRule("aten.segment_reduce.default", segments),
    OpRule("aten.searchsorted.Tensor", searched),
    OpRule("aten.masked_scatter.default", whole, linear=((0, 2),)),
)
