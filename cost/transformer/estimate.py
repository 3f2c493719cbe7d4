"""A training step of a transformer under a recipe: seconds by simulation, bytes by formulas.

    forward    its items                                       per microbatch and chunk
    backward   the items in reverse, with the forward of recomputed items
    sync       gradients over data parallelism, beside the last backward or after it
    update     clipping and zeroing of gradients, then the optimizer, on what a rank stores

ZeRO-3 gathers a layer's parameters before its forward and again before its backward, and
reduce_scatters its gradients after it, beside the compute of the neighbouring layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from autopar.cost.hardware import Profile, Software, link_hardware
from autopar.cost.memory import Footprint, Setting, footprint, optimizer_time_s
from autopar.cost.simulate import PartWork, StageTimes, TieTimes, Timeline, simulate
from autopar.cost.transformer.chunks import Chunk, chunks_of, parameters_of, stranded_bytes
from autopar.cost.transformer.layer import LayerModel
from autopar.cost.transformer.machine import TransformerMachine
from autopar.cost.transformer.memory import (
    MemoryRank,
    device_peaks,
    precision_of,
    rerun_share,
)
from autopar.cost.transformer.recipe import Recipe
from autopar.cost.transformer.shape import TransformerShape
from autopar.schedule import Action

# Of a layer, without experts. Smaller tensors stay whole (DeepSpeed's documents of ZeRO-3:
# stage3_param_persistence_threshold, 1e5 elements).
_N_MATRICES = 4
# Per parameter: clipping reads gradients for their norm, reads and writes them to scale them; then
# they are set to zero.
_BYTES_AROUND_UPDATE = 4 + 8 + 4


@dataclass(frozen=True)
class StepModel:
    """The parts of a step, priced on a machine."""

    layer: LayerModel
    machine: TransformerMachine

    @staticmethod
    def of(
        shape: TransformerShape, recipe: Recipe, software: Software, profile: Profile,
        dtype: torch.dtype, devices_per_node: int,
    ) -> StepModel:  # fmt: skip
        """A step of a model under a software on nodes of this profile's devices."""
        profile = software.apply_to(profile)
        links = (profile.link("inter_node"), profile.link("intra_node"))
        layer = LayerModel(shape, recipe, software, dtype.itemsize)
        hardware = link_hardware(profile, links, dtype)
        return StepModel(layer, TransformerMachine(layer, hardware, devices_per_node))

    @cached_property
    def chunks(self) -> tuple[Chunk, ...]:
        shape = self.layer.shape
        return chunks_of(shape.layers, self.layer.recipe.n_chunks, shape.dense_layers)

    def passes(self, chunk: Chunk) -> tuple[PartWork, PartWork]:
        """Forward and backward of one microbatch in a chunk, without ZeRO-3's collectives."""
        work, items = self.machine.work, list(chunk.items(self.layer))
        again = [(item, n * share) for item, n in items if (share := rerun_share(item, self.layer))]
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
                calls * self.machine.gather_s(kind, n * width / calls, group)
                for group, n in parameters_of(self.layer, chunk).items()
            )
            for kind in ("all_gather", "reduce_scatter")
        )
        where = "overlapped_s" if software.overlapped_gathers else "collectives_s"
        return PartWork(**{where: gather_s}), PartWork(**{where: gather_s + scatter_s})

    def sync_s(self, chunk: Chunk) -> tuple[float, float]:
        """Seconds over data parallelism, once a step: (gradient sync, gather of new parameters)."""
        layer, exchange_s = self.layer, self.machine.exchange_s
        reduced = gathered = 0.0
        for group, n in parameters_of(layer, chunk).items():
            if layer.recipe.zero == 0:
                reduced += exchange_s("all_reduce", n * layer.gradient_width, group)
            elif layer.recipe.zero < 3:
                reduced += exchange_s("reduce_scatter", n * layer.gradient_width, group)
                gathered += exchange_s("all_gather", n * layer.width, group)
        return reduced, gathered

    def _update_s(self, chunk: Chunk) -> float:
        software, recipe, device = self.layer.software, self.layer.recipe, self.machine.device
        held = parameters_of(self.layer, chunk)
        n_stored = sum(n / recipe.shards(group) for group, n in held.items())
        rule = "fused-adamw" if software.fused_optimizer else "adamw"
        dtype, policy = precision_of(software)
        around_s = n_stored * _BYTES_AROUND_UPDATE / device.bytes_per_s
        return around_s + optimizer_time_s(n_stored, rule, dtype, device, policy)

    def stage_times(self, stage: int) -> StageTimes:
        recipe, software, chunk = self.layer.recipe, self.layer.software, self.chunks[stage]
        forward, backward = self._passes[chunk]
        if recipe.zero == 3:
            gathers, both = self._gathering(chunk)
            forward, backward = forward + gathers, backward + both
        if software.waits_for_messages:  # each compute includes one
            before, after = max(stage - 1, 0), min(stage + 1, recipe.n_chunks - 1)
            forward += PartWork(collectives_s=self.machine.message_s(before, stage))
            backward += PartWork(collectives_s=self.machine.message_s(after, stage))
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
            overlap_slowdown_fraction=self.machine.device.overlap_slowdown_fraction,
        )

    def ties(self) -> list[TieTimes]:
        layer, recipe = self.layer, self.layer.recipe
        if recipe.pp == 1 or not layer.shape.ties_head:
            return []
        size = layer.words * layer.shape.hidden * layer.gradient_width
        time_s = self.machine.exchange_s("all_reduce", size, "ends")
        return [TieTimes((0, recipe.n_chunks - 1), time_s, (0.0, 0.0))]

    def simulate(self) -> Timeline:
        waits, between_s = self.layer.software.waits_for_messages, self.machine.message_s

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
        return footprint(self.peak_bytes(rank), self.machine.hardware, setting, stranded)

    def peak_bytes(self, rank: MemoryRank = "fullest") -> float:
        """Peak of allocated bytes on a rank."""
        recipe = self.layer.recipe
        peaks = list(device_peaks(self.layer, self.chunks, self.machine.hardware))
        if rank == "fullest":
            return max(peaks)
        named = {"first": 0, "last": recipe.pp - 1}
        return peaks[named[rank] if isinstance(rank, str) else rank * recipe.pp // recipe.n_ranks]
