"""Lower bounds on one program's seconds and bytes that need no solver.

They take the best case: every rank that may share something has an equal share, nothing waits, and
no collective runs. `LeastRerun` says what a memory budget costs at least in recompute.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from autopar.arrays import Array
from autopar.caching import once
from autopar.cost.laws import CostModel
from autopar.cost.memory import static_bytes_per_param
from autopar.manual import Recompute
from autopar.passes.analysis import Analysis, Recomputable, stored_dtype
from autopar.passes.intra.at_loss import least_at_loss_bytes
from autopar.passes.intra.constraints import Constraints
from autopar.passes.intra.member_prices import Moved, operator_times_s
from autopar.passes.intra.rerun import RerunRanges
from autopar.placement import TensorType
from autopar.rules import rule_for


def static_parts(tensors: Iterable[TensorType], dtype: torch.dtype, optimizer: str) -> Array:
    """[4]: unsharded bytes of parameters of which `dtype` is stored: all, with gradients and
    optimizer state; what operators use; its gradients; the optimizer state."""
    static, parts = static_bytes_per_param(optimizer, dtype), np.zeros(4)
    for t in tensors:
        parts[:2] += static_bytes_of(t, static.total_bytes), t.size_bytes
        if t.has_grad:
            state = t.size_bytes / t.itemsize * static.optimizer_bytes
            parts[2:] += t.gradient_bytes(t.size_bytes), state
    return parts


def least_shared_bytes(
    parts: Array, constraints: Constraints, sizes: Sequence[int], n_microbatches: int
) -> Array:
    """Lower bound on the bytes per device of `static_parts`, [4, ...], on a mesh of such axes.

    Under ZeRO-1 and 2 what operators use is whole on data-parallel ranks, and under ZeRO-1 so are
    its gradients from the second microbatch on.
    """
    (whole, used, gradients, state), n_shares = parts, constraints.n_static_shares(sizes)
    least: Array = whole / n_shares
    if constraints.zero not in (1, 2):
        return least
    if constraints.zero == 1 and n_microbatches > 1:
        used = used + gradients
    n_of_uses = replace(constraints, zero=0).n_static_shares(sizes)
    return np.maximum(least, state / n_shares + used / n_of_uses)


def unpadded_static_bytes(analysis: Analysis, optimizer: str) -> float:
    """As `static_bytes`, of the user's shapes: a plan drops paddings that it does not use."""
    program, types = analysis.program, analysis.types.tensors
    each = static_bytes_per_param(optimizer, stored_dtype(analysis)).total_bytes
    return sum(
        math.prod(info.shape) * (each if types[name].has_grad else info.dtype.itemsize)
        for name, info in program.parameters.items()
    )


def static_bytes_of(tensor: TensorType, bytes_per_element: float) -> float:
    """Bytes of one parameter; of a trained one, so many per element."""
    each = bytes_per_element if tensor.has_grad else tensor.stored_itemsize or tensor.itemsize
    return tensor.size_bytes / tensor.itemsize * each


def least_bytes(
    analysis: Analysis, cost: CostModel, n_microbatches: int, optimizer: str,
    constraints: Constraints, n_in_flight: float = 1, recomputable: Recomputable | None = None,
) -> float:  # fmt: skip
    """Lower bound on the bytes per device, from the best case: every rank that may share a tensor
    has an equal share, and everything that may be recomputed is.

    It costs nothing compared with solving, and rules out most numbers of microbatches that do not
    fit.
    """
    again = recomputable.operators_within(analysis) if recomputable else frozenset()
    kept = n_in_flight * analysis.kept_bytes(n_microbatches, again)
    parameters = least_static_bytes(analysis, cost, optimizer, constraints, n_microbatches)
    needed = least_at_loss_bytes(analysis, n_microbatches, cost.mesh.n_ranks)
    return parameters + kept / cost.mesh.n_ranks + needed


def least_static_bytes(
    analysis: Analysis, cost: CostModel, optimizer: str, constraints: Constraints,
    n_microbatches: int,
) -> float:  # fmt: skip
    """Lower bound on the bytes per device of parameters, their gradients and optimizer state."""
    on = _static_parts(analysis, optimizer), constraints, cost.mesh.sizes, n_microbatches
    return float(least_shared_bytes(*on))


@once
def _static_parts(analysis: Analysis, optimizer: str) -> Array:
    """`static_parts` of all parameters."""
    tensors = (analysis.types.tensors[n] for n in analysis.program.parameters)
    return static_parts(tensors, stored_dtype(analysis), optimizer)


def least_step_s(analysis: Analysis, cost: CostModel) -> float:
    """Lower bound on the step of any plan on as many devices.

    Every operator runs once on the whole batch, in equal shares, without collectives, updates or
    bubbles.
    """
    n_accumulated, (times_s, _) = analysis.batch.n_accumulated, least_times_s(analysis, cost)
    return float(sum(times_s.tolist())) * n_accumulated / cost.mesh.n_ranks


def shared_s(times_s: Array, analysis: Analysis, n_ranks: int, n_microbatches: int) -> float:
    """Seconds of a step in which `n_ranks` have equal shares of `times_s`.

    `times_s` are those of `least_times_s`, [2]. Every rank launches all operators for every
    microbatch.
    """
    whole_s, launches_s = times_s.tolist()
    share = analysis.batch.n_accumulated / n_ranks
    return float((whole_s - launches_s) * share + launches_s * n_microbatches)


def least_times_s(analysis: Analysis, cost: CostModel) -> Array:
    """[2, operators]: seconds on one device with the program's whole batch at once; and the part of
    them that does not shrink with the share: launches."""
    return least_phases_s(analysis, cost).sum(axis=0)


def least_phases_s(analysis: Analysis, cost: CostModel) -> Array:
    """[forward and backward, 2, operators]: `least_times_s` in its phases."""
    return _least_times_s(analysis, cost)[:2]


def _least_times_s(analysis: Analysis, cost: CostModel) -> Array:
    """[forward, backward and again, 2, operators]: as `least_phases_s`."""
    types, alike = analysis.types.tensors, dict[Hashable, Array]()
    fused = analysis.fused_traffic(cost.kernels)
    by_kind = analysis.placed_by_kind(analysis.batch.n_accumulated)
    kinds = [(analysis.kinds[o.name], fused.get(o.name)) for o in analysis.operators]
    for kind in dict.fromkeys(kinds):
        item = by_kind[kind[0]]
        operator = item.operator
        rule = rule_for(str(operator.call.op))
        sizes = (types[n].size_bytes for n in (*operator.inputs, *operator.outputs))
        moved = Moved.of((np.array([float(n), 0.0]) for n in sizes), kind[1], np.zeros(2))
        times = operator_times_s(
            rule, operator, types.__getitem__, cost,
            np.array([float(rule.flops_of(item.sizes)), 0.0]), moved,
            between_bytes=[
                np.array([n * types[operator.inputs[0]].itemsize, 0.0])
                for n in rule.between_of(item.sizes)
            ],
        )  # fmt: skip
        alike[kind] = np.stack(times)
    return np.stack([alike[kind] for kind in kinds], axis=2)


@dataclass(frozen=True, eq=False)
class LeastRerun:
    """What a memory budget costs at least, because operators run again.

    A plan must free some of the bytes that it would save. Every rank holds at least an equal share
    of what a range saves, and takes at least an equal share of its seconds to run it again. So the
    cheapest way to free enough is a knapsack over ranges and modes (`recompute_choice.py`). With
    fractions allowed it is solved by taking the most bytes per second first, which is a bound.
    """

    analysis: Analysis
    recomputable: Recomputable
    cost: CostModel

    def __call__(self, n_microbatches: int, n_in_flight: float, budget_bytes: float) -> float:
        """Seconds of a step, if activations and the loss have `budget_bytes` on each device.

        They are the same on all views of as many devices.
        """
        n_ranks = self.cost.mesh.n_ranks
        kept_bytes = n_in_flight * self.analysis.kept_bytes(n_microbatches)
        budget_bytes -= least_at_loss_bytes(self.analysis, n_microbatches, n_ranks)
        missing_bytes, total_s = kept_bytes - n_ranks * budget_bytes, 0.0
        for freed_bytes, time_s in self._steps(n_microbatches):
            if missing_bytes <= 0:
                break
            freed_bytes *= n_in_flight
            total_s += time_s * min(1.0, missing_bytes / freed_bytes)
            missing_bytes -= freed_bytes
        return total_s

    @once
    def _steps(self, n_microbatches: int) -> list[tuple[float, float]]:
        """(bytes freed, seconds) of each range from one mode to a leaner one, cheapest first."""
        # Equal shares of all that is saved are what "gathers" leaves at best.
        modes = [mode for mode in self.recomputable.modes if mode not in (None, "gathers")]
        steps = [
            step
            for r in range(len(self._ranges.every))
            for step in _hull([self._mode(r, mode, n_microbatches) for mode in modes])
        ]
        return sorted(steps, key=lambda step: step[1] / step[0])

    @cached_property
    def _ranges(self) -> RerunRanges:
        return RerunRanges(self.analysis, self.recomputable.within(self.analysis))

    @cached_property
    def _again_s(self) -> Array:
        """[2, operators]: as in `least_times_s`, of what runs again."""
        again_s: Array = _least_times_s(self.analysis, self.cost)[2]
        return again_s

    def _mode(self, r: int, mode: Recompute, n_microbatches: int) -> tuple[float, float]:
        """(bytes that a mode of a range frees at most, seconds that it takes at least)."""
        freed_bytes, times_s = self._rerun_cost(r, mode, n_microbatches)
        n_ranks = self.cost.mesh.n_ranks
        return freed_bytes, shared_s(times_s, self.analysis, n_ranks, n_microbatches)

    def _rerun_cost(self, r: int, mode: Recompute, n_microbatches: int) -> tuple[float, Array]:
        """(bytes that a mode of a range frees at most, [2] `least_times_s` of what runs again)."""
        freed, held, other_bytes, times_s = self._rerun(r, mode)
        types = self.analysis.microbatch_types(n_microbatches).tensors
        freed_bytes, held_bytes = (sum(types[v].size_bytes for v in of) for of in (freed, held))
        other_bytes /= self.analysis.batch.n_splits(n_microbatches)
        return freed_bytes + other_bytes - held_bytes, times_s

    @once
    def _rerun(
        self, r: int, mode: Recompute
    ) -> tuple[Collection[str], Collection[str], float, Array]:
        """(values that are freed at most, values that are held, other bytes that are freed from all
        rows, [2] `least_times_s` of what runs again)."""
        ranges = self._ranges
        held = {v for v in ranges.taken[r] if ranges.is_only(v, r)}
        freed, other_bytes, again = set[str](), 0.0, list[int]()
        for i in ranges.every[r]:
            operator, rule = self.analysis.operators[i], ranges.rule(i)
            for value in ranges.kept_by(i):
                if ranges.is_only(value, r) and value not in self.analysis.program.parameters:
                    freed.add(value)
            saved = self.analysis.saved.get(operator.name)
            if saved is not None:
                other_bytes += saved.other_bytes
            is_kept = self._is_matmul(r, i) and mode == "selective"
            is_added = ranges.matmul_of_bias_add(i) is not None and mode == "selective"
            if ranges.runs_again(i, mode) and not is_kept and not is_added:
                again.append(i)
            if is_kept and not rule.lower:  # some choices of a lowered operator keep nothing
                if i in ranges.matmuls_read_again:
                    held |= {v for v in operator.outputs if ranges.is_only(v, r)}
                if saved is not None and rule.fused:
                    other_bytes -= saved.other_bytes
        return freed, held, other_bytes, self._again_s[:, again].sum(axis=1)

    def _is_matmul(self, r: int, i: int) -> bool:
        """Is it a matmul whose result "selective" saves? The last operator's is not saved."""
        return self._ranges.is_matmul(i) and i != self._ranges.every[r][-1]


def _hull(points: Iterable[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """The steps along the lower convex hull of (bytes freed, seconds), from (0, 0) to the most."""
    at, left = (0.0, 0.0), sorted(points)
    while left := [p for p in left if p[0] > at[0]]:
        best = min(left, key=lambda p: ((p[1] - at[1]) / (p[0] - at[0]), -p[0]))
        yield best[0] - at[0], best[1] - at[1]
        at = best
