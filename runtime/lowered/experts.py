"""Linear layers of experts that are sharded contiguously on a group.

Rank r of p holds experts [r·e, (r+1)·e).

`expert_parallel_linear`: every rank has all rows. It computes the rows of its own experts and
leaves the others 0. The sum over ranks is the result: a Partial, without communication.

`expert_exchange_linear`: every rank has its own rows, as in GShard (Lepikhin et al.,
arXiv:2006.16668), but without a capacity: no row is dropped, and each rank receives as many rows
as the ids demand. Three all_to_alls run forward:

    counts [p·e]    how many rows go to each expert; to the rank that has the expert
    rows [n, i]     sorted by expert, so that rows for one rank are contiguous
    results [n, o]  back to the rank and the position their rows came from

Two run backward: the gradients of the results to the experts' ranks, and the gradients of the
rows back.
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
RowCounts = tuple[list[int], list[int]]  # rows sent to each rank, rows received from each


def expert_parallel_linear(
    x: Tensor, weight_local: Tensor, ids: Tensor, g: Group, transposed: bool = False
) -> Tensor:
    """The results of this rank's experts, as a Partial: n i, e o i, n -> n o.

    `ids` count over the experts of all ranks.
    """
    n_local = weight_local.shape[0]
    start = g.rank * n_local
    mine = (ids >= start) & (ids < start + n_local)
    # Invalid ids stay out of range, so they fail as they do unsharded.
    others = (ids >= 0) & (ids <= g.size * n_local) & ~mine
    out: Tensor = expert_linear(
        x, weight_local, (ids - start).masked_fill(others, n_local), transposed
    )
    return out


def expert_exchange_linear(
    x_local: Tensor, weight_local: Tensor, ids_local: Tensor, g: Group, transposed: bool = False
) -> Tensor:
    """The results of this rank's rows, from the experts of all ranks: n i, e o i, n -> n o."""
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
    results = expert_linear(rows, weight_local, experts, transposed)
    returned = _RowExchange.apply(results, g, (n_sent, n_received), True)
    out: Tensor = x_local.new_zeros(len(x_local), returned.shape[1])
    return out.index_copy(0, order, returned)


class _RowExchange(torch.autograd.Function):
    """Sends rows to other ranks, or `back` from them; gradients go the other way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, g: Group, numbers: RowCounts, back: bool) -> Tensor:
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
