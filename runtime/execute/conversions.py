"""Parameters converted from storage to use, and gradients back, once per step or microbatch.

Where a parameter is used as it is stored, the stored tensor is the program's leaf, and autograd
adds to its `.grad`. Every other use placement is a leaf of its own; the reversed moves bring its
gradient back to storage. Collectives of many parameters are fused (`bucketed.py`). Parameters
gathered at each use are gathered by the generated program, not here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.program import BUCKET_BYTES, MoveLine, ParameterUse, StoredParameter
from autopar.runtime.execute.bucketed import bucketed_apply
from autopar.runtime.groups import Group, phase


@dataclass(frozen=True)
class Conversions:
    """The conversions of one rank: its stage's parameters and groups."""

    parameters: Sequence[StoredParameter]
    groups: Mapping[tuple[int, ...], Group]

    def leaves(self, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Every use placement as a tensor that the program differentiates, by local name."""
        leaves: dict[str, Tensor] = {}
        waiting: list[tuple[StoredParameter, ParameterUse]] = []
        for p in self.parameters:
            for use in p.uses:
                if use.moves:
                    waiting.append((p, use))
                else:
                    leaves[use.local.name] = stored[p.name]
        if waiting:
            with phase("param_gather"):
                values = bucketed_apply(
                    [(stored[p.name].detach(), self._steps(use.moves)) for p, use in waiting],
                    BUCKET_BYTES,
                )
            for (p, use), value in zip(waiting, values, strict=True):
                # A value that is still the stored tensor needs a leaf of its own.
                leaf = value.detach().view_as(value)
                leaves[use.local.name] = leaf.requires_grad_(
                    stored[p.name].requires_grad and torch.is_grad_enabled()
                )
        return leaves

    def return_gradients(
        self, leaves: Mapping[str, Tensor], stored: Mapping[str, Tensor], period: str
    ) -> None:
        """Bring gradients of converted uses back to storage, and add them to `.grad`.

        Only for parameters whose `period` is this one: "step" or "micro".
        """
        waiting: list[tuple[str, Tensor, tuple[MoveLine, ...]]] = []
        for p in self.parameters:
            for use in p.uses:
                leaf = leaves[use.local.name]
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
                    parameter.grad = value.clone() if value._base is not None else value
                else:
                    parameter.grad += value

    def _steps(self, moves: Sequence[MoveLine], backward: bool = False) -> tuple[Any, ...]:
        if backward:
            return tuple(
                (m.move.backward, self._group(m), m.move.splits[::-1]) for m in reversed(moves)
            )
        return tuple((m.move.forward, self._group(m), m.move.splits) for m in moves)

    def _group(self, line: MoveLine) -> Group:
        return self.groups[line.move.axes]
