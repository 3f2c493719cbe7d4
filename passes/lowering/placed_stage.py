"""A stage with its placements, and what follows from them: specs, and what factors count."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from autopar.cost.laws import CostModel
from autopar.passes.analysis import Analysis
from autopar.placement import Spec
from autopar.program.lines import FactorKind, Strategy
from autopar.rules import rule_for


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

    def factor_kinds(self, value: str) -> tuple[tuple[FactorKind, ...], ...]:
        """Per dim of a value, what its factors count."""
        classes = self.analysis.types.classes[value]
        return tuple(tuple(self._kinds.get(c, "sequence") for c in dim) for dim in classes)

    @cached_property
    def _kinds(self) -> Mapping[int, FactorKind]:
        """Class of factors (`program/graph/factors.py`) -> its kind, if that is not "sequence"."""
        classes, rows = self.analysis.types.classes, self.strategy.batch_cells
        weights = self._weights or tuple(self.analysis.program.parameters)
        kinds = dict[int, FactorKind]((c, "tensor") for n in weights for d in classes[n] for c in d)
        return kinds | {classes[v][dim][k]: "data" for v, (dim, k) in rows.items() if v in classes}

    @property
    def _weights(self) -> tuple[str, ...]:
        """The parameters, or views of them, that matmuls and embeddings read.

        Positions that are added to activations have factors of their own, which are no features.
        """
        of_parameters = {*self.analysis.program.parameters, *self.analysis.parameter_views}
        return tuple(
            value
            for operator in self.analysis.operators
            if (rule := rule_for(str(operator.call.op))).flops is not None or rule.lower
            for value in operator.inputs
            if value in of_parameters
        )
