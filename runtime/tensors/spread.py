"""How one parameter is spread over the ranks of its stage, seen from one rank.

    local     whole tensor -> this rank's shard               (`Spread.local`)
    whole     shard -> whole tensor, a collective             (`Spread.whole`)
    inside    shard -> its part without padding               (`Spread.inside`)
    reduce    a sum or maximum of shards -> of the whole      (`Spread.reduce`)

Ranks that hold copies of one shard are not summed over: every distinct shard counts once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from autopar.program.lines import StoredParameter
from autopar.runtime.groups import Group, ReduceOp
from autopar.runtime.tensors.sharding import (
    Box,
    boxes,
    gather_whole,
    is_sharded,
    local_shard,
    padding,
    without_padding,
)


@dataclass(frozen=True)
class Spread:
    """The spread of one parameter.

    sizes, coordinate   the stage's mesh, and this rank's place in it
    groups              the groups of that mesh, by axes
    n_stages            of the pipeline: with several, no rank has all parameters
    may_gather          whether operators that need the whole tensor may gather it
    """

    parameter: StoredParameter
    sizes: tuple[int, ...]
    coordinate: tuple[int, ...]
    groups: Mapping[tuple[int, ...], Group] = field(compare=False, repr=False)
    n_stages: int = 1
    may_gather: bool = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Spread:
        return self  # it has groups of processes, and never changes

    @property
    def name(self) -> str:
        return self.parameter.name

    @property
    def shape(self) -> tuple[int, ...]:
        """The user's shape, of the whole tensor."""
        return self.parameter.shape

    @cached_property
    def n_ranks(self) -> int:
        return math.prod(self.sizes)

    @cached_property
    def is_whole(self) -> bool:
        """Does this rank have the whole tensor, without padding?"""
        return not is_sharded(self.parameter) and not any(padding(self.parameter))

    @cached_property
    def cut(self) -> tuple[object, ...]:
        """Equal for tensors that are cut alike: each dim by the same axes, in the same strides."""
        spec, dims = self.parameter.stored.spec, [list(f) for f in self.parameter.dims]
        padded = tuple(map(math.prod, dims))
        cuts: list[tuple[int, int, int]] = []
        for axis in spec.order or range(len(self.sizes)):
            placement = spec.placements[axis]
            if placement.is_shard and self.sizes[axis] > 1:
                dim, factor = placement.cell
                cuts.append((dim, axis, math.prod(dims[dim][:factor])))
                dims[dim][factor] //= self.sizes[axis]
        # Cuts of different dims commute.
        return self.shape, padded, self.sizes, tuple(sorted(cuts, key=lambda cut: cut[0]))

    def local(self, whole: Tensor) -> Tensor:
        """This rank's shard of a tensor that broadcasts to the whole shape."""
        if tuple(whole.shape) != self.shape:
            whole = whole.expand(self.shape)
        return local_shard(whole, self.parameter, self.sizes, self.coordinate)

    def whole(self, local: Tensor) -> Tensor:
        """The whole tensor on every rank of the stage; all of them must call it."""
        if self.is_whole:
            return local
        return gather_whole(local, self.parameter, self.sizes, self.groups)

    def inside(self, local: Tensor) -> Tensor:
        return without_padding(local, self.parameter, self.sizes, self.coordinate)

    @cached_property
    def shard_axes(self) -> tuple[int, ...]:
        """The mesh axes, of more than one rank, that cut the parameter."""
        placements = self.parameter.stored.spec.placements
        return tuple(a for a, p in enumerate(placements) if p.is_shard and self.sizes[a] > 1)

    def reduce(self, values: Tensor, op: ReduceOp) -> Tensor:
        """Sum or maximum of what each shard gave; all ranks of the stage must call it."""
        if not self.shard_axes:
            return values
        group = self.groups[self.shard_axes]
        if op == "sum" or not values.is_floating_point():
            return group.all_reduce(values, op)
        # A backend's maximum may drop a NaN, so NaNs are flagged separately.
        seen = torch.stack([values.nan_to_num(-math.inf, math.inf), values.isnan().to(values)])
        largest, is_nan = group.all_reduce(seen, "max").unbind()
        return torch.where(is_nan > 0, math.nan, largest)

    def boxes(self) -> tuple[Box, ...]:
        return boxes(self.parameter, self.sizes, self.coordinate)

    def __str__(self) -> str:
        names: Sequence[str] = [f"axis {a}" for a in range(len(self.sizes))]
        if self.groups:
            by_axis = {axes[0]: g.axes[0] for axes, g in self.groups.items() if len(axes) == 1}
            names = [by_axis.get(a, names[a]) for a in range(len(self.sizes))]
        placements = self.parameter.stored.spec.placements
        cuts = [f"{p} on {n}" for p, n in zip(placements, names, strict=True) if p.is_shard]
        return ", ".join(cuts) or "whole on every rank"


def spread_of_result(spreads: Sequence[Spread], shape: Sequence[int]) -> Spread | None:
    """How the result of an elementwise operator is spread: as an operand of its shape is.

    A sharded one, if there is one: whole operands are cut without communication. None if no
    operand has that shape.
    """
    fitting = [spread for spread in spreads if spread.shape == tuple(shape)]
    return next((spread for spread in fitting if not spread.is_whole), next(iter(fitting), None))


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which partial sums of `dtype` are kept: at least float32."""
    return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype
