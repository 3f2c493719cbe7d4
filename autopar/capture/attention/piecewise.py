"""A mask whose rows are constant between few columns: looked at there, however large it is.

Masks compare a number of a row with one of a column: positions, ids of documents. If the numbers of
the columns do not decrease, the result changes along a row at two columns at most, where they reach
the row's number and where they exceed it (`torch.searchsorted`). Whatever is computed elementwise
from such comparisons and from numbers of rows is constant between these columns. So is what a mask
is compared with. Two functions that are equal on both sides of every change are equal everywhere.

So a mask of n x n takes n times a few evaluations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

aten = torch.ops.aten
_COMPARISONS = frozenset(
    getattr(aten, name).Tensor for name in ("eq", "ne", "le", "lt", "ge", "gt")
)


@dataclass
class PiecewiseMask:
    """An elementwise computation of `mask` by `steps`, from the values of its parts.

    A value has n rows or one, and n columns or one; leading dims have one element.
    """

    mask: fx.Node
    steps: Sequence[fx.Node]
    values: dict[fx.Node, Tensor]
    n_rows: int
    n_columns: int
    _both: dict[fx.Node, None] = field(default_factory=dict)  # steps of rows and columns
    _changes: list[Tensor] = field(default_factory=list)  # columns [n_rows, 1] where they change

    @staticmethod
    def of(
        mask: fx.Node, steps: Sequence[fx.Node], parts: Mapping[fx.Node, Tensor]
    ) -> PiecewiseMask | None:
        """None if its rows may change anywhere."""
        n_rows, n_columns = mask.meta["val"].shape[-2:]
        found = PiecewiseMask(mask, steps, {}, n_rows, n_columns)
        for node, part in parts.items():
            value = part.reshape(part.shape[-2:]) if part.shape[:-2].numel() == 1 else part
            if value.dim() > 2 or (found._has_rows(value) and found._has_columns(value)):
                return None
            found.values[node] = value
        return found if all(map(found._add, steps)) else None

    def evaluate(self, columns: Tensor) -> tuple[Tensor, Tensor]:
        """(columns, the mask there), [n_rows, k] each: at both sides of its changes, at both ends,
        and at `columns` [n_rows, m]."""
        ends = torch.tensor([0, self.n_columns - 1]).expand(self.n_rows, 2)
        sides = [c + side for c in self._changes for side in (-1, 0)]
        every = torch.cat([ends, columns, *sides], dim=1).clamp(0, self.n_columns - 1)
        values = {
            node: value.expand(*value.shape[:-2], 1, -1).reshape(-1)[every]
            if self._has_columns(value)
            else value
            for node, value in self.values.items()
        }
        for node in self._both:
            values[node] = compute_step(node, values)
        return every, values[self.mask].expand(every.shape)

    def _add(self, node: fx.Node) -> bool:
        """Note a step; False if rows may change anywhere by it."""
        inputs = node.all_input_nodes
        if not any(source in self._both for source in inputs):
            columns = [x for x in inputs if self._has_columns(self.values[x])]
            if not columns or not any(self._has_rows(self.values[x]) for x in inputs):
                self.values[node] = compute_step(node, self.values)
                return True
            if node.target not in _COMPARISONS or len(inputs) != 2 or len(columns) != 1:
                return False
            (column,) = (self.values[x].reshape(-1) for x in columns)
            (row,) = (self.values[x] for x in inputs if x not in columns)
            if bool((column[1:] < column[:-1]).any()):
                return False
            for right in (False, True):
                found = torch.searchsorted(column.contiguous(), row.contiguous(), right=right)
                self._changes.append(found.reshape(-1, 1))
        elif any(x not in self._both and self._has_columns(self.values[x]) for x in inputs):
            return False
        self._both[node] = None
        return True

    def _has_rows(self, value: Tensor) -> bool:
        return value.dim() >= 2 and value.shape[-2] > 1

    def _has_columns(self, value: Tensor) -> bool:
        return value.dim() >= 1 and value.shape[-1] > 1


def compute_step(node: fx.Node, values: Mapping[fx.Node, Tensor]) -> Tensor:
    """A step on values; those that expand keep their shape."""
    if node.target is aten.expand.default:
        source: Any = node.args[0]
        return values[source]
    args, kwargs = pytree.tree_map_only(fx.Node, values.__getitem__, (node.args, node.kwargs))
    assert callable(node.target)
    result: Tensor = node.target(*args, **kwargs)
    return result
