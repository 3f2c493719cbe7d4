"""The moves: one differentiable function per row of `TABLE` (`autopar/placement/moves.py`).

A move m changes a tensor's placement with primitive F_m and its gradient's with G_m, where
`TABLE[m] = (F_m, G_m)`. Both run over the same group; for all_to_all the gradient swaps source
and target. `_function` builds each pair as one `torch.autograd.Function`, named after the row,
so `grad_fn` prints `<p_to_sBackward>`.

Tensors that need no gradient (ids, masks) run only the forward primitive. Outputs are
contiguous. If the forward is the identity and the input is contiguous, the output shares its
memory; otherwise it is a new tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from autopar.errors import VerificationError
from autopar.placement import TABLE, PrimitiveKind, Split
from autopar.runtime.groups import Group, phase

# Phase of a move's forward -> phase of its backward; any other phase gives "backward".
_BACKWARD_PHASES = {"param_gather": "grad_sync"}


def apply_primitive(kind: PrimitiveKind, x: Tensor, g: Group, splits: Sequence[Split]) -> Tensor:
    """Execute one primitive by name.

    `splits` holds one split, or (source, target) for all_to_all. identity, all_reduce and
    keep_first ignore it.
    """
    match kind:
        case "identity":
            return x
        case "all_reduce":
            return g.all_reduce(x)
        case "all_gather":
            return g.all_gather(x, splits[0])
        case "reduce_scatter":
            return g.reduce_scatter(x, splits[0])
        case "all_to_all":
            return g.all_to_all(x, splits[0], splits[1])
        case "slice":
            return g.slice(x, splits[0])
        case "zero_pad":
            return g.zero_pad(x, splits[0])
        case "keep_first":
            return g.keep_first(x)
    raise VerificationError(f"there is no primitive {kind!r}")


def _function(name: str) -> type[torch.autograd.Function]:
    """The autograd function of row `name`."""
    kind, gradient_kind = TABLE[name]

    def forward(ctx: Any, x: Tensor, g: Group, splits: tuple[Split, ...]) -> Tensor:
        ctx.g, ctx.splits = g, splits
        ctx.phase = _BACKWARD_PHASES.get(g.context.phase, "backward")
        return apply_primitive(kind, x, g, splits).contiguous()

    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        with phase(ctx.phase, ctx.g.context):
            # Reversing swaps (source, target) and leaves a single split as it is.
            moved = apply_primitive(gradient_kind, gradient, ctx.g, ctx.splits[::-1])
        return moved, None, None

    members = {
        "forward": staticmethod(forward),
        "backward": staticmethod(once_differentiable(backward)),
        "__module__": __name__,
        "__doc__": f"{kind} forward, {gradient_kind} backward.",
    }
    return type(name, (torch.autograd.Function,), members)


_FUNCTIONS = {name: _function(name) for name in TABLE}


def _move(name: str, x: Tensor, g: Group, *splits: Split) -> Tensor:
    if x.requires_grad and torch.is_grad_enabled():
        out: Tensor = _FUNCTIONS[name].apply(x, g, splits)
        return out
    return apply_primitive(TABLE[name][0], x, g, splits).contiguous()


def i_to_r(x: Tensor, g: Group) -> Tensor:
    """Invariant to Replicate: identity forward, all_reduce backward (Megatron's f; DDP)."""
    return _move("i_to_r", x, g)


def p_to_i(x: Tensor, g: Group) -> Tensor:
    """Partial to Invariant: all_reduce forward, identity backward (Megatron's g)."""
    return _move("p_to_i", x, g)


def p_to_r(x: Tensor, g: Group) -> Tensor:
    """Partial to Replicate: all_reduce both ways."""
    return _move("p_to_r", x, g)


def p_to_s(x: Tensor, g: Group, dim: int, outer: int = 1) -> Tensor:
    """Partial to Shard: reduce_scatter forward, all_gather backward."""
    return _move("p_to_s", x, g, Split(dim, outer))


def s_to_r(x: Tensor, g: Group, dim: int, outer: int = 1) -> Tensor:
    """Shard to Replicate: all_gather forward, reduce_scatter backward (FSDP, ZeRO-3)."""
    return _move("s_to_r", x, g, Split(dim, outer))


def s_to_i(x: Tensor, g: Group, dim: int, outer: int = 1) -> Tensor:
    """Shard to Invariant: all_gather forward, slice backward."""
    return _move("s_to_i", x, g, Split(dim, outer))


def i_to_s(x: Tensor, g: Group, dim: int, outer: int = 1) -> Tensor:
    """Invariant to Shard: slice forward, all_gather backward."""
    return _move("i_to_s", x, g, Split(dim, outer))


def r_to_s(x: Tensor, g: Group, dim: int, outer: int = 1) -> Tensor:
    """Replicate to Shard: slice forward, zero_pad backward."""
    return _move("r_to_s", x, g, Split(dim, outer))


def s_to_p(x: Tensor, g: Group, dim: int, outer: int = 1) -> Tensor:
    """Shard to Partial: zero_pad forward, slice backward."""
    return _move("s_to_p", x, g, Split(dim, outer))


def s_to_s(x: Tensor, g: Group, source: tuple[int, int], target: tuple[int, int]) -> Tensor:
    """Shard to Shard: all_to_all both ways; `source` and `target` are (dim, outer)."""
    return _move("s_to_s", x, g, Split(*source), Split(*target))


def r_to_p(x: Tensor, g: Group) -> Tensor:
    """Replicate to Partial: keep_first both ways (zeros on all but the first rank)."""
    return _move("r_to_p", x, g)


def i_to_p(x: Tensor, g: Group) -> Tensor:
    """Invariant to Partial: keep_first forward, identity backward."""
    return _move("i_to_p", x, g)


def r_to_i(x: Tensor, g: Group) -> Tensor:
    """Replicate to Invariant: identity forward, keep_first backward."""
    return _move("r_to_i", x, g)
