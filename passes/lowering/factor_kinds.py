"""What the factors of tensors count in a stage: rows of the batch, features, or positions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from autopar.passes.analysis import Analysis
from autopar.program.lines import FactorKind, Strategy
from autopar.rules import rule_for


@dataclass(frozen=True, eq=False)
class FactorKinds:
    """The `FactorKind`s of a stage's values."""

    analysis: Analysis
    strategy: Strategy

    def of(self, value: str) -> tuple[tuple[FactorKind, ...], ...]:
        """Per dim of a value, the kinds of its factors."""
        classes = self.analysis.types.classes[value]
        return tuple(tuple(self._of_classes.get(c, "sequence") for c in dim) for dim in classes)

    @cached_property
    def _of_classes(self) -> Mapping[int, FactorKind]:
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
