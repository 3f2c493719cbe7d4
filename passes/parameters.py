"""Parameter candidates: where a parameter is kept, and what turning it into use costs.

A parameter is stored Invariant or Sharded and used however its operators want; the reshard
from storage to use *is* DDP, ZeRO or FSDP, and its period is part of the choice (facts.py).
Several uses at the same placement share one conversion.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.cost.memory import StaticBytes
from autopar.cost.model import CostModel
from autopar.facts import Period, Storage
from autopar.moves import COLLECTIVES
from autopar.passes.constraints import Limits
from autopar.passes.reshard import ReshardTable, step_time_s
from autopar.spec import PREFERENCE, I, S, Spec, TensorType, illegal_reason, local_bytes

PERIODS: tuple[Period, ...] = ("step", "micro", "use")
Array = NDArray[np.float64]


@dataclass(frozen=True)
class Conversion:
    """Cost of turning one storage into one use."""

    time_s: float
    tie: float
    size_bytes: float


@dataclass(frozen=True)
class ParameterMaker:
    """Prices storage and conversions of parameters on one logical mesh.

    `update_s_per_byte` is the optimizer's time per stored byte; `static` its bytes per
    parameter.
    """

    cost: CostModel
    limits: Limits
    n_microbatches: int
    static: StaticBytes
    update_s_per_byte: float

    def storages(
        self, name: str, tensor: TensorType, used: Sequence[Spec]
    ) -> tuple[Storage, ...]:
        """Every storage worth considering: on each axis Invariant, sharded as in some use,
        or sharded along the first factor that divides (for ZeRO)."""
        fixed = self.limits.constraints.storage.get(name)
        if fixed is not None:
            return tuple(dict.fromkeys((fixed, Storage(fixed.spec))))
        sizes = self.cost.mesh.sizes
        cells = dict.fromkeys(
            p.cell for spec in used for p in spec.placements if p.is_shard
        )
        spare = self._spare_cell(tensor)
        if spare is not None:
            cells.setdefault(spare)
        options = [(I,) if n == 1 else (I, *(S(*c) for c in cells)) for n in sizes]
        specs: dict[Spec, None] = {}
        for placements in itertools.product(*options):
            for order in itertools.permutations(range(len(sizes))):
                spec = Spec.of(placements, order)
                if illegal_reason(tensor, spec, sizes) is None:
                    specs.setdefault(spec)
        kept = [
            Storage(spec, period)
            for spec in self._by_recipe(tuple(specs))
            for period in (PERIODS if any(p.is_shard for p in spec.placements) else PERIODS[:1])
        ]
        return tuple(s for s in kept if self.limits.storage_allowed(name, s))

    def _spare_cell(self, tensor: TensorType) -> tuple[int, int] | None:
        """The first factor that all axes together divide; else the first any axis divides.

        A leading factor comes first: its shards are contiguous.
        """
        sizes = self.cost.mesh.sizes
        ordered = sorted(tensor.cells, key=lambda c: (c[1], c[0]))
        for wanted in (self.cost.mesh.n_ranks, *sorted((n for n in sizes if n > 1), reverse=True)):
            for dim, factor in ordered:
                if tensor.dims[dim][factor] % wanted == 0:
                    return dim, factor
        return None

    def _by_recipe(self, specs: tuple[Spec, ...]) -> tuple[Spec, ...]:
        """Under a ZeRO recipe, only storages sharded on every data axis, if there are any."""
        constraints = self.limits.constraints
        if not constraints.zero:
            return specs
        data = [a for a in self.cost.mesh.active_axes if constraints.role(a) == "data"]
        sharded = tuple(s for s in specs if all(s.placements[a].is_shard for a in data))
        return sharded or specs

    def storage_costs(
        self, tensor: TensorType, storages: Sequence[Storage]
    ) -> tuple[Array, Array, Array]:
        """(update seconds, preference, static bytes) per storage."""
        stored = np.array(
            [local_bytes(tensor, s.spec, self.cost.mesh.sizes) for s in storages], dtype=float
        )
        n_local = stored / tensor.itemsize
        preference = [
            sum(PREFERENCE[p.kind] for p in s.spec.placements) * 1e-5
            + PERIODS.index(s.period) * 1e-6
            + bool(s.spec.order) * 1e-6
            for s in storages
        ]
        if not tensor.has_grad:
            return np.zeros(len(storages)), np.array(preference), stored
        return (
            stored * self.update_s_per_byte,
            np.array(preference),
            n_local * self.static.total_bytes,
        )

    def conversion(
        self, table: ReshardTable, storage: Storage, use: Spec, n_uses: int
    ) -> Conversion | None:
        """What one conversion costs per step; None when the constraints forbid it."""
        path = table.path(storage.spec, use)
        gathers = any(s.move.forward == "all_gather" for s in path)
        if not self.limits.conversion_allowed(storage, use, gathers):
            return None
        has_grad, m = table.tensor.has_grad, self.n_microbatches
        forward = backward = 0.0
        for step in path:
            if storage.period == "step":
                f = self.cost.bucketed_time_s(step.move.forward, step.forward_bytes, step.move.axes)
                b = self.cost.bucketed_time_s(step.move.backward, step.backward_bytes, step.move.axes)
            else:
                f, b = step_time_s(step, True, self.cost.primitive_time_s)
            forward, backward = forward + f, backward + (b if has_grad else 0.0)
        calls = sum(
            (s.move.forward in COLLECTIVES) + (has_grad and s.move.backward in COLLECTIVES)
            for s in path
        )
        tie = (calls + 1e-3 * len(path)) * (0.01 if storage.period == "step" else m)
        used_bytes = float(local_bytes(table.tensor, use, self.cost.mesh.sizes)) if path else 0.0
        copied = any(s.move.forward != "identity" for s in path)
        if storage.period == "use":
            return Conversion(m * n_uses * (2 * forward + backward), tie, 0.0)
        if storage.period == "micro":
            return Conversion(forward + m * backward, tie, used_bytes if copied else 0.0)
        whole = used_bytes * ((1 if copied else 0) + (1 if has_grad else 0))
        return Conversion(forward + backward, tie, whole)
