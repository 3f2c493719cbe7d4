"""Matmuls of experts that are sharded contiguously on a group: one matmul, or a whole mixture.

Rank r of p holds experts [r·e, (r+1)·e). What is computed of rows sorted by expert is in
`operators/experts.py`.

`expert_parallel_...`: every rank has all rows. It gathers and computes the rows of its own experts
and leaves the others 0. The sum over ranks is the result: a Partial, without communication.

`expert_exchange_...`: every rank has its own rows, as in GShard (Lepikhin et al.,
arXiv:2006.16668), but without a capacity: no row is dropped, and each rank receives as many rows
as the ids demand. Forward:

    counts [p, p·e]   all_gather: how many rows each rank has for each expert
    rows [n, i]       all_to_all: sorted by expert, so that rows for one rank are contiguous
    results [n, o]    all_to_all: back to the rank and the position their rows came from

The host waits for the counts, once. Backward uses them again, and has two all_to_alls: gradients of
the results to the experts' ranks, gradients of the rows back. An expert has its rows in the order
of ranks, then of positions: the order of one process with the rows of all. So sums are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.operators.experts import ExpertLinear, ExpertMlp, SortedRows, in_order, sort_rows
from autopar.placement import Split
from autopar.runtime.groups import Group, phase
from autopar.runtime.lowered.lowered import Kept, Lowered

Function = ExpertLinear | ExpertMlp


@dataclass(frozen=True)
class _Experts:
    """Lowered functions of rows and `n_weights` weights; `make` takes the operator's words."""

    n_weights: int
    make: Callable[..., Function]

    def parallel(self, x: Tensor, *args: Any) -> tuple[Tensor, Kept]:
        """The results of this rank's experts, as a Partial. `ids` count over those of all ranks."""
        weights, ids, g, of, biases = self._read(args)
        n_local = len(weights[0])
        order, ends = sort_rows(ids, n_local * g.size)
        first, numbers = g.rank * n_local, [0, *ends.tolist()]
        mine = slice(first, first + n_local)
        start, *bounds = numbers[first : first + n_local + 1]
        counts = [b - a for a, b in zip((start, *bounds), bounds, strict=False)]
        order = order[start : start + sum(counts)].clone()
        groups = SortedRows(ends[mine] - start, counts)
        rows = x[order]
        results, kept = of.forward(groups, rows, *weights, *biases)
        out = x.new_zeros(len(x), results.shape[1]).index_copy_(0, order, results)
        return out, (of, groups, order, rows, kept, len(x))

    def parallel_backward(
        self, saved: Kept, weights: Sequence[Tensor], gradients: Sequence[Tensor],
        wanted: Sequence[bool],
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        of, groups, order, rows, kept, n_rows = saved
        upstream = gradients[0][order]
        of_rows, *of_weights = of.backward(groups, upstream, rows, kept, wanted, *weights)
        of_x = None
        if of_rows is not None:
            of_x = of_rows.new_zeros(n_rows, of_rows.shape[1]).index_copy_(0, order, of_rows)
        return of_x, *self._in_order(of_weights)

    def exchange(self, x: Tensor, *args: Any) -> tuple[Tensor, Kept]:
        """The results of this rank's rows, from the experts of all ranks."""
        weights, ids, g, of, biases = self._read(args)
        exchange, groups = _Exchange.of(ids, len(weights[0]), g)
        rows = exchange.dispatch(x)
        found = [*of.forward(groups, rows, *weights, *biases)]
        return exchange.combine(found), (of, exchange, groups, rows, *found)

    def exchange_backward(
        self, saved: Kept, weights: Sequence[Tensor], gradients: Sequence[Tensor],
        wanted: Sequence[bool],
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        of, exchange, groups, rows, kept = saved
        with phase("backward", exchange.group.context):
            upstream = exchange.dispatch(gradients[0])
            found = [*of.backward(groups, upstream, rows, kept, wanted, *weights)]
            del upstream
            of_x = exchange.combine(found) if wanted[0] else found.pop(0)
        return of_x, *self._in_order(found)

    def _read(
        self, args: tuple[Any, ...]
    ) -> tuple[tuple[Tensor, ...], Tensor, Group, Function, Sequence[Tensor]]:
        """Weights, ids, the group, the function of sorted rows, and a bias if there is one."""
        weights, (ids, group, *options) = args[: self.n_weights], args[self.n_weights :]
        biases = [option for option in options if isinstance(option, Tensor)]
        words = [option for option in options if isinstance(option, (str, bool))]
        return weights, ids, group, self.make(*words), biases

    def _in_order(self, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """Of weights and biases, as the arguments are: ids are between them."""
        return (*gradients[: self.n_weights], None, *gradients[self.n_weights :])

    @property
    def lowered_parallel(self) -> Lowered:
        keeps = tuple(range(1, 1 + self.n_weights))
        return Lowered(self.parallel, self.parallel_backward, keeps)

    @property
    def lowered_exchange(self) -> Lowered:
        keeps = tuple(range(1, 1 + self.n_weights))
        return Lowered(self.exchange, self.exchange_backward, keeps)


@dataclass(frozen=True)
class _Exchange:
    """Which rows go where.

    n_sent, n_received    numbers of rows, to and from each rank
    order                 positions of own rows, in the order in which they are sent
    arrival               positions of received rows, in the order of experts
    """

    group: Group
    n_sent: Sequence[int]
    n_received: Sequence[int]
    order: Tensor
    arrival: Tensor

    @staticmethod
    def of(ids: Tensor, n_local: int, g: Group) -> tuple[_Exchange, SortedRows]:
        """The exchange of rows with these ids, and how those that are received are sorted."""
        order, ends = sort_rows(ids, n_local * g.size)
        own = ends.diff(prepend=ends.new_zeros(1)).long().unsqueeze(0)
        numbers = g.all_gather(own, Split(0, 1)).view(g.size, g.size, n_local)
        table = numbers.tolist()  # the host waits here
        counts = [sum(of) for of in zip(*(each[g.rank] for each in table), strict=True)]
        n_sent = [sum(of) for of in table[g.rank]]
        n_received = [sum(each[g.rank]) for each in table]
        mine = numbers[:, g.rank]
        experts = torch.arange(n_local, device=ids.device).repeat(g.size)
        experts = experts.repeat_interleave(mine.flatten(), output_size=sum(n_received))
        groups = SortedRows(mine.sum(0).cumsum(0, dtype=torch.int32), counts)
        return _Exchange(g, n_sent, n_received, order, experts.argsort(stable=True)), groups

    def dispatch(self, x: Tensor) -> Tensor:
        """Rows to the ranks of their experts; the result is sorted by expert."""
        x = x[self.order]
        x = self.group.send_rows(x, self.n_sent, self.n_received)
        return x[self.arrival]

    def combine(self, found: list[Any]) -> Tensor:
        """The first of `found`, rows sorted by expert, back to where they came from.

        It is taken out of the list, so that its memory is free as soon as it is copied.
        """
        rows: Tensor = in_order(self.arrival, found.pop(0))
        rows = self.group.return_rows(rows, self.n_sent, self.n_received)
        return in_order(self.order, rows)


_LINEAR, _MLP = _Experts(1, ExpertLinear), _Experts(2, ExpertMlp)
expert_parallel_linear, expert_exchange_linear = _LINEAR.lowered_parallel, _LINEAR.lowered_exchange
expert_parallel_mlp, expert_exchange_mlp = _MLP.lowered_parallel, _MLP.lowered_exchange
