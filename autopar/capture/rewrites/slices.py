"""Canonical forms of slices, and of writes into slices.

slices        a slice of the whole is removed; others get a non-negative dim and bounds
writes        a write over the whole is the written value
complex       torch has no derivative of `slice_scatter` and `select_scatter` of complex tensors.
              Here they are `cat` of what is before, written and behind; with steps, `where` of the
              written values, each repeated up to the next
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import fx

from autopar.capture.builder import Builder, TracedCall

aten = torch.ops.aten


def slice_(b: Builder, call: TracedCall) -> fx.Node | None:
    source = call.args[0]
    return cut(b, source, *_bounds(call.bind(), source))


def cut(b: Builder, x: fx.Node, dim: int, start: int, end: int, step: int = 1) -> fx.Node:
    """`x[start:end:step]` along a dim, or x itself if that is the whole."""
    if (start, end, step) == (0, x.meta["val"].shape[dim], 1):
        return x
    return b.op(aten.slice.Tensor, x, dim, start, end, step)


def _bounds(bound: Mapping[str, Any], source: fx.Node) -> tuple[int, int, int, int]:
    """(dim, start, end, step) of a slice, all non-negative."""
    shape = tuple(source.meta["val"].shape)
    dim = bound["dim"] % len(shape)
    part = slice(bound["start"], bound["end"], bound["step"])
    return (dim, *part.indices(shape[dim]))


def slice_scatter(b: Builder, call: TracedCall) -> fx.Node | None:
    bound, source = call.bind(), call.args[0]
    dim, start, end, step = _bounds(bound, source)
    if (start, end, step) == (0, source.meta["val"].shape[dim], 1):
        return bound["src"]
    if not source.meta["val"].is_complex():
        return b.op(aten.slice_scatter.default, source, bound["src"], dim, start, end, step)
    if step == 1:
        return _with_part(b, source, bound["src"], dim, start)
    return _with_steps(b, source, bound["src"], dim, slice(start, end, step))


def select_scatter(b: Builder, call: TracedCall) -> fx.Node | None:
    bound, source = call.bind(), call.args[0]
    if not source.meta["val"].is_complex():
        return None
    shape = source.meta["val"].shape
    dim = bound["dim"] % len(shape)
    written = b.op(aten.unsqueeze.default, bound["src"], dim)
    return _with_part(b, source, written, dim, bound["index"] % shape[dim])


def _with_part(b: Builder, source: fx.Node, written: fx.Node, dim: int, start: int) -> fx.Node:
    """`source` with `written` from `start` on."""
    size, n_written = source.meta["val"].shape[dim], written.meta["val"].shape[dim]
    if n_written == 0:
        return source
    written = b.cast(written, source.meta["val"].dtype)
    before = [cut(b, source, dim, 0, start)] if start > 0 else []
    end = start + n_written
    behind = [cut(b, source, dim, end, size)] if end < size else []
    return b.op(aten.cat.default, [*before, written, *behind], dim)


def _with_steps(b: Builder, source: fx.Node, written: fx.Node, dim: int, part: slice) -> fx.Node:
    """`source` with `written` at every step of a slice."""
    shape = source.meta["val"].shape
    if written.meta["val"].shape[dim] == 0:
        return source
    size, rank = shape[dim], len(shape)
    places = b.constant("places", partial(_places, size, part))
    chosen = b.constant("chosen", partial(_chosen, size, part, rank - dim))
    written = b.cast(written, source.meta["val"].dtype)
    spread = b.op(aten.index.Tensor, written, [*[None] * dim, places])
    return b.op(aten.where.self, chosen, spread, source)


def _places(size: int, part: slice) -> torch.Tensor:
    """For each index, the written value that is there, or some other."""
    last = len(range(size)[part]) - 1
    return ((torch.arange(size) - part.start) // part.step).clamp(0, last)


def _chosen(size: int, part: slice, rank: int) -> torch.Tensor:
    """Which indices are written, as the first of `rank` dims."""
    flags = torch.zeros(size, dtype=torch.bool)
    flags[part] = True
    return flags.reshape(size, *[1] * (rank - 1))


SLICE_REWRITES: dict[Any, Callable[[Builder, TracedCall], fx.Node | None]] = {
    aten.slice.Tensor: slice_,
    aten.slice_scatter: slice_scatter,
    aten.select_scatter: select_scatter,
}
