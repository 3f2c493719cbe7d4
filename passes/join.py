"""Stages that are laid out, lowered and joined to a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.cost.model import CostModel
from autopar.facts import Strategy
from autopar.passes.intra_op import Analysis
from autopar.passes.lower import lower
from autopar.pipeline import Order, Pipeline


@dataclass(frozen=True)
class LaidStage:
    """One stage of a program with its placements, on the mesh of its cost model."""

    analysis: Analysis
    strategy: Strategy
    cost: CostModel


def join(stages: Sequence[LaidStage], order: Order, with_outputs: bool = False) -> Pipeline:
    """Lower the stages and join them; `with_outputs` also for what the model returns."""
    programs = [
        lower(s.analysis, s.strategy, s.cost, with_outputs and k == len(stages) - 1)
        for k, s in enumerate(stages)
    ]
    return Pipeline.of(programs, [s.cost.mesh for s in stages], order)
