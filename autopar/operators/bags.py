"""Sums and maxima over bags of rows of a table, without a copy of every row.

    out[b] = Σ_j factors[b, j] weight[ids[b, j]]                      embedding_bag
    out[b] = max_j weight[ids[b, j]], places[b] = its ids             embedding_bag_max

with weight [v, h] and ids [b, l], one row per bag. Or ids [n] and bags `ids[starts[b] : ends[b]]`
of any length, so that a rank may hold any of the bags (`aten._embedding_bag` numbers them by
offsets from 0). Ids that are `padding_idx` count in no bag; an empty bag is 0.

Capture writes means as sums divided by counts (`capture/rewrites/bags.py`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

aten = torch.ops.aten
_SUM, _MAX = 0, 2  # torch's modes


class _Listed(NamedTuple):
    """Ids bag after bag, where each bag begins, the bag of each id, and the ids' factors."""

    ids: Tensor
    offsets: Tensor
    bag_of: Tensor
    places: Tensor | None
    factors: Tensor | None

    @staticmethod
    def of(
        ids: Tensor, starts: Tensor | None, ends: Tensor | None, factors: Tensor | None = None
    ) -> _Listed:
        if starts is None or ends is None:
            n_bags, length = ids.shape
            bags = torch.arange(n_bags, dtype=ids.dtype, device=ids.device)
            flat = None if factors is None else factors.reshape(-1)
            return _Listed(
                ids.reshape(-1), bags * length, bags.repeat_interleave(length), None, flat
            )
        lengths = ends - starts
        offsets = lengths.cumsum(0) - lengths
        bags = torch.arange(len(starts), dtype=ids.dtype, device=ids.device)
        bag_of = bags.repeat_interleave(lengths)
        places = torch.arange(len(bag_of), device=ids.device) + (starts - offsets)[bag_of]
        mine = None if factors is None else factors[places]
        return _Listed(ids[places], offsets.to(ids.dtype), bag_of, places, mine)

    def reduced(self, weight: Tensor, mode: int, padding_idx: int) -> tuple[Tensor, Tensor]:
        """The bags' results, and the ids of maxima."""
        out, _, _, places = aten._embedding_bag(
            weight, self.ids, self.offsets, False, mode, False, self.factors, False, padding_idx
        )
        return out, places

    def of_weight(
        self, gradient: Tensor, places: Tensor, n_rows: int, mode: int, padding_idx: int
    ) -> Tensor:
        """The gradient of the table."""
        n_bags = len(self.offsets)
        lengths = torch.bincount(self.bag_of, minlength=n_bags).to(self.ids.dtype)
        found: Tensor = aten._embedding_bag_dense_backward(
            gradient.contiguous(), self.ids, self.bag_of, lengths, places, n_rows, False, mode,
            self.factors, padding_idx,
        )  # fmt: skip
        return found


@torch.library.custom_op("autopar::embedding_bag", mutates_args=())
def embedding_bag(
    weight: Tensor, ids: Tensor, starts: Tensor | None = None, ends: Tensor | None = None,
    factors: Tensor | None = None, padding_idx: int = -1,
) -> Tensor:  # fmt: skip
    """v h, b l -> b h; `starts` and `ends` [b] say which ids [n] are whose."""
    return _Listed.of(ids, starts, ends, factors).reduced(weight, _SUM, padding_idx)[0]


@torch.library.custom_op("autopar::embedding_bag_of_weight", mutates_args=())
def embedding_bag_of_weight(
    gradient: Tensor, ids: Tensor, starts: Tensor | None, ends: Tensor | None,
    factors: Tensor | None, n_rows: int, padding_idx: int,
) -> Tensor:  # fmt: skip
    """The gradient of the table: b h, b l -> v h."""
    listed = _Listed.of(ids, starts, ends, factors)
    return listed.of_weight(gradient, ids.new_empty(0), n_rows, _SUM, padding_idx)


@torch.library.custom_op("autopar::embedding_bag_of_factors", mutates_args=())
def embedding_bag_of_factors(
    gradient: Tensor, weight: Tensor, ids: Tensor, starts: Tensor | None, ends: Tensor | None,
    padding_idx: int,
) -> Tensor:  # fmt: skip
    """The gradient of the factors, as many as ids: b h, v h, b l -> b l."""
    listed = _Listed.of(ids, starts, ends)
    each: Tensor = aten._embedding_bag_per_sample_weights_backward(
        gradient.contiguous(), weight, listed.ids, listed.offsets, listed.bag_of, _SUM, padding_idx
    )
    if listed.places is None:
        return each.reshape(ids.shape)
    return each.new_zeros(ids.shape).index_add_(0, listed.places, each)


@torch.library.custom_op("autopar::embedding_bag_max", mutates_args=())
def embedding_bag_max(
    weight: Tensor, ids: Tensor, starts: Tensor | None = None, ends: Tensor | None = None,
    padding_idx: int = -1,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """v h, b l -> b h, b h: the maxima, and the ids that have them."""
    return _Listed.of(ids, starts, ends).reduced(weight, _MAX, padding_idx)


@torch.library.custom_op("autopar::embedding_bag_max_of_weight", mutates_args=())
def embedding_bag_max_of_weight(
    gradient: Tensor, places: Tensor, ids: Tensor, starts: Tensor | None, ends: Tensor | None,
    n_rows: int, padding_idx: int,
) -> Tensor:  # fmt: skip
    """The gradient of the table: b h, b h, b l -> v h."""
    listed = _Listed.of(ids, starts, ends)
    return listed.of_weight(gradient, places, n_rows, _MAX, padding_idx)


def _result(weight: Tensor, ids: Tensor, starts: Tensor | None) -> Tensor:
    return weight.new_empty(len(ids if starts is None else starts), weight.shape[1])


@embedding_bag.register_fake
def _(
    weight: Tensor, ids: Tensor, starts: Tensor | None = None, ends: Tensor | None = None,
    factors: Tensor | None = None, padding_idx: int = -1,
) -> Tensor:  # fmt: skip
    return _result(weight, ids, starts)


@embedding_bag_max.register_fake
def _(
    weight: Tensor, ids: Tensor, starts: Tensor | None = None, ends: Tensor | None = None,
    padding_idx: int = -1,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    out = _result(weight, ids, starts)
    return out, out.new_empty(out.shape, dtype=ids.dtype)


@embedding_bag_of_weight.register_fake
def _(gradient: Tensor, *args: Any) -> Tensor:
    return gradient.new_empty(args[-2], gradient.shape[1])


@embedding_bag_max_of_weight.register_fake
def _(gradient: Tensor, *args: Any) -> Tensor:
    return gradient.new_empty(args[-2], gradient.shape[1])


@embedding_bag_of_factors.register_fake
def _(gradient: Tensor, weight: Tensor, ids: Tensor, *args: Any) -> Tensor:
    return gradient.new_empty(ids.shape)


def _keep_sum(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    weight, ids, starts, ends, factors, ctx.padding_idx = inputs
    ctx.n_rows = len(weight)
    of_factors = any(ctx.needs_input_grad[4:5])  # trailing defaults have none
    ctx.save_for_backward(weight if of_factors else None, ids, starts, ends, factors)


def _sum_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    weight, ids, starts, ends, factors = ctx.saved_tensors
    of_weight = of_factors = None
    if ctx.needs_input_grad[0]:
        of_weight = torch.ops.autopar.embedding_bag_of_weight(
            gradient, ids, starts, ends, factors, ctx.n_rows, ctx.padding_idx
        )
    if weight is not None:
        of_factors = torch.ops.autopar.embedding_bag_of_factors(
            gradient, weight, ids, starts, ends, ctx.padding_idx
        )
    return of_weight, None, None, None, of_factors, None


def _keep_max(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    weight, ids, starts, ends, ctx.padding_idx = inputs
    ctx.n_rows = len(weight)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(output[1], ids, starts, ends)


def _max_backward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    places, ids, starts, ends = ctx.saved_tensors
    of_weight = torch.ops.autopar.embedding_bag_max_of_weight(
        gradient, places, ids, starts, ends, ctx.n_rows, ctx.padding_idx
    )
    return of_weight, None, None, None, None


embedding_bag.register_autograd(_sum_backward, setup_context=_keep_sum)
embedding_bag_max.register_autograd(_max_backward, setup_context=_keep_max)
