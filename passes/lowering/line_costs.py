"""What one lowered operator costs on one rank: time, what autograd saves, and workspace.

Bytes are measured on whole tensors of the global batch (`autopar/measured/saved.py`,
`autopar/measured/workspace.py`) or given by the formulas of the operator's rule. A rank has the
share that its placements leave it.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from autopar.cost.laws import CostModel
from autopar.identity import Same
from autopar.passes.analysis import Analysis, PlacedOperator
from autopar.passes.intra import Moved, operator_times_s
from autopar.placement import local_bytes
from autopar.program.graph import Operator, name_sizes
from autopar.program.lines import UNUSED, InnerCall, Local, OperatorStrategy, Strategy, Workspace
from autopar.rules import rule_for


@dataclass(frozen=True)
class LinePrice:
    """The price of one operator on one rank.

    `flops` are the rank's forward FLOPs. `model_flops` are those of all ranks, with backward.
    `share` is the rank's share of the operator: every axis that shards a tensor divides it.
    """

    flops: float
    model_flops: float
    forward_s: float
    backward_s: float
    again_s: float
    share: float


@dataclass
class LineCosts:
    """Prices the operators of one stage under its strategy; `folded` is its folded axis, if any
    (`head_tail.py`)."""

    analysis: Analysis
    strategy: Strategy
    cost: CostModel
    folded: int | None = None
    # By pattern, because equal operators share one.
    _prices: dict[tuple[Hashable, ...], LinePrice] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.types, self.sizes = self.strategy.types, self.cost.mesh.sizes
        self.active = self.cost.mesh.active_axes
        self.fused = self.analysis.fused_traffic(self.cost.kernels)

    def price(self, item: PlacedOperator, chosen: OperatorStrategy) -> LinePrice:
        """The price of an operator; cached for equal operators that are placed alike."""
        key = Same(item.pattern), chosen, self.fused.get(item.name)
        found = self._prices.get(key)
        if found is None:
            found = self._prices[key] = self._price(item, chosen)
        return found

    def _price(self, item: PlacedOperator, chosen: OperatorStrategy) -> LinePrice:
        operator, rule = item.operator, rule_for(str(item.operator.call.op))
        placed = (*zip(operator.inputs, chosen.inputs, strict=True),
                  *zip(operator.outputs, chosen.outputs, strict=True))  # fmt: skip
        sizes = (np.array([float(local_bytes(self.types[v], s, self.sizes))]) for v, s in placed)
        share = 1.0
        for axis in self.active:
            if any(s.placements[axis].is_shard for _, s in placed):
                share /= self.sizes[axis]
        whole = rule.flops_of(item.sizes)
        flops = whole * share
        item_bytes = self.types[operator.inputs[0]].itemsize * share
        n_matmuls = 1
        if any(self.types[v].has_grad for v in operator.outputs):
            n_matmuls += sum(self.types[v].has_grad for v in operator.inputs[:2])
        times = operator_times_s(
            rule,
            operator,
            self.types.__getitem__,
            self.cost,
            np.array([flops]),
            Moved.of(sizes, self.fused.get(operator.name), np.zeros(1)),
            self._rows_share(chosen),
            [np.array([n * item_bytes]) for n in rule.between_of(item.sizes)],
        )
        uneven = self.imbalance(chosen)
        forward_s, backward_s, again_s = (uneven * float(of[0]) for of in times)
        return LinePrice(flops, whole * n_matmuls, forward_s, backward_s, again_s, share)

    def _rows_share(self, chosen: OperatorStrategy) -> float:
        """`rows_share` of `operator_times_s`: in head-tail order all ranks skip as much."""
        if chosen.lowered_axes == (self.folded,):
            return 1.0
        return 1.0 / math.prod(self.sizes[axis] for axis in chosen.lowered_axes)

    def imbalance(self, chosen: OperatorStrategy) -> float:
        """How many times the mean of rows the fullest rank computes."""
        uneven = chosen.lowered is not None and chosen.lowered.uneven
        return self.cost.imbalance if uneven else 1.0

    def share(self, operator: Operator, price: LinePrice) -> float:
        """What share of the bytes measured on whole tensors one rank has, per microbatch."""
        batch = self.strategy.batch_cells
        if any(v in batch for v in (*operator.inputs, *operator.outputs)):
            return price.share / self.analysis.batch.n_splits(self.strategy.n_microbatches)
        return price.share

    def kept(
        self, operator: Operator, chosen: OperatorStrategy,
        inputs: Sequence[Local], outs: Sequence[Local], share: float,
    ) -> tuple[float, tuple[str, ...]]:  # fmt: skip
        """What autograd saves: bytes of the operator's own, and variables."""
        saved = self.analysis.saved.get(operator.name)
        if saved is None or not any(out.has_grad for out in outs):
            return 0.0, ()
        own_bytes = 0.0
        if chosen.lowered is not None:
            own_bytes = self._lowered(chosen.lowered.saved_bytes, operator, chosen, inputs, outs)
            if not chosen.lowered.wraps:
                values = (operator.call.args[name] for name in chosen.lowered.keeps)
                positions = (operator.call.tensors.index(v) for v in values if v is not None)
                return own_bytes, tuple(inputs[i].name for i in positions)
        keeps = [inputs[i].name for i in sorted(saved.inputs)]
        keeps += [outs[i].name for i in sorted(saved.outputs) if outs[i].name != UNUSED]
        own_bytes += sum(outs[i].size_bytes for i in saved.outputs if outs[i].name == UNUSED)
        return own_bytes + saved.other_bytes * share, tuple(keeps)

    def workspace(
        self, operator: Operator, chosen: OperatorStrategy,
        inputs: Sequence[Local], outs: Sequence[Local], share: float,
    ) -> Workspace:  # fmt: skip
        forward_bytes = backward_bytes = 0.0
        if chosen.lowered is not None:
            formulas = chosen.lowered.forward_bytes, chosen.lowered.backward_bytes
            forward_bytes, backward_bytes = (
                self._lowered(formula, operator, chosen, inputs, outs) for formula in formulas
            )
            if not chosen.lowered.wraps:
                return Workspace(forward_bytes, backward_bytes)
        needed = self.analysis.temporaries[operator.name]
        return Workspace(
            forward_bytes + needed.forward_bytes * share,
            backward_bytes + needed.backward_bytes * share,
            tuple(inputs[i].name for i in sorted(needed.passed)),
        )

    def inner(
        self, operator: Operator, chosen: OperatorStrategy,
        inputs: Sequence[Local], outs: Sequence[Local], price: LinePrice,
    ) -> tuple[InnerCall, ...]:  # fmt: skip
        """The collectives inside the function that replaces an operator.

        Those of backward are included only where an input has a gradient. What runs beside compute
        is divided among them by their seconds.
        """
        if chosen.lowered is None:
            return ()

        def value(formula: str) -> float:
            return self._lowered(formula, operator, chosen, inputs, outs)

        axes, share = chosen.lowered_axes, value(chosen.lowered.beside)
        compute_s = {"forward": price.forward_s, "backward": price.backward_s}
        calls = [
            InnerCall(
                c.kind,
                c.phase,
                int(value(c.size_bytes)),
                round(value(c.count)),
                imbalance=self.imbalance(chosen),
            )
            for c in chosen.lowered.inner
            if c.runs([i.has_grad for i in inputs])
        ]
        each_s = [self.cost.primitive_time_s(c.kind, c.size_bytes, axes) for c in calls]
        total_s = {
            phase: sum(t * c.count for c, t in zip(calls, each_s, strict=True) if c.phase == phase)
            for phase in compute_s
        }
        hidden = value(chosen.lowered.hidden)
        # Seconds of compute beside each second of calls; a call hides no more than its share.
        beside = {p: share * compute_s[p] / total_s[p] for p in compute_s if total_s[p]}
        return tuple(
            replace(c, beside_s=time_s * min(beside[c.phase], c.imbalance * hidden))
            if share and time_s
            else c
            for c, time_s in zip(calls, each_s, strict=True)
        )

    def _lowered(
        self, formula: str, operator: Operator, chosen: OperatorStrategy,
        inputs: Sequence[Local], outs: Sequence[Local],
    ) -> float:  # fmt: skip
        """The value of a formula of the replacing function, with the sizes of one rank."""
        assert chosen.lowered is not None
        sizes = name_sizes(operator.notation, [i.shape for i in inputs], [o.shape for o in outs])
        n_ranks = math.prod(self.sizes[axis] for axis in chosen.lowered_axes)
        on = sizes, inputs[0].dtype.itemsize, n_ranks, self.imbalance(chosen)
        return chosen.lowered.value(formula, *on)

    def storage_of(self, operator: Operator, names: Sequence[str]) -> tuple[str | None, ...]:
        """Per output, the input variable whose storage it shares; None if it has its own."""
        owners = self.analysis.storage_owners
        by_owner = {owners[v]: n for v, n in zip(operator.inputs, names, strict=True)}
        return tuple(by_owner.get(owners.get(v, v)) for v in operator.outputs)
