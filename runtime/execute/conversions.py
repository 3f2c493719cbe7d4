"""Parameters converted from storage to use, and gradients back, once per step or microbatch.

Where a parameter is used as it is stored, the stored tensor is the program's leaf, and autograd
adds to its `.grad`. Every other use placement is a leaf of its own; the reversed moves bring its
gradient back to storage. Collectives of many parameters are fused (`bucketed.py`). Parameters
gathered at each use are gathered by the generated program, not here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from autopar.program import BUCKET_BYTES, MoveLine, ParameterUse, StoredParameter
from autopar.runtime.execute.bucketed import bucketed_apply
from autopar.runtime.groups import Group, phase


class Leaf(NamedTuple):
    """What the program takes of a parameter, and the tensor in whose `.grad` gradients arrive."""

    value: Tensor
    leaf: Tensor


@dataclass(frozen=True)
class Conversions:
    """The conversions of one rank: its stage's parameters and groups."""

    parameters: Sequence[StoredParameter]
    groups: Mapping[tuple[int, ...], Group]

    def leaves(self, stored: Mapping[str, Tensor]) -> dict[str, Leaf]:
        """What the program takes of each parameter, by local name.

        In mixed precision the shards are cast first, once a step.
        """
        leaves: dict[str, Leaf] = {}
        waiting: list[tuple[StoredParameter, ParameterUse, Tensor]] = []
        shards = self._shards(stored)
        for p in self.parameters:
            shard, parameter = shards[p.name], stored[p.name]
            unmoved = [use.local.name for use in p.uses if not use.moves]
            if p.period == "use":
                leaves[p.shard.name] = _gathered_leaf(p, shard, parameter)
            elif unmoved:
                leaf = _unmoved_leaf(p, shard, parameter)
                leaves |= dict.fromkeys(unmoved, leaf)
            waiting += [(p, use, shard) for use in p.uses if use.moves]
        if waiting:
            with phase("param_gather"):
                values = bucketed_apply(
                    [(shard, self._steps(use.moves)) for _, use, shard in waiting], BUCKET_BYTES
                )
            for (p, use, _), value in zip(waiting, values, strict=True):
                has_grad = stored[p.name].requires_grad and torch.is_grad_enabled()
                leaves[use.local.name] = _moved_leaf(use, value.detach(), has_grad)
        return leaves

    def _shards(self, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The stored shards in the dtypes of use; one call casts all of one dtype."""
        shards = {p.name: stored[p.name].detach() for p in self.parameters}
        by_dtype: dict[torch.dtype, list[StoredParameter]] = {}
        for p in self.parameters:
            if p.cast is not None:
                by_dtype.setdefault(p.cast.dtype, []).append(p)
        for dtype, cast in by_dtype.items():
            made = [torch.empty_like(shards[p.name], dtype=dtype) for p in cast]
            torch._foreach_copy_(made, [shards[p.name] for p in cast])
            shards |= {p.name: shard for p, shard in zip(cast, made, strict=True)}
        return shards

    def return_gradients(
        self, leaves: Mapping[str, Leaf], stored: Mapping[str, Tensor], period: str
    ) -> None:
        """Bring gradients of converted uses back to storage, and add them to `.grad`.

        Only for parameters whose `period` is this one: "step" or "micro".
        """
        waiting: list[tuple[str, Tensor, tuple[MoveLine, ...]]] = []
        for p in self.parameters:
            for use in p.uses:
                leaf = leaves[use.local.name].leaf
                if use.moves and p.period == period and leaf.grad is not None:
                    waiting.append((p.name, leaf.grad, use.moves))
                    leaf.grad = None
        if not waiting:
            return
        with phase("grad_sync"):
            values = bucketed_apply(
                [(g, self._steps(moves, backward=True)) for _, g, moves in waiting], BUCKET_BYTES
            )
        with torch.no_grad():
            for (name, _, _), value in zip(waiting, values, strict=True):
                parameter = stored[name]
                if parameter.grad is None:
                    whole = value.to(parameter.dtype)
                    parameter.grad = whole.clone() if whole._base is not None else whole
                else:
                    parameter.grad += value

    def keep_gradients(self, leaves: Mapping[str, Leaf], stored: Mapping[str, Tensor]) -> None:
        """At the end of a step: gradients of shards that were cast to be gathered."""
        for p in self.parameters:
            if p.cast is not None and p.period == "use":
                stored[p.name].grad = leaves[p.shard.name].leaf.grad

    def _steps(self, moves: Sequence[MoveLine], backward: bool = False) -> tuple[Any, ...]:
        if backward:
            return tuple(
                (m.move.backward, self._group(m), m.move.splits[::-1]) for m in reversed(moves)
            )
        return tuple((m.move.forward, self._group(m), m.move.splits) for m in moves)

    def _group(self, line: MoveLine) -> Group:
        return self.groups[line.move.axes]


def _unmoved_leaf(p: StoredParameter, shard: Tensor, parameter: Tensor) -> Leaf:
    """The stored tensor itself; or its cast, whose gradients reach the stored tensor."""
    if p.cast is None:
        return Leaf(parameter, parameter)
    if not (parameter.requires_grad and torch.is_grad_enabled()):
        return Leaf(shard, shard)
    return Leaf(_Used.apply(parameter, [shard]), parameter)


def _gathered_leaf(p: StoredParameter, shard: Tensor, parameter: Tensor) -> Leaf:
    """A shard that the program gathers. Its gradients arrive reduced, in the dtype of storage."""
    if p.cast is None:
        return Leaf(parameter, parameter)
    leaf = shard.requires_grad_(parameter.requires_grad and torch.is_grad_enabled())
    if leaf.requires_grad:
        leaf.grad_dtype = parameter.dtype
        leaf.grad = parameter.grad
    return Leaf(leaf, leaf)


def _moved_leaf(use: ParameterUse, value: Tensor, has_grad: bool) -> Leaf:
    """What moves made of a shard. One whose gradient is of another dtype has a leaf apart."""
    # A value that is still the stored tensor needs a leaf of its own.
    value = value.view_as(value)
    if use.local.gradient_dtype is None or not has_grad:
        return Leaf(value, value.requires_grad_(has_grad))
    empty = torch.empty((), dtype=use.local.gradient_dtype, device=value.device)
    leaf = empty.expand(value.shape).requires_grad_()  # no memory but that of its gradient
    return Leaf(_Used.apply(leaf, [value]), leaf)


class _Used(torch.autograd.Function):
    """A parameter in the dtype of use, made before; its gradient is cast to that of `leaf`.

    As a cast would do it: the gradients of several uses are added before they are cast. Nothing is
    saved, so each microbatch of a step runs backward through the same node.
    """

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, used: Sequence[Tensor]) -> Tensor:
        ctx.dtype = leaf.dtype
        return used[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.to(ctx.dtype), None
