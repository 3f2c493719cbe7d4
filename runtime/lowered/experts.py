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

Large exchanges of a mixture are two (`n_exchanges`), each of half of every rank's experts. While
rows of the second half are under way, the first half is computed, and its results go back while the
second half is. An expert has all its rows in one of them, so bits stay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from autopar.operators.experts import (
    ExpertLinear,
    ExpertMlp,
    SortedRows,
    in_order,
    n_exchanges,
    sort_rows,
)
from autopar.placement import Split
from autopar.runtime.groups import Group, Pending, phase
from autopar.runtime.lowered.lowered import Kept, Lowered

Function = ExpertLinear | ExpertMlp


@dataclass(frozen=True)
class _Experts:
    """Lowered functions of rows and `n_weights` weights; `make` takes the operator's words.

    n_parts   how many exchanges some rows have, with so many experts on a rank
    """

    n_weights: int
    make: Callable[..., Function]
    n_parts: Callable[[Tensor, int], int] = lambda x, n_local: 1

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
        n_parts = self.n_parts(x, len(weights[0]))
        exchanges = exchanges_of(ids, len(weights[0]), g, n_parts)
        coming = [one.dispatch(x, n_parts) for one in exchanges]
        going, kept = [], []
        for one in exchanges:
            rows = coming.pop(0).wait()
            mine = [weight[one.experts] for weight in (*weights, *biases)]
            found = [*of.forward(one.groups, rows, *mine)]
            going.append(one.combine(found, x, n_parts))
            kept.append((rows, *found))
        return _join_results(exchanges, going, len(x)), (of, exchanges, kept)

    def exchange_backward(
        self, saved: Kept, weights: Sequence[Tensor], gradients: Sequence[Tensor],
        wanted: Sequence[bool],
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        of, exchanges, kept = saved
        upstream, n_parts = gradients[0], len(exchanges)
        with phase("backward", exchanges[0].group.context):
            coming = [one.dispatch(upstream, n_parts) for one in exchanges]
            going, of_weights = [], list[Tensor | None]()
            for one, (rows, hidden) in zip(exchanges, kept, strict=True):
                mine = [weight[one.experts] for weight in weights]
                arrived = coming.pop(0).wait()
                found = [*of.backward(one.groups, arrived, rows, hidden, wanted, *mine)]
                del arrived
                if wanted[0]:
                    going.append(one.combine(found, upstream, n_parts))
                else:
                    found.pop(0)
                of_weights = _put_among_all(of_weights, found, one, len(weights[0]))
            of_x = _join_results(exchanges, going, len(upstream)) if wanted[0] else None
        return of_x, *self._in_order(of_weights)

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
    """Which rows go where, of some of each rank's experts.

    experts             those, among the rank's own
    groups              how rows that are received are sorted
    n_sent, n_received  numbers of rows, to and from each rank
    order               positions of own rows, in the order in which they are sent
    arrival             positions of received rows, in the order of experts
    """

    group: Group
    experts: slice
    groups: SortedRows
    n_sent: Sequence[int]
    n_received: Sequence[int]
    order: Tensor
    arrival: Tensor

    def dispatch(self, x: Tensor, n_parts: int) -> Pending[Tensor]:
        """Rows to the ranks of their experts; the result is sorted by expert."""
        size_bytes, arrival = x.nbytes // n_parts, self.arrival
        pending = self.group.send_rows(x[self.order], self.n_sent, self.n_received, size_bytes)
        return pending.then(lambda came: came[arrival])

    def combine(self, found: list[Any], x: Tensor, n_parts: int) -> Pending[Tensor]:
        """The first of `found`, rows sorted by expert, back to the rank of `x` that they came from.

        It is taken out of the list, so that its memory is free as soon as it is copied.
        """
        rows: Tensor = in_order(self.arrival, found.pop(0))
        size_bytes = len(x) * rows.shape[1] * rows.itemsize // n_parts
        return self.group.send_rows(rows, self.n_received, self.n_sent, size_bytes)


def exchanges_of(ids: Tensor, n_local: int, g: Group, n_parts: int) -> Sequence[_Exchange]:
    """The exchanges of rows with these ids, of equal numbers of experts."""
    order, ends = sort_rows(ids, n_local * g.size)
    own = ends.diff(prepend=ends.new_zeros(1)).long().unsqueeze(0)
    numbers = g.all_gather(own, Split(0, 1)).view(g.size, g.size, n_local)
    table = numbers.tolist()  # the host waits here
    mine, found = numbers[:, g.rank], list[_Exchange]()
    starts = list(accumulate((n for of in table[g.rank] for n in of), initial=0))
    for k in range(n_parts):
        experts = slice(n_local * k // n_parts, n_local * (k + 1) // n_parts)
        counts = [sum(of) for of in zip(*(each[g.rank][experts] for each in table), strict=True)]
        n_sent = [sum(of[experts]) for of in table[g.rank]]
        n_received = [sum(each[g.rank][experts]) for each in table]
        received = mine[:, experts]
        labels = torch.arange(len(counts), device=ids.device).repeat(g.size)
        labels = labels.repeat_interleave(received.flatten(), output_size=sum(n_received))
        groups = SortedRows(received.sum(0).cumsum(0, dtype=torch.int32), counts)
        begins = [starts[r * n_local + experts.start] for r in range(g.size)]
        sent = [order[a : a + n] for a, n in zip(begins, n_sent, strict=True)]
        positions = order if n_parts == 1 else torch.cat(sent)
        arrival = labels.argsort(stable=True)
        found.append(_Exchange(g, experts, groups, n_sent, n_received, positions, arrival))
    return found


def _join_results(
    exchanges: Sequence[_Exchange], going: Sequence[Pending[Tensor]], n_rows: int
) -> Tensor:
    """Rows of all exchanges at their positions."""
    out: Tensor | None = None
    for one, pending in zip(exchanges, going, strict=True):
        rows = pending.wait()
        if out is None:
            out = rows.new_empty(n_rows, rows.shape[1])
        out.index_copy_(0, one.order, rows)
    assert out is not None
    return out


def _put_among_all(
    whole: list[Tensor | None], found: list[Tensor | None], one: _Exchange, n_local: int
) -> list[Tensor | None]:
    """Gradients of some experts' weights, among those of all; `found` is emptied."""
    if one.experts == slice(0, n_local):
        return found
    if not whole:
        whole = [None if g is None else g.new_empty(n_local, *g.shape[1:]) for g in found]
    for of_all in whole:
        part = found.pop(0)
        if of_all is not None and part is not None:
            of_all[one.experts] = part
    return whole


def _mixture_parts(x: Tensor, n_local: int) -> int:
    return n_exchanges(x.nbytes, n_local)


_LINEAR, _MLP = _Experts(1, ExpertLinear), _Experts(2, ExpertMlp, _mixture_parts)
_GATED = _Experts(3, partial(ExpertMlp, apart=True), _mixture_parts)
expert_parallel_linear, expert_exchange_linear = _LINEAR.lowered_parallel, _LINEAR.lowered_exchange
expert_parallel_mlp, expert_exchange_mlp = _MLP.lowered_parallel, _MLP.lowered_exchange
expert_parallel_gated_mlp, expert_exchange_gated_mlp = (
    _GATED.lowered_parallel,
    _GATED.lowered_exchange,
)
