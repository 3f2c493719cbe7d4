"""A model of blocks with dropout, and plans with recompute that are not planned anew.

Apart from its tests: golden programs name its lines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch.nn.functional as F
from torch import Tensor, nn

from autopar import Plan
from autopar.manual import Recompute
from autopar.passes.analysis import Analysis, recomputed_operators
from autopar.passes.binding import mesh_of
from autopar.passes.lowering import stage_record
from autopar.planning import bind
from autopar.program.lines import Recomputed
from tests.helpers.jobs import WIDTH
from tests.helpers.plans import bound_of


class Blocks(nn.Module):
    """Blocks of a norm, a product that is reduced, and what keeps nothing after it."""

    def __init__(self, norm: Callable[[int], nn.Module] = nn.LayerNorm, n_blocks: int = 2) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(norm) for _ in range(n_blocks))

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        for block in self.blocks:
            x = block(x)
        return x.pow(2).mean()


class Block(nn.Module):
    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.norm = norm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.1, self.training)


def _within(part: Analysis, wanted: Sequence[Recomputed]) -> tuple[Recomputed, ...]:
    """What of it one stage has."""
    own = {operator.name for operator in part.operators}
    found = (Recomputed(item.mode, tuple(n for n in item.operators if n in own)) for item in wanted)
    return tuple(item for item in found if item.operators)


def recomputing(plan: Plan, mode: Recompute) -> Plan:
    """A plan without recompute, and its blocks recomputed: placements that do not know of it."""
    analysis, mesh = bound_of(plan).analysis, mesh_of(plan.data.mesh)
    wanted = recomputed_operators(analysis, mode)
    stages = tuple(
        replace(s, strategy=replace(s.strategy, recomputed=_within(s.analysis, wanted)))
        for s in bound_of(plan).stages
    )
    records = tuple(
        stage_record(s.analysis, s.strategy, s.cost.mesh, record.mesh_shape)
        for s, record in zip(stages, plan.data.stages, strict=True)
    )
    data = replace(plan.data, stages=records)
    return Plan(data, bind(data, analysis, mesh, stages))
