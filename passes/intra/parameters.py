"""Where parameters may be stored, and what converting storage to use costs.

A parameter is stored Invariant or Sharded, and used as its operators need it. The reshard from
storage to use *is* DDP, ZeRO or FSDP; its period is part of the choice (`Period` in
`autopar/program/lines/strategy.py`). Uses with equal placements share one conversion.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import NamedTuple

import numpy as np

from autopar.arrays import Array, BoolArray, Indices
from autopar.cost.laws import CostModel
from autopar.cost.memory import StaticBytes
from autopar.passes.analysis import Gathering
from autopar.passes.intra.cases import Cases
from autopar.passes.intra.constraints import ZERO_SHARDS, AppliedConstraints
from autopar.passes.intra.hiding import Hidable, HidableCosts, Hiding
from autopar.passes.reshard import ReshardTables, Ties, primitive_lines
from autopar.passes.solvers.problem import compiled
from autopar.placement import (
    PREFERENCE,
    I,
    S,
    Spec,
    TensorType,
    canonical_spec,
    divides,
    every_order,
)
from autopar.program.lines import Period, Storage

PERIODS: tuple[Period, ...] = ("step", "micro", "use")


@dataclass(frozen=True)
class ParameterMaker:
    """Prices storage and conversions of parameters in several cases.

    `update_s_per_byte` is the optimizer's time per stored byte; `static` has its bytes per element.
    In mixed precision, the shard is cast once a step. Gathered at each use, the cast is kept for
    the step; else what it is converted to is kept. `gathering` is what is known of each parameter's
    collectives. `counted` [cases] is 1 where gradients count among the bytes (`at_loss.py`).
    """

    cases: Cases
    limits: AppliedConstraints
    static: StaticBytes
    update_s_per_byte: float
    hiding: Hiding
    gathering: Mapping[str, Gathering]
    counted: Array
    is_recipe: bool = True  # are conversions those of `constraints.zero`, if it is given?

    @property
    def search_maker(self) -> ParameterMaker:
        """The same, with conversions that a search may choose."""
        return replace(self, is_recipe=False)

    @cached_property
    def sizes(self) -> tuple[tuple[int, ...], ...]:
        """The axis sizes of each mesh."""
        return tuple(cost.mesh.sizes for cost in self.cases.meshes)

    def storages(self, name: str, tensor: TensorType, used: Sequence[Spec]) -> Storages:
        """Every storage worth considering: on each axis Invariant, sharded as in some use, or
        sharded along the factor of `_spare_cell` (for ZeRO)."""
        known: dict[tuple[Spec, ...], tuple[Storage, ...]] = {}
        of_meshes = []
        for sizes in self.sizes:
            specs = self._specs(name, tensor, used, sizes)
            if specs not in known:
                known[specs] = self._every_storage(name, specs)
            of_meshes.append(specs)
        every = tuple(dict.fromkeys(itertools.chain.from_iterable(known.values())))
        marks = [[storage in of for storage in every] for of in map(frozenset, known.values())]
        legal = np.array(marks, dtype=bool).reshape(len(known), len(every))
        place = {specs: i for i, specs in enumerate(known)}
        of_cases = np.array([place[specs] for specs in of_meshes])[self.cases.mesh_of]
        return Storages(every, legal[of_cases])

    def _specs(
        self, name: str, tensor: TensorType, used: Sequence[Spec], sizes: tuple[int, ...]
    ) -> tuple[Spec, ...]:
        """The specs in which a parameter may be stored on one mesh."""
        fixed = self.limits.constraints.storage.get(name)
        if fixed is not None:
            return (fixed.spec,)
        cells = dict.fromkeys(p.cell for spec in used for p in spec.placements if p.is_shard)
        spare = _spare_cell(tensor, sizes)
        if spare is not None:
            cells.setdefault(spare)
        specs = _storage_specs(tensor, tuple(cells), sizes)
        if not self.limits.constraints.zero:
            return specs
        fits = self._fit_recipe(tensor, specs, used, sizes)
        return tuple(spec for spec, row in zip(specs, fits, strict=True) if row.any()) or specs

    def _every_storage(self, name: str, specs: Sequence[Spec]) -> tuple[Storage, ...]:
        fixed = self.limits.constraints.storage.get(name)
        if fixed is not None:
            return tuple(dict.fromkeys((fixed, Storage(fixed.spec))))
        kept = (
            Storage(spec, period)
            for spec in specs
            for period in (PERIODS if any(p.is_shard for p in spec.placements) else PERIODS[:1])
        )
        return tuple(s for s in kept if self.limits.storage_allowed(name, s))

    def _fit_recipe(
        self, tensor: TensorType, stored: Sequence[Spec], used: Sequence[Spec],
        sizes: tuple[int, ...],
    ) -> BoolArray:  # fmt: skip
        """[stored, used]: under a ZeRO recipe, sharded on every axis of `ZERO_SHARDS` beside what
        the use shards; where no spec that divides on this mesh is, whole on these axes."""
        constraints = self.limits.constraints
        data = [a for a in self.cases.active_axes if constraints.role(a) in ZERO_SHARDS]
        fits = np.array([[self.limits.fits_recipe(s, u) for u in used] for s in stored], dtype=bool)
        if not constraints.zero:
            return fits
        sharded = np.array(
            [
                all(s.placements[a].is_shard for a in data) and divides(tensor, s.placements, sizes)
                for s in stored
            ]
        )
        among = fits & sharded[:, None]
        return np.where(among.any(axis=0), among, fits)

    def storage_costs(self, tensor: TensorType, storages: Storages) -> tuple[Array, Array, Array]:
        """(update seconds [cases, storages], preference [storages], static bytes [cases,
        storages])."""
        used = self._local_bytes(tensor, [s.spec for s in storages.every])
        n_local = used / tensor.itemsize
        stored = n_local * (tensor.stored_itemsize or tensor.itemsize)
        preference = np.array(
            [
                sum(PREFERENCE[p.kind] for p in s.spec.placements) * 1e-5
                + PERIODS.index(s.period) * 1e-6
                + bool(s.spec.order) * 1e-6
                for s in storages.every
            ]
        )
        if tensor.has_grad:
            kept_bytes = self.static.parameter_bytes + self.static.optimizer_bytes
            gradient_bytes = self.static.gradient_bytes * self.counted[:, None]
            time_s = stored * self.update_s_per_byte
            size_bytes = n_local * (kept_bytes + gradient_bytes)
        else:
            time_s, size_bytes = np.zeros_like(stored), stored
        if tensor.stored_itemsize:
            of_use = np.array([s.period == "use" for s in storages.every])
            time_s = time_s + (stored + used) / self.cases.costs[0].mesh.device.bytes_per_s
            size_bytes = size_bytes + np.where(of_use, used, 0.0)
        time_s[~storages.legal] = np.inf
        return time_s, preference, size_bytes

    def _local_bytes(self, tensor: TensorType, specs: Sequence[Spec]) -> Array:
        """[cases, specs]"""
        is_cut = np.array([[p.is_shard for p in spec.placements] for spec in specs], dtype=bool)
        n_shards = np.where(is_cut, self.cases.sizes[:, None, :], 1).prod(axis=2)
        return (tensor.size_bytes // n_shards).astype(np.float64)

    def conversions(
        self, tables: ReshardTables, storages: Sequence[Storage], uses: Sequence[Spec], use: Uses
    ) -> tuple[Array, Ties, Array, HidableCosts]:
        """(seconds per step, tie, bytes) of converting storages to uses: [cases, storages, uses].
        Last, what of the seconds compute may hide; the seconds are as if all of it were hidden.

        Seconds are infinite if the constraints forbid the conversion. ZeRO-3 gathers at each use,
        forward and where backward needs it; the other periods convert once per distinct use.
        """
        rows = [
            tables.index[canonical_spec(tables.tensors[0], s.spec, self.sizes[0])] for s in storages
        ]
        distinct = {row: i for i, row in enumerate(dict.fromkeys(rows))}
        columns = [tables.index[u] for u in uses]
        on = self.cases.meshes, tuple(distinct), tuple(columns), use.fused_bytes
        paths = tables.once(on, lambda: path_costs(tables, *on))
        allowed = np.array([self._periods_allowed(storages, g) for g in (False, True)])
        fits = np.ones((len(self.sizes), 1, len(storages), len(uses)), dtype=bool)
        if self.is_recipe and self.limits.constraints.zero is not None:
            specs = list(dict.fromkeys(s.spec for s in storages))
            place = [specs.index(s.spec) for s in storages]
            on_mesh = (self._fit_recipe(tables.tensors[0], specs, uses, n) for n in self.sizes)
            fits[:, 0] = [of_specs[place] for of_specs in on_mesh]
        at = np.array([distinct[row] for row in rows])
        periods = np.array([PERIODS.index(s.period) for s in storages])
        tensor = tables.tensors[0]
        stored = self._local_bytes(tensor, [s.spec for s in storages])
        stored *= self.static.gradient_bytes / tensor.itemsize * self.counted[:, None]
        is_cast, gradient = _kept_per_byte(tensor)
        time_s, tie, size_bytes = conversion_costs(
            paths, self.cases.mesh_of, self.cases.n_microbatches, at, periods, allowed & fits,
            self._local_bytes(tensor, uses), stored, is_cast, gradient * self.counted,
            self.hiding.sync_price, self.hiding.blocks_price, use,
        )  # fmt: skip

        def hidable(case: int) -> Hidable:
            of_case = paths[self.cases.mesh_of[case], at, :, :6]
            return Hidable(*hidable_costs(of_case, self.cases.counts[case], periods, use))

        return time_s, tie, size_bytes, hidable

    def _periods_allowed(self, storages: Sequence[Storage], gathers: bool) -> BoolArray:
        """[storages, 1]: may a parameter be converted with the storage's period?"""
        may = partial(self.limits.period_allowed, gathers=gathers, is_recipe=self.is_recipe)
        return np.array([[may(s.period)] for s in storages], dtype=bool)


class Uses(NamedTuple):
    """The uses of a parameter that are placed alike; `n_again` are gathered again for backward.

    `stays`: one of them stays gathered. The rest is as in `Gathering`.
    """

    n: int
    n_again: int
    fused_bytes: int
    first_share: float
    again_share: float
    last_share: float
    micro_share: float
    stays: bool


@dataclass(frozen=True, eq=False)
class Storages:
    """The storages of a parameter on all meshes; `legal` is [cases, storages]."""

    every: tuple[Storage, ...]
    legal: BoolArray


def _spare_cell(tensor: TensorType, sizes: tuple[int, ...]) -> tuple[int, int] | None:
    """The first factor that all axes together divide; else that one axis divides, largest first.

    Leading factors come first, because their shards are contiguous.
    """
    ordered = sorted(tensor.cells, key=lambda c: (c[1], c[0]))
    for wanted in (math.prod(sizes), *sorted((n for n in sizes if n > 1), reverse=True)):
        for dim, factor in ordered:
            if tensor.dims[dim][factor] % wanted == 0:
                return dim, factor
    return None


@lru_cache(maxsize=1024)
def _storage_specs(
    tensor: TensorType, cells: tuple[tuple[int, int], ...], sizes: tuple[int, ...]
) -> tuple[Spec, ...]:
    """Invariant or sharded along one of `cells` on each axis, in every order of axes."""
    options = [(I,) if n == 1 else (I, *(S(*c) for c in cells)) for n in sizes]
    return tuple(
        spec
        for placements in itertools.product(*options)
        if divides(tensor, placements, sizes)
        for spec in every_order(placements)
    )


def _kept_per_byte(tensor: TensorType) -> tuple[float, float]:
    """Bytes kept for a step per byte in use: a copy that no move makes; the gradient of a use."""
    gradient = tensor.gradient_bytes(tensor.itemsize) / tensor.itemsize
    return float(tensor.stored_itemsize > 0), gradient if tensor.has_grad else 0.0


@compiled
def _conversion_s(
    of: Array, n_microbatches: int, period: int, use: Uses
) -> tuple[float, float, float]:
    """Seconds of a step in one conversion: waited for; beside compute once a step, and otherwise.

    `of` is a row of `path_costs`, `period` an index of `PERIODS`. Gathers of several moves do not
    begin early (`program/communication/order.py`), and what returns in later rounds is waited for.
    """
    gathered_s, first_s, later_s = of[0], of[1] - of[5], of[5]
    fused_s, reduced_s, moves = of[2], of[3], of[4]
    if period == 2:
        gathers_s = (use.n + use.n_again) * fused_s
        waited_s = (use.first_share + use.again_share * use.n_again) * fused_s
        once_s = use.first_share * reduced_s + (gathers_s if moves > 1 else waited_s)
        every_s = gathers_s + use.n * reduced_s
        return n_microbatches * once_s, 0.0, n_microbatches * (every_s - once_s)
    if period == 1:
        last_s = use.micro_share * first_s
        waited_s = gathered_s + n_microbatches * (later_s + last_s)
        return waited_s, 0.0, n_microbatches * (first_s - last_s)
    waited_s = gathered_s + later_s + use.last_share * first_s
    return waited_s, (1 - use.last_share) * first_s, 0.0


@compiled
def conversion_costs(
    sums: Array, mesh_of: Indices, n_microbatches: Array, rows: Indices, periods: Indices,
    allowed: BoolArray, use_bytes: Array, stored_bytes: Array, cast: float,
    gradient: Array, sync_price: float, blocks_price: float, use: Uses,
) -> tuple[Array, Ties, Array]:  # fmt: skip
    """`ParameterMaker.conversions`, from sums over paths (`path_costs`): [cases, storages, uses].

    `rows` [storages] are places in the sums, `periods` [storages] are indices of `PERIODS`,
    `allowed` [meshes, 2, storages, uses] is without and with a gather, `use_bytes` [cases, uses].
    `cast` is 1 if the parameter is cast for use, `gradient` [cases] the bytes of its gradient per
    byte. A gradient that returns once a step stays as its use makes it; `stored_bytes` [cases,
    storages] of the stored one come when nothing else is live. A hidden second costs a price
    (`hiding.py`).
    """
    shape = (len(mesh_of), len(rows), sums.shape[2])
    time_s, size_bytes = np.empty(shape), np.empty(shape)
    tie = np.empty(shape, dtype=np.float32)
    for case in range(shape[0]):
        m = n_microbatches[case]
        for i in range(shape[1]):
            for j in range(shape[2]):
                of = sums[mesh_of[case], rows[i], j]
                moves, calls, copies, gathers, exists = of[4], of[6], of[7], of[8], of[9]
                calls += 1e-3 * moves
                copied = 1.0 if copies > 0 else cast
                moved = gradient[case] if moves > 0 else 0.0
                if periods[i] == 0:
                    times, n_kept = 0.01, copied + moved
                elif periods[i] == 1:
                    times, n_kept = m, copied
                else:
                    times, n_kept = m, 1.0 if use.stays else 0.0
                may = exists > 0 and allowed[mesh_of[case], int(gathers > 0), i, j]
                waited_s, sync_s, blocks_s = _conversion_s(of, m, periods[i], use)
                seconds = waited_s + sync_price * sync_s + blocks_price * blocks_s
                time_s[case, i, j] = seconds if may else np.inf
                tie[case, i, j] = calls * times
                size_bytes[case, i, j] = use_bytes[case, j] * n_kept
                if periods[i] == 0 and moved > 0:
                    size_bytes[case, i, j] -= min(stored_bytes[case, i], use_bytes[case, j] * moved)
    return time_s, tie, size_bytes


@compiled
def hidable_costs(
    paths: Array, n_microbatches: int, periods: Indices, use: Uses
) -> tuple[Array, Array]:
    """What compute may hide in one case, [storages, uses]: once a step, and all other seconds.

    `paths` are the first 6 of `path_costs` in the case, [storages, uses, 6]; the rest as in
    `conversion_costs`.
    """
    sync_s, blocks_s = np.empty(paths.shape[:2]), np.empty(paths.shape[:2])
    for i in range(paths.shape[0]):
        for j in range(paths.shape[1]):
            _, sync_s[i, j], blocks_s[i, j] = _conversion_s(
                paths[i, j], n_microbatches, periods[i], use
            )
    return sync_s, blocks_s


def path_costs(
    tables: ReshardTables, costs: tuple[CostModel, ...], sources: tuple[int, ...],
    targets: tuple[int, ...], fused_bytes: int,
) -> Array:  # fmt: skip
    """Sums over the cheapest paths of a parameter's type: [meshes, sources, targets, 10].

    The 10 are seconds forward and backward in buckets, the same where `fused_bytes` are the most
    that is moved at once; moves; of the seconds backward in buckets those after the first
    collective; then collectives, copies, gathers; the last is 1 if there is a path.
    """
    graph, size_bytes, gradient_bytes = tables.graph, tables.size_bytes, tables.gradient_bytes
    calls, kinds = graph.calls, np.array([p.kind for p in graph.primitives])
    # all_reduce counts as a gather: the sum of a shard and zeros elsewhere is the whole.
    copies, gathers = kinds != "identity", np.isin(kinds, ("all_gather", "all_reduce"))
    forward, backward = graph.forward, graph.backward
    lines = primitive_lines(graph, costs)
    once, often = math.inf, float(max(fused_bytes, 1))
    n_meshes, n_moves = len(costs), len(forward)
    on_all = [
        np.ones(n_moves),
        calls[forward] + calls[backward],
        copies[forward].astype(float),
        gathers[forward].astype(float),
    ]
    values = np.stack(
        [
            lines.bucket_times_s(size_bytes, once)[:, forward],
            lines.bucket_times_s(gradient_bytes, once)[:, backward],
            lines.bucket_times_s(size_bytes, often)[:, forward],
            lines.bucket_times_s(gradient_bytes, often)[:, backward],
            *(np.broadcast_to(value, (n_meshes, n_moves)) for value in on_all),
        ],
        axis=1,
    )
    time_s, _ = tables.between(sources, targets)
    sums = tables.path_sums(sources, targets, values)
    first_s = tables.last_path_values(sources, targets, values[:, 1] * calls[backward])
    later_s = np.where(first_s > 0, sums[:, 1] - first_s, 0.0)[:, None]
    exists = np.isfinite(time_s)[:, None]
    every = np.concatenate((sums[:, :5], later_s, sums[:, 5:], exists), axis=1)
    return np.ascontiguousarray(np.moveaxis(every, 1, -1))
