"""Matmul of each row with the matrix of its own expert, without a copy of that matrix per row.

    y[r] = weight[ids[r]] @ x[r]                          expert_linear
    dx[r] = weight[ids[r]].T @ dy[r]                      expert_linear, transposed
    dweight[e] = Σ_r [ids[r] = e] dy[r] x[r].T            expert_outer

with x [n, i], ids [n], weight [e, o, i], or [e, i, o] if `transposed`. `weight[ids]` would be n
matrices. Here the experts run one after the other, each with all of its rows at once, so FLOPs and
bytes are those of the rows alone. Id e belongs to no expert, and its rows become 0: a rank gives
this id to rows of other ranks' experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def _rows_by_expert(ids: Tensor, n_experts: int) -> Iterator[tuple[int, Tensor]]:
    """Every expert that has rows, with their positions, ascending."""
    counts = torch.bincount(ids, minlength=n_experts + 1).tolist()
    if len(counts) > n_experts + 1:
        raise IndexError(f"expert {len(counts) - 1} is out of range for {n_experts} experts")
    rows = ids.argsort(stable=True).split(counts)
    return ((e, rows[e]) for e in range(n_experts) if counts[e])


@torch.library.custom_op("autopar::expert_linear", mutates_args=())
def expert_linear(x: Tensor, weight: Tensor, ids: Tensor, transposed: bool = False) -> Tensor:
    """n i, e o i, n -> n o; the weight is e i o if `transposed`."""
    n_experts, n_out = weight.shape[0], weight.shape[2 if transposed else 1]
    y = x.new_zeros(x.shape[0], n_out)
    for e, rows in _rows_by_expert(ids, n_experts):
        matrix = weight[e] if transposed else weight[e].T
        y[rows] = x[rows] @ matrix
    return y


@torch.library.custom_op("autopar::expert_outer", mutates_args=())
def expert_outer(rows: Tensor, columns: Tensor, ids: Tensor, n_experts: int) -> Tensor:
    """n o, n i, n -> e o i: for each expert, the sum of its rows' outer products."""
    out = rows.new_zeros(n_experts, rows.shape[1], columns.shape[1])
    for e, mine in _rows_by_expert(ids, n_experts):
        out[e] = rows[mine].T @ columns[mine]
    return out


@expert_linear.register_fake
def _(x: Tensor, weight: Tensor, ids: Tensor, transposed: bool = False) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[2 if transposed else 1])


@expert_outer.register_fake
def _(rows: Tensor, columns: Tensor, ids: Tensor, n_experts: int) -> Tensor:
    return rows.new_empty(n_experts, rows.shape[1], columns.shape[1])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, ids, ctx.transposed = inputs
    ctx.n_experts = weight.shape[0]
    of_x, of_weight = ctx.needs_input_grad[:2]  # each gradient needs the other tensor
    ctx.save_for_backward(x if of_weight else None, weight if of_x else None, ids)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
    x, weight, ids = ctx.saved_tensors
    of_x = of_weight = None
    if ctx.needs_input_grad[0]:
        of_x = torch.ops.autopar.expert_linear(gradient, weight, ids, not ctx.transposed)
    if ctx.needs_input_grad[1]:
        pair = (x, gradient) if ctx.transposed else (gradient, x)
        of_weight = torch.ops.autopar.expert_outer(*pair, ids, ctx.n_experts)
    return of_x, of_weight, None, None


expert_linear.register_autograd(_backward, setup_context=_keep)
