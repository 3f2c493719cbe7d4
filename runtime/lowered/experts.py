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

from collections.abc import Sequence

import torch
from torch import Tensor

from autopar import operators
from autopar.placement import Split
from autopar.runtime.groups import Group, phase
from autopar.runtime.lowered.lowered import Kept, Lowered

expert_linear = operators.experts.expert_linear
expert_outer = operators.experts.expert_outer


def _gradients(
    x: Tensor, weight: Tensor, ids: Tensor, transposed: bool, gradient: Tensor,
    wanted: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Of the rows and of the weight of `expert_linear(x, weight, ids, transposed)`."""
    of_x = of_weight = None
    if wanted[0]:
        of_x = expert_linear(gradient, weight, ids, not transposed)
    if wanted[1]:
        pair = (x, gradient) if transposed else (gradient, x)
        of_weight = expert_outer(*pair, ids, weight.shape[0])
    return of_x, of_weight


def _parallel(
    x: Tensor, weight_local: Tensor, ids: Tensor, g: Group, transposed: bool = False
) -> tuple[Tensor, Kept]:
    """The results of this rank's experts, as a Partial: n i, e o i, n -> n o.

    `ids` count over the experts of all ranks.
    """
    n_local = weight_local.shape[0]
    start = g.rank * n_local
    mine = (ids >= start) & (ids < start + n_local)
    # Invalid ids stay out of range, so they fail as they do unsharded.
    others = (ids >= 0) & (ids <= g.size * n_local) & ~mine
    local = (ids - start).masked_fill(others, n_local)
    return expert_linear(x, weight_local, local, transposed), (local, transposed)


def _parallel_backward(
    kept: Kept, inputs: Sequence[Tensor], gradients: Sequence[Tensor], wanted: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None, None]:
    (x, weight), (local, transposed) = inputs, kept
    return *_gradients(x, weight, local, transposed, gradients[0], wanted), None


def _exchange(
    x_local: Tensor, weight_local: Tensor, ids_local: Tensor, g: Group, transposed: bool = False
) -> tuple[Tensor, Kept]:
    """The results of this rank's rows, from the experts of all ranks: n i, e o i, n -> n o."""
    n_local = weight_local.shape[0]
    n_experts = n_local * g.size
    counts = torch.bincount(ids_local, minlength=n_experts)
    if len(counts) > n_experts + 1:
        raise IndexError(f"expert {len(counts) - 1} is out of range for {n_experts} experts")
    counts = counts[:n_experts]
    along = Split(0, 1)
    received = g.all_to_all(counts, along, along)
    numbers = tuple(n.view(g.size, n_local).sum(dim=1).tolist() for n in (counts, received))

    order = ids_local.argsort(stable=True)[: sum(numbers[0])]
    rows = g.send_rows(x_local[order], *numbers)
    experts = torch.arange(n_local, device=ids_local.device).repeat(g.size)
    experts = experts.repeat_interleave(received)
    results = expert_linear(rows, weight_local, experts, transposed)
    returned = g.return_rows(results, *numbers)
    out = x_local.new_zeros(len(x_local), returned.shape[1]).index_copy(0, order, returned)
    return out, (rows, experts, order, numbers, len(x_local), transposed, g)


def _exchange_backward(
    kept: Kept, inputs: Sequence[Tensor], gradients: Sequence[Tensor], wanted: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None, None]:
    (weight,), (rows, experts, order, numbers, n_rows, transposed, g) = inputs, kept
    with phase("backward", g.context):
        received = g.send_rows(gradients[0][order], *numbers)
        of_rows, of_weight = _gradients(rows, weight, experts, transposed, received, wanted)
        of_x = None
        if of_rows is not None:
            returned = g.return_rows(of_rows, *numbers)
            of_x = returned.new_zeros(n_rows, returned.shape[1]).index_copy(0, order, returned)
    return of_x, of_weight, None


expert_parallel_linear = Lowered(_parallel, _parallel_backward, keeps=(0, 1))
expert_exchange_linear = Lowered(_exchange, _exchange_backward, keeps=(1,))
