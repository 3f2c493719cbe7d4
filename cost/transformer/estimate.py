"""A training step of a transformer under a recipe: seconds by simulation, bytes by formulas.

    forward    its items                                       per microbatch and chunk
    backward   the items in reverse, with the forward of recomputed items
    sync       gradients over data parallelism, beside the last backward or after it
    update     clipping and zeroing of gradients, then the optimizer, on what a rank stores

ZeRO-3 gathers a layer's parameters before its forward and again before its backward, and
reduce_scatters its gradients after it, beside the compute of the neighbouring layers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch

from autopar.cost.hardware import (
    Hardware,
    LinkGroup,
    Profile,
    ProfiledDevice,
    Software,
    group_on,
    link_hardware,
    share_under_matmul,
)
from autopar.cost.laws import collective_time_s, op_time_s
from autopar.cost.memory import Footprint, Setting, footprint, update_time_s
from autopar.cost.simulate import PartWork, StageTimes, TieTimes, Timeline, simulate
from autopar.cost.transformer.chunks import Chunk, chunks_of, parameters_of, stranded_bytes
from autopar.cost.transformer.layer import LayerModel
from autopar.cost.transformer.memory import (
    MemoryRank,
    device_peaks,
    precision_of,
    rerun_share,
)
from autopar.cost.transformer.recipe import Group, Recipe
from autopar.cost.transformer.shape import TransformerShape
from autopar.cost.transformer.work import Exchange, Item, Kernel
from autopar.errors import NotSupportedError
from autopar.mesh import LogicalMesh, Nodes
from autopar.schedule import Action

# Of a layer, without experts. Smaller tensors stay whole (DeepSpeed's documents of ZeRO-3:
# stage3_param_persistence_threshold, 1e5 elements).
_N_MATRICES = 4


@dataclass(frozen=True)
class StepModel:
    """The parts of a step, priced on a machine: what a device reaches under the layers' software,
    and the links (between nodes, inside) of nodes of so many devices."""

    layer: LayerModel
    hardware: Hardware
    devices_per_node: int

    @staticmethod
    def of(
        shape: TransformerShape, recipe: Recipe, software: Software, profile: Profile,
        dtype: torch.dtype, devices_per_node: int,
    ) -> StepModel:  # fmt: skip
        """A step of a model under a software on nodes of this profile's devices."""
        profile = software.apply_to(profile)
        links = (profile.link("inter_node"), profile.link("intra_node"))
        layer = LayerModel(shape, recipe, software, dtype.itemsize)
        return StepModel(layer, link_hardware(profile, links, dtype), devices_per_node)

    @property
    def device(self) -> ProfiledDevice:
        assert isinstance(self.hardware.device, ProfiledDevice), "as `link_hardware` makes it"
        return self.hardware.device

    @property
    def host_s(self) -> float:
        return 0.0 if self.layer.software.cuda_graphs else self.device.host_s

    @cached_property
    def chunks(self) -> tuple[Chunk, ...]:
        shape = self.layer.shape
        return chunks_of(shape.layers, self.layer.recipe.n_chunks, shape.dense_layers)

    def group(self, name: Group) -> LinkGroup:
        """The slowest of the recipe's groups of this name, as they lie on nodes."""
        sizes, (across, inside) = self.layer.recipe.group(name), self.hardware.links
        nodes = Nodes(self.devices_per_node, inside, across)
        mesh = LogicalMesh(sizes, (name, "beside"), (across,) * 2, self.device, nodes=nodes)
        return group_on(mesh, (0,))

    def exchange_s(self, kind: str, size_bytes: float, group: Group) -> float:
        """Seconds of one collective among a group's ranks."""
        if kind == "dispatch":
            return self._dispatch_s(size_bytes, self.group(group))
        return collective_time_s(kind, size_bytes, self.group(group)) if size_bytes else 0.0

    def gather_s(self, kind: str, size_bytes: float, group: Group) -> float:
        """Seconds of ZeRO-3's all_gather or reduce_scatter. Between nodes NCCL has rings alone, but
        for one rank a node since 2.23, so their latency grows with the ranks.

        DeepSpeed hands torch a list of shards, one per rank, and each is copied by a kernel of its
        own (deepspeed/runtime/zero/partition_parameters.py; torch, ProcessGroupNCCL.cpp).
        """
        on = self.group(group)
        algorithm = None if on.n_nodes == 1 else "ring"
        time_s = collective_time_s(kind, size_bytes, on, algorithm=algorithm)
        if self.layer.software.gathers_by_layer:
            return time_s
        return time_s + on.n_ranks * self.host_s + 2 * size_bytes / self.device.bytes_per_s

    def _dispatch_s(self, size_bytes: float, group: LinkGroup) -> float:
        """Seconds to send rows to the ranks of their experts: k copies of a token to k experts.

        With a thrifty dispatch, a token crosses to each node once. If its experts are equally
        likely to be anywhere, it reaches N (1 - (1 - 1/N)^k) of N nodes on average. Inside nodes it
        goes once to each rank by the same law, while further tokens arrive.
        """
        experts, software = self.layer.shape.experts, self.layer.software
        if experts is None or not software.thrifty_dispatch or group.n_ranks == 1:
            return collective_time_s("all_to_all", size_bytes, group)
        k, n_ranks, n_nodes = experts.chosen, group.n_ranks, group.n_nodes
        token_bytes = size_bytes / k
        across = (n_nodes - 1) * _share_reached(n_nodes, k)
        inside = n_ranks * _share_reached(n_ranks, k) * (1 - 1 / group.per_node)
        inside_s = token_bytes * inside * group.inside.s_per_byte
        latency_s = group.per_node * group.inside.latency_s
        if n_nodes == 1:
            return latency_s + inside_s
        across_s = token_bytes * across * group.across.s_per_byte
        return latency_s + n_nodes * group.across.latency_s + max(across_s, inside_s)

    def message_s(self, source: int, target: int) -> float:
        """Seconds of an activation, or its gradient, between two stages; 0.0 within a device."""
        recipe, n_inside = self.layer.recipe, self.layer.recipe.ranks_per_stage
        ends = (source % recipe.pp, target % recipe.pp)
        if ends[0] == ends[1]:
            return 0.0
        first, second = (end * n_inside // self.devices_per_node for end in ends)
        link, size = self.hardware.links[-1 if first == second else 0], self.layer.input_bytes
        if recipe.sp or not self.layer.software.split_messages:
            return link.message_s(size)
        return link.message_s(size / recipe.tp) + self.exchange_s("all_gather", size, "tp")

    def work(self, items: Iterable[tuple[Item, float]], *, is_backward: bool = False) -> PartWork:
        """Forward or backward of items, each so many times."""
        found = PartWork()
        for item, n in items:
            for step in item.backward if is_backward else item.forward:
                found += self._step_work(step, is_backward).times(n)
        return found

    def _step_work(self, step: Kernel | Exchange, is_backward: bool) -> PartWork:
        device = self.device
        if isinstance(step, Kernel):
            flops = step.flops / (self._float8_ratio if step.in_float8 else 1.0)
            time_s = op_time_s(
                flops, step.size_bytes, device, self.hardware.dtype, step.kind,
                is_backward=is_backward,
            ) + (step.n_launches - 1) * device.launch_s  # fmt: skip
            return PartWork(time_s, host_s=step.n_launches * self.host_s)
        time_s = self.exchange_s(step.kind, step.size_bytes, step.group)
        hidden_s = self._hidden_share(step) * time_s
        return PartWork(0.0, time_s - hidden_s, hidden_s, self.host_s)

    @property
    def _float8_ratio(self) -> float:
        if self.device.float8_rate_ratio is None:
            name = self.hardware.profile_name
            raise NotSupportedError(f"hardware profile {name!r} has no rate of float8 matmuls")
        return self.device.float8_rate_ratio

    def _hidden_share(self, step: Exchange) -> float:
        """The share of a collective that runs beside compute."""
        software = self.layer.software
        if step.group == "tp" and software.overlapped_tp:
            return share_under_matmul(step.kind, self.layer.recipe.tp)
        return float(step.group == "ep" and software.overlapped_experts)

    def passes(self, chunk: Chunk) -> tuple[PartWork, PartWork]:
        """Forward and backward of one microbatch in a chunk, without ZeRO-3's collectives."""
        work, items = self.work, list(chunk.items(self.layer))
        stops = self.layer.software.stops_recompute
        again = [
            (item, n * share)
            for item, n in items
            if (share := rerun_share(item, self.layer)) and not (stops and item.is_last)
        ]
        return work(items), work(items, is_backward=True) + work(again)

    @cached_property
    def _passes(self) -> dict[Chunk, tuple[PartWork, PartWork]]:
        """The passes of all chunks, most of which are equal."""
        return {chunk: self.passes(chunk) for chunk in set(self.chunks)}

    def _gathering(self, chunk: Chunk) -> tuple[PartWork, PartWork]:
        """ZeRO-3's collectives of a microbatch's forward and backward, beside compute or not."""
        software, width = self.layer.software, self.layer.width
        calls = max(chunk.n_layers, 1) * (1 if software.gathers_by_layer else _N_MATRICES)
        # Gradients are reduced at the width of the parameters in use.
        gather_s, scatter_s = (
            sum(
                calls * self.gather_s(kind, n * width / calls, group)
                for group, n in parameters_of(self.layer, chunk).items()
            )
            for kind in ("all_gather", "reduce_scatter")
        )
        where = "overlapped_s" if software.overlapped_gathers else "collectives_s"
        return PartWork(**{where: gather_s}), PartWork(**{where: gather_s + scatter_s})

    def sync_s(self, chunk: Chunk) -> tuple[float, float]:
        """Seconds over data parallelism, once a step: (gradient sync, gather of new parameters)."""
        layer, exchange_s = self.layer, self.exchange_s
        reduced = gathered = 0.0
        for group, n in parameters_of(layer, chunk).items():
            if layer.recipe.zero == 0:
                reduced += exchange_s("all_reduce", n * layer.gradient_width, group)
            elif layer.recipe.zero < 3:
                reduced += exchange_s("reduce_scatter", n * layer.gradient_width, group)
                gathered += exchange_s("all_gather", n * layer.width, group)
        return reduced, gathered

    def _update_s(self, chunk: Chunk) -> float:
        software, held = self.layer.software, parameters_of(self.layer, chunk)
        n_stored = sum(n / self.layer.recipe.shards(group) for group, n in held.items())
        dtype, policy = precision_of(software)
        return update_time_s(n_stored, "adamw", dtype, self.device, software, policy)

    def stage_times(self, stage: int) -> StageTimes:
        recipe, software, chunk = self.layer.recipe, self.layer.software, self.chunks[stage]
        forward, backward = self._passes[chunk]
        if recipe.zero == 3:
            gathers, both = self._gathering(chunk)
            forward, backward = forward + gathers, backward + both
        if software.waits_for_messages:  # each compute includes one
            before, after = max(stage - 1, 0), min(stage + 1, recipe.n_chunks - 1)
            forward += PartWork(collectives_s=self.message_s(before, stage))
            backward += PartWork(collectives_s=self.message_s(after, stage))
        reduced, gathered = self.sync_s(chunk)
        sync_s = reduced if software.overlapped_sync else 0.0
        return StageTimes(
            n_ranks=recipe.ranks_per_stage,
            before=PartWork(),
            forward=forward,
            backward=backward.split() if recipe.splits_backward else backward,
            after=PartWork(collectives_s=gathered + reduced - sync_s),
            update_s=self._update_s(chunk),
            sync_s=sync_s,
            n_sync_buckets=max(chunk.n_layers, 1),
            overlap_slowdown_fraction=self.device.overlap_slowdown_fraction,
        )

    def ties(self) -> list[TieTimes]:
        layer, recipe = self.layer, self.layer.recipe
        if recipe.pp == 1 or not layer.shape.ties_head:
            return []
        size = layer.words * layer.shape.hidden * layer.gradient_width
        time_s = self.exchange_s("all_reduce", size, "ends")
        return [TieTimes((0, recipe.n_chunks - 1), time_s, (0.0, 0.0))]

    def simulate(self) -> Timeline:
        waits, between_s = self.layer.software.waits_for_messages, self.message_s

        def message_s(send: Action) -> float:
            return 0.0 if waits or send.peer is None else between_s(send.stage, send.peer)

        stages = [self.stage_times(stage) for stage in range(len(self.chunks))]
        return simulate(self.layer.recipe.script, stages, message_s, self.ties())

    def step_time_s(self) -> float:
        """Seconds from one step to the next.

        Under zero-bubble-2, devices end at different times and start the next step at once.
        """
        timeline, recipe = self.simulate(), self.layer.recipe
        is_open = recipe.order == "zero-bubble-2"
        time_s = timeline.longest_device_s if is_open else timeline.step_time_s
        return time_s * self.layer.software.slowest_of(recipe.n_ranks)

    def footprint(self, rank: MemoryRank = "fullest", setting: Setting = "default") -> Footprint:
        """Allocated, reserved and margin on a rank."""
        has_loss = rank == "last" or self.layer.recipe.pp == 1
        stranded = stranded_bytes(self.layer) if has_loss else 0.0
        return footprint(self.peak_bytes(rank), self.hardware, setting, stranded)

    def peak_bytes(self, rank: MemoryRank = "fullest") -> float:
        """Peak of allocated bytes on a rank."""
        recipe = self.layer.recipe
        peaks = list(device_peaks(self.layer, self.chunks, self.hardware))
        if rank == "fullest":
            return max(peaks)
        named = {"first": 0, "last": recipe.pp - 1}
        return peaks[named[rank] if isinstance(rank, str) else rank * recipe.pp // recipe.n_ranks]


def _share_reached(n_places: int, n_draws: int) -> float:
    """The expected share of places that at least one of `n_draws` uniform draws hits."""
    return 1.0 - (1.0 - 1.0 / n_places) ** n_draws
