"""Stages with their placements, lowered and joined into a pipeline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autopar.cost.laws import CostModel
from autopar.passes.analysis import Analysis
from autopar.passes.lowering.lines import lower
from autopar.placement import Spec
from autopar.program import Pipeline, ScheduleFactory, Strategy


@dataclass(frozen=True)
class PlacedStage:
    """One stage of a program with its placements, on the mesh of its cost model."""

    analysis: Analysis
    strategy: Strategy
    cost: CostModel

    def specs(self) -> Iterator[tuple[str, Spec]]:
        """Every value with every spec that it has: at operators, in storage and on boundaries."""
        for operator in self.analysis.operators:
            chosen = self.strategy.operators[operator.name]
            yield from zip(operator.inputs, chosen.inputs, strict=True)
            yield from zip(operator.outputs, chosen.outputs, strict=True)
        yield from ((name, storage.spec) for name, storage in self.strategy.storage.items())
        yield from self.strategy.received.items()
        yield from self.strategy.sent.items()


def join(
    stages: Sequence[PlacedStage], order: ScheduleFactory, with_outputs: bool = False
) -> Pipeline:
    """The pipeline of the lowered stages; `with_outputs` also returns the model's outputs."""
    programs = [
        lower(s.analysis, s.strategy, s.cost, with_outputs and k == len(stages) - 1)
        for k, s in enumerate(stages)
    ]
    return Pipeline.of(programs, [s.cost.mesh for s in stages], order)
