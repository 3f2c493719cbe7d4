"""Attention masks by which each row sees one range of keys: `attention_ranges` instead.

    mask = c1 & c2 & ...        each compares a number of a column with one of a row

If the numbers of the columns do not decrease, what a comparison shows is a range of columns:
`count_below` finds its ends. All of them together show where these ranges meet. So nothing of the
mask's size is computed. Causal masks, windows of neighbours and documents in one sequence are such
masks.

transformers numbers documents by their positions: where one is not the last plus 1, the next
document begins. So inside of a document, positions compare as rows and columns do.

A mask becomes ranges where that pays: rows see few keys, or the mask is large. A fused kernel reads
a mask faster than blocks of rows are computed one by one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from autopar.capture.attention.flags import evaluate, mask_of
from autopar.capture.builder import Builder, TracedCall
from autopar.capture.dependence import Depends
from autopar.capture.names import source_line
from autopar.errors import CaptureError
from autopar.operators import ATTENTION_RANGES, COUNT_BELOW

aten = torch.ops.aten
_ATTENTION = aten.scaled_dot_product_attention.default
# Scores of blocks go to memory, some 28 bytes each (`rules/random.py`). On an H100 a pair takes ten
# times as long as in a fused kernel of 128 features.
_FEW_SEEN = 1 / 16
_LARGE_BYTES = 1 << 32  # of one sequence
# What a causal row sees of all keys, where documents are not known.
_SEEN_OF_CAUSAL = 0.5

_MIRRORED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "eq": "eq"}
_COMPARISONS = {
    overload: name
    for name in _MIRRORED
    for overload in (getattr(aten, name).Tensor, getattr(aten, name).Scalar)
}
_AND = (aten.bitwise_and.Tensor, aten.logical_and.default)
_ONES = (aten.ones.default, aten.ones_like.default, aten.new_ones.default)
_VIEWS = (aten.reshape.default, aten.unsqueeze.default, aten.expand.default)
Leaves = Mapping[fx.Node, Callable[[], Tensor]]


@dataclass(frozen=True)
class _Comparison:
    """`columns` [*, 1, t] of some `kind` beside `rows` [*, s, 1] + `more`."""

    columns: Any
    kind: str
    rows: Any
    more: float = 0.0


class _RowRanges(NamedTuple):
    """`first` and `after` [*, s, 1]; the share of pairs that they show; is it that of `documents`
    of the batch, if each row were one? Are they all of a causal mask?"""

    first: fx.Node
    after: fx.Node
    seen: float
    documents: bool = False
    is_causal: bool = False


def range_masks(b: Builder, depends: Mapping[fx.Node, Depends], leaves: Leaves) -> None:
    """Replace attention under such masks."""
    ranges: dict[fx.Node, _RowRanges | None] = {}
    for node in list(b.graph.nodes):
        mask = mask_of(node)
        if mask is None or node.target is not _ATTENTION or depends[mask] is Depends.ANY:
            continue
        call = TracedCall.of(node)
        bound = call.bind()
        if bound["dropout_p"] != 0 or bound["is_causal"]:
            continue
        b.origin = node
        if mask not in ranges:  # before the first attention that reads it
            with b.graph.inserting_before(node):
                ranges[mask] = _ranges(b, mask, depends, leaves)
        found = ranges[mask]
        if found is None:
            continue
        if found.is_causal:
            call.change(attn_mask=None, is_causal=True)
            b.findings.add(
                "replaced", "a causal mask", "`is_causal`", source_line(mask), routine=True
            )
            continue
        width = bound["query"].meta["val"].shape[-1]
        scale = 1 / math.sqrt(width) if bound["scale"] is None else float(bound["scale"])
        tensors = (bound["query"], bound["key"], bound["value"])
        with b.graph.inserting_before(node):
            of_batch = [True] if found.documents else []
            by_ranges = b.op(
                ATTENTION_RANGES, *tensors, *found[:3], scale, bound["enable_gqa"], *of_batch
            )
        node.replace_all_uses_with(by_ranges)
        b.findings.add(
            "replaced", "attention under a mask", "a range of keys per row, in blocks of rows",
            source_line(node), routine=True,
        )  # fmt: skip


def _ranges(
    b: Builder, mask: fx.Node, depends: Mapping[fx.Node, Depends], leaves: Leaves
) -> _RowRanges | None:
    """None if the mask stays."""
    n_rows, n_columns = mask.meta["val"].shape[-2:]
    found = _comparisons(mask)
    if not found:
        return None
    is_known = depends[mask] is Depends.CONSTANT
    is_large = n_rows * n_columns >= _LARGE_BYTES
    if not is_known:
        if not is_large:
            return None
        found = [*_compare_places(b, found, mask)]
    columns = list(dict.fromkeys(c.columns for c in found))
    is_sorted = all(map(_never_decreases, columns))
    if not is_sorted and not (is_known and _do_not_decrease(columns, leaves)):
        return None
    first, after = _meet(b, found, n_columns)
    seen = _SEEN_OF_CAUSAL if any(c.kind in ("lt", "le") for c in found) else 1.0
    if is_known:
        try:
            starts, ends = evaluate((first, after), leaves)
        except CaptureError:  # a buffer without values: raised when its values are needed
            return None
        seen = float((ends - starts).clamp(min=0).double().mean() / n_columns)
        up_to_row = torch.arange(1, n_rows + 1).unsqueeze(1)
        if n_rows == n_columns and bool((starts <= 0).all() and (ends == up_to_row).all()):
            return _RowRanges(first, after, seen, is_causal=True)
    documents = not is_known and any(c.kind == "eq" for c in found)
    return _RowRanges(first, after, seen, documents) if is_large or seen <= _FEW_SEEN else None


def _comparisons(node: Any) -> list[_Comparison] | None:
    """The comparisons that are all true where a mask is; None if it is something else."""
    if node.target in _AND:
        parts = [_comparisons(source) for source in node.args[:2]]
        return None if None in parts else [c for part in parts if part is not None for c in part]
    if node.target in _ONES:
        return []
    if node.target is aten.expand.default or _adds_outer_dim(node):
        return _comparisons(node.args[0])
    kind = _COMPARISONS.get(node.target)
    if kind is None:
        return None
    left, right = node.args[:2]
    if not isinstance(right, fx.Node):  # rows - columns < n
        if left.target is not aten.sub.Tensor or left.kwargs or len(left.args) > 2:
            return None
        first, second = left.args
        found = _comparison(first, kind, second)
        if found is None:
            return None
        if right != int(right) and not found.rows.meta["val"].is_floating_point():
            return None
        more = right if found.columns is first else -right
        return [replace(found, more=float(more))]
    found = _comparison(left, kind, right)
    return None if found is None else [found]


def _adds_outer_dim(node: Any) -> bool:
    if node.target is not aten.unsqueeze.default:
        return False
    rank = node.meta["val"].dim()
    return bool(node.args[1] % rank < rank - 2)


def _comparison(left: Any, kind: str, right: Any) -> _Comparison | None:
    dtypes = {x.meta["val"].dtype if isinstance(x, fx.Node) else None for x in (left, right)}
    if len(dtypes) > 1 or torch.bool in dtypes:
        return None
    if _has_columns(left) and _has_rows(right):
        return _Comparison(left, kind, right)
    if _has_columns(right) and _has_rows(left):
        return _Comparison(right, _MIRRORED[kind], left)
    return None


def _has_columns(node: Any) -> bool:
    shape = _shape(node)
    return len(shape) > 0 and shape[-1] > 1 and shape[-2:-1] in ((), (1,))


def _has_rows(node: Any) -> bool:
    shape = _shape(node)
    return len(shape) > 1 and shape[-1] == 1 and shape[-2] > 1


def _shape(node: Any) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape) if isinstance(node, fx.Node) else ()


def _compare_places(
    b: Builder, found: Sequence[_Comparison], mask: fx.Node
) -> Iterator[_Comparison]:
    """Inside of documents that are numbered by positions, places instead of positions."""
    n_rows, n_columns = mask.meta["val"].shape[-2:]
    positions = {_positions_of(c.columns) for c in found if c.kind == "eq"} - {None}
    for c in found:
        (column, of_column), (row, of_row) = _base_and_shift(c.columns), _base_and_shift(c.rows)
        if n_rows != n_columns or column is not row or column not in positions:
            yield c
            continue
        places = b.op(aten.arange.default, n_rows)
        columns, rows = (b.op(aten.unsqueeze.default, places, dim) for dim in (0, 1))
        yield _Comparison(columns, c.kind, rows, c.more + of_row - of_column)


def _positions_of(number: Any) -> fx.Node | None:
    """x, if documents are numbered by `(x.diff(prepend=...) != 1).cumsum(-1)`."""
    number = _base(number)
    if number.target is not aten.cumsum.default:
        return None
    begins = number.args[0]
    if begins.target is not aten.ne.Scalar or begins.args[1] != 1:
        return None
    steps = begins.args[0]
    of_places = {n % steps.meta["val"].dim() for n in (number.args[1], *steps.args[2:3])}
    if steps.target is not aten.diff.default or steps.args[1:2] != (1,) or len(of_places) > 1:
        return None
    return _base(steps.args[0]) if len(steps.args) == 4 else None


def _base(node: Any) -> Any:
    """What a view shows; all have the same elements but for repetition."""
    while node.target in _VIEWS:
        node = node.args[0]
    return node


def _base_and_shift(node: Any) -> tuple[Any, float]:
    """(x, n) of a view of x + n."""
    node, more = _base(node), 0.0
    while node.target in (aten.add.Tensor, aten.sub.Tensor) and not node.kwargs:
        source, n = node.args[:2]
        if isinstance(n, fx.Node) or len(node.args) > 2:
            break
        more += n if node.target is aten.add.Tensor else -n
        node = _base(source)
    return node, more


def _never_decreases(node: Any) -> bool:
    """Do its numbers not decrease along the last dim, whatever the inputs are?"""
    base, _ = _base_and_shift(node)
    if base.target is aten.arange.default:
        return len(base.args) < 3
    if base.target is not aten.cumsum.default:
        return False
    return base.args[0].meta["val"].dtype == torch.bool and _is_last(base)


def _is_last(node: Any) -> bool:
    rank = node.meta["val"].dim()
    return bool(node.args[1] % rank == rank - 1)


def _do_not_decrease(columns: Sequence[fx.Node], leaves: Leaves) -> bool:
    try:
        values = evaluate(columns, leaves)
    except CaptureError:
        return False
    return not any(bool((x[..., 1:] < x[..., :-1]).any()) for x in values)


def _meet(b: Builder, found: Sequence[_Comparison], n_columns: int) -> tuple[fx.Node, fx.Node]:
    """(first, after) [*, s, 1] of the columns that all comparisons show."""
    firsts, afters = list[fx.Node](), list[fx.Node]()
    for c in found:
        rows = b.op(aten.add.Tensor, c.rows, _number(c.more)) if c.more else c.rows
        columns = c.columns
        if columns.meta["val"].dim() == 1:
            columns = b.op(aten.unsqueeze.default, columns, 0)

        def below(inclusive: bool, columns: Any = columns, rows: Any = rows) -> fx.Node:
            return b.op(COUNT_BELOW, columns, rows, inclusive)

        if c.kind in ("ge", "gt", "eq"):
            firsts.append(below(c.kind == "gt"))
        if c.kind in ("lt", "le", "eq"):
            afters.append(below(c.kind != "lt"))
    first = _combine(b, aten.maximum.default, firsts)
    after = _combine(b, aten.minimum.default, afters)
    if after is None:
        assert first is not None
        return first, b.op(aten.full_like.default, first, n_columns)
    return first or b.op(aten.zeros_like.default, after), after


def _number(value: float) -> float | int:
    return int(value) if value == int(value) else value


def _combine(
    b: Builder, combine: torch._ops.OpOverload, parts: Sequence[fx.Node]
) -> fx.Node | None:
    found: fx.Node | None = None
    for part in parts:
        found = part if found is None else b.op(combine, found, part)
    return found
