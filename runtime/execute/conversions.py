"""Parameters converted from storage to use, and gradients back, once per step or microbatch.

A program takes each parameter in one or more uses (`Use`), and returns their gradients:

    used as it is stored    the gradient is added to the stored tensor's `.grad`
    gathered at each use    the program takes the shard, and returns its gradient reduced; as above
    used otherwise          gradients are added up in the dtype in which they are reduced. The
                            reversed moves bring the sum back to storage once per step (ZeRO-1) or
                            per microbatch (ZeRO-2): `returns.py`

Collectives of many parameters are fused (`bucketed.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from autopar.program.communication import BUCKET_BYTES
from autopar.program.lines import Local, MoveLine, StoredParameter
from autopar.runtime.execute.bucketed import Step, bucketed_apply
from autopar.runtime.groups import Group, phase


@dataclass
class Use:
    """One use of a parameter in a step: `value` is what the program takes.

    `gradient` is the sum of those that wait for `moves`, reversed.
    """

    parameter: StoredParameter
    local: Local
    moves: tuple[MoveLine, ...]
    value: Tensor
    gradient: Tensor | None = field(default=None)


@dataclass(frozen=True)
class Conversions:
    """The conversions of one rank: its stage's parameters and groups."""

    parameters: Sequence[StoredParameter]
    groups: Mapping[tuple[int, ...], Group]

    def uses(self, stored: Mapping[str, Tensor]) -> list[Use]:
        """The uses of all parameters, in the order in which the program takes them.

        In mixed precision the shards are cast first, once a step.
        """
        shards = self._shards(stored)
        found: list[Use] = []
        for p in self.parameters:
            if p.period == "use":
                found.append(Use(p, p.shard, (), shards[p.name]))
            found += [Use(p, use.local, use.moves, shards[p.name]) for use in p.uses]
        waiting = [use for use in found if use.moves]
        if waiting:
            with phase("param_gather"):
                values = bucketed_apply(
                    [(use.value, tuple(self.steps(use.moves))) for use in waiting], BUCKET_BYTES
                )
            for use, value in zip(waiting, values, strict=True):
                use.value = value
        return found

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

    def steps(self, moves: Sequence[MoveLine], backward: bool = False) -> list[Step]:
        """The primitives of some moves, or of their gradients in reverse."""
        if backward:
            return [(m.move.backward, self._group(m), m.move.splits[::-1]) for m in reversed(moves)]
        return [(m.move.forward, self._group(m), m.move.splits) for m in moves]

    def _group(self, line: MoveLine) -> Group:
        return self.groups[line.move.axes]


def add_gradient(
    use: Use, gradient: Tensor, stored: Mapping[str, Tensor], is_lent: bool = False
) -> None:
    """Add the gradient of one microbatch: to `.grad`, or to what waits for moves.

    Nobody else may read `gradient` later, unless it is a view or `is_lent`.
    """
    parameter = stored[use.parameter.name]
    if not parameter.requires_grad:
        return
    if use.moves:
        if use.local.gradient_dtype is not None:
            gradient = gradient.to(use.local.gradient_dtype)
        if use.gradient is None:
            use.gradient = _owned(gradient, use.value.stride(), is_lent)
        else:
            use.gradient += gradient
        return
    if gradient.dtype != parameter.dtype:
        gradient = gradient.to(parameter.dtype)
    known = parameter.grad
    if known is None:
        parameter.grad = _owned(gradient, parameter.stride(), is_lent)
    else:
        known += gradient


def _owned(gradient: Tensor, stride: tuple[int, ...], is_lent: bool) -> Tensor:
    """The gradient with a storage of its own, of these strides."""
    if not is_lent and gradient._base is None and gradient.stride() == stride:
        return gradient
    made = torch.empty_strided(gradient.shape, stride, dtype=gradient.dtype, device=gradient.device)
    return made.copy_(gradient)
