"""Products of rows with the matrices of experts that are sharded contiguously on a group.

Rank r of p holds experts [r·e, (r+1)·e).

Every rank has all rows (`expert_parallel_linear`). It computes those of its own experts and
leaves the others 0, so the sum over ranks is the product: a Partial, without communication.

Every rank has rows of its own (`expert_exchange_linear`), as in GShard (Lepikhin et al.,
arXiv:2006.16668), without a capacity: no row is dropped, and ranks get as many as the ids say.

    counts [p·e]    how many of a rank's rows each expert gets, to the rank that has it
    rows [n, i]     in the order of their experts, so those of a rank are together
    products [n, o] back to the rank and the place that the rows came from

Three all_to_alls, and two in backward: of the gradient to where the products were made, and of
the rows' gradients back.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from autopar import operators
from autopar.placement import Split
from autopar.runtime.groups import Group, phase

expert_linear = operators.experts.expert_linear
Numbers = tuple[list[int], list[int]]  # of rows sent to every rank, and received from it


def expert_parallel_linear(
    x: Tensor, weight_local: Tensor, ids: Tensor, g: Group, transposed: bool = False
) -> Tensor:
    """The products of this rank's experts, as a Partial: n i, e o i, n -> n o.

    `ids` count over all ranks' experts.
    """
    n_local = weight_local.shape[0]
    start = g.rank * n_local
    mine = (ids >= start) & (ids < start + n_local)
    # Ids that nobody has stay out of range, and fail as they do unsharded.
    others = (ids >= 0) & (ids <= g.size * n_local) & ~mine
    out: Tensor = expert_linear(
        x, weight_local, (ids - start).masked_fill(others, n_local), transposed
    )
    return out


def expert_exchange_linear(
    x_local: Tensor, weight_local: Tensor, ids_local: Tensor, g: Group, transposed: bool = False
) -> Tensor:
    """The products of this rank's rows, with the experts of all ranks: n i, e o i, n -> n o."""
    n_local = weight_local.shape[0]
    n_experts = n_local * g.size
    counts = torch.bincount(ids_local, minlength=n_experts)
    if len(counts) > n_experts + 1:
        raise IndexError(f"expert {len(counts) - 1} is out of range for {n_experts} experts")
    counts = counts[:n_experts]
    along = Split(0, 1)
    received = g.all_to_all(counts, along, along)
    n_sent, n_received = (n.view(g.size, n_local).sum(dim=1).tolist() for n in (counts, received))

    order = ids_local.argsort(stable=True)[: sum(n_sent)]
    rows = _RowExchange.apply(x_local[order], g, (n_sent, n_received), False)
    experts = torch.arange(n_local, device=ids_local.device).repeat(g.size)
    experts = experts.repeat_interleave(received)
    products = expert_linear(rows, weight_local, experts, transposed)
    returned = _RowExchange.apply(products, g, (n_sent, n_received), True)
    out: Tensor = x_local.new_zeros(len(x_local), returned.shape[1])
    return out.index_copy(0, order, returned)


class _RowExchange(torch.autograd.Function):
    """Rows to other ranks, or `back` from them; gradients go the other way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, g: Group, numbers: Numbers, back: bool) -> Tensor:
        ctx.g, ctx.numbers, ctx.back = g, numbers, back
        return g.return_rows(rows, *numbers) if back else g.send_rows(rows, *numbers)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        g, numbers = ctx.g, ctx.numbers
        with phase("backward", g.context):
            moved = (
                g.send_rows(gradient, *numbers) if ctx.back else g.return_rows(gradient, *numbers)
            )
        return moved, None, None, None
