"""Which shards of a stage are in head-tail order, so that all ranks have equal causal work.

One axis may be *folded*: every shard of a sequence on it is in head-tail order
(`autopar/placement/head_tail.py`), wherever that is possible at all. It is the axis over which the
causal attention of the stage is lowered. It is not folded if

    another causal attention shards its rows over other axes
    a sequence has no 2n equal pieces, or another axis cuts it further out
    a parameter has a shard of a sequence on it: state is stored in order

Other functions that compute offsets from shards do so of vocabularies and experts, which are no
sequences.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from autopar.mesh import LogicalMesh
from autopar.passes.analysis import Analysis
from autopar.passes.lowering.factor_kinds import FactorKinds
from autopar.placement import Move, Spec, folds_of
from autopar.program.lines import Strategy


@dataclass(frozen=True, eq=False)
class HeadTail:
    """The folded axis of a stage; None if there is none."""

    axis: int | None
    kinds: FactorKinds
    sizes: tuple[int, ...]

    @staticmethod
    def of(
        analysis: Analysis, strategy: Strategy, mesh: LogicalMesh, kinds: FactorKinds
    ) -> HeadTail:
        axes = {
            chosen.lowered_axes
            for operator in analysis.operators
            if operator.call.args.get("is_causal")
            and (chosen := strategy.operators[operator.name]).lowered is not None
        }
        over = next(iter(axes)) if len(axes) == 1 else ()
        found = HeadTail(over[0] if len(over) == 1 else None, kinds, mesh.sizes)
        return found if found._is_possible() else replace(found, axis=None)

    def folds(self, value: str, spec: Spec) -> int:
        """`Split.folds` of a value's shard on the axis."""
        if self.axis is None or not self._is_sequence(value, spec, self.axis):
            return 1
        dims = self.kinds.strategy.types[value].dims
        return folds_of(dims, spec, self.axis, self.sizes)

    def fold(self, move: Move, value: str, source: Spec, target: Spec) -> Move:
        """The move between two specs of a value, with its splits folded."""
        if self.axis not in move.axes:
            return move
        shards = [s for s in (source, target) if s.placements[self.axis].is_shard]
        splits = zip(move.splits, shards, strict=True)
        folded = tuple(replace(split, folds=self.folds(value, spec)) for split, spec in splits)
        return replace(move, splits=folded)

    def _is_sequence(self, value: str, spec: Spec, axis: int) -> bool:
        placement = spec.placements[axis]
        kinds = self.kinds.of(value)
        return placement.is_shard and kinds[placement.dim][placement.factor] == "sequence"

    def _is_possible(self) -> bool:
        axis, parameters = self.axis, self.kinds.analysis.program.parameters
        return axis is not None and not any(
            self._is_sequence(value, spec, axis)
            and (value in parameters or self.folds(value, spec) == 1)
            for value, spec in self._specs()
        )

    def _specs(self) -> Iterator[tuple[str, Spec]]:
        """Every value with every spec in which it is stored, made, read, sent or received."""
        strategy = self.kinds.strategy
        yield from ((name, storage.spec) for name, storage in strategy.storage.items())
        yield from (*strategy.received.items(), *strategy.sent.items())
        for operator in self.kinds.analysis.operators:
            chosen = strategy.operators[operator.name]
            yield from zip(operator.inputs, chosen.inputs, strict=True)
            yield from zip(operator.outputs, chosen.outputs, strict=True)
