"""A training step of a transformer under a recipe: seconds by simulation, bytes by formulas.

    forward    its items                                       per microbatch and chunk
    backward   the items in reverse, with the forward of recomputed items
    sync       gradients over data parallelism, beside the last backward or after it
    update     clipping and zeroing of gradients, then the optimizer, on what a rank stores

ZeRO-3 gathers a layer's parameters before its forward and again before its backward, and
reduce_scatters its gradients after it, beside the compute of the neighbouring layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from autopar.cost.hardware import Profile, Software, link_hardware
from autopar.cost.memory import Footprint, Setting, footprint, optimizer_time_s
from autopar.cost.simulate import PartWork, SplitBackward, StageTimes, TieTimes, Timeline, simulate
from autopar.cost.transformer.chunks import Chunk, chunks_of, parameters_of
from autopar.cost.transformer.layer import LayerModel
from autopar.cost.transformer.machine import TransformerMachine
from autopar.cost.transformer.memory import (
    MemoryRank,
    device_peaks,
    is_recomputed,
    precision_of,
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
        hardware = link_hardware(profile, links, dtype)
        n_chosen = shape.experts.chosen if shape.experts and software.thrifty_dispatch else 0
        return StepModel(
            LayerModel(shape, recipe, software, dtype.itemsize),
            TransformerMachine(hardware, devices_per_node, recipe, dtype, n_chosen, software),
        )

    @cached_property
    def chunks(self) -> tuple[Chunk, ...]:
        shape = self.layer.shape
        return chunks_of(shape.layers, self.layer.recipe.n_chunks, shape.dense_layers)

    @cached_property
    def _layer_passes(self) -> dict[LayerModel, tuple[PartWork, PartWork]]:
        """Forward and backward of one layer, by kind."""
        machine, found = self.machine, {}
        for kind in dict.fromkeys((self.layer, self.layer.dense)):
            items = kind.items()
            again = [item for item in items if is_recomputed(item, kind.recipe)]
            backward = machine.backward(items) + machine.forward(again)
            found[kind] = machine.forward(items), backward
        return found

    def passes(self, chunk: Chunk) -> tuple[PartWork, PartWork]:
        """Forward and backward of one microbatch in a chunk."""
        ends = chunk.ends(self.layer)
        forward, backward = self.machine.forward(ends), self.machine.backward(ends)
        for kind, n in chunk.kinds(self.layer):
            there, back = self._layer_passes[kind]
            forward, backward = forward + there.times(n), backward + back.times(n)
        return forward, backward

    def _parameters(self, chunk: Chunk) -> Iterator[tuple[float, str]]:
        """Parameters of a chunk, and the group over which each of them is copied or sharded."""
        return zip(parameters_of(self.layer, chunk), ("dp", "expert_dp"), strict=True)

    def _gathering(self, chunk: Chunk) -> tuple[PartWork, PartWork]:
        """ZeRO-3's collectives of a microbatch's forward and backward, beside compute or not."""
        software, width = self.layer.software, self.layer.width
        calls = max(chunk.n_layers, 1) * (1 if software.gathers_by_layer else _N_MATRICES)
        # Gradients are reduced at the width of the parameters in use.
        gather_s, scatter_s = (
            sum(
                calls * self.machine.gather_s(kind, n * width / calls, group)
                for n, group in self._parameters(chunk)
            )
            for kind in ("all_gather", "reduce_scatter")
        )
        where = "overlapped_s" if software.overlapped_gathers else "collectives_s"
        return PartWork(**{where: gather_s}), PartWork(**{where: gather_s + scatter_s})

    def sync_s(self, chunk: Chunk) -> tuple[float, float]:
        """Seconds over data parallelism, once a step: (gradient sync, gather of new parameters)."""
        layer, exchange_s = self.layer, self.machine.exchange_s
        reduced = gathered = 0.0
        for n, group in self._parameters(chunk):
            if layer.recipe.zero == 0:
                reduced += exchange_s("all_reduce", n * layer.gradient_width, group)
            elif layer.recipe.zero < 3:
                reduced += exchange_s("reduce_scatter", n * layer.gradient_width, group)
                gathered += exchange_s("all_gather", n * layer.width, group)
        return reduced, gathered

    def _update_s(self, chunk: Chunk) -> float:
        software, recipe, device = self.layer.software, self.layer.recipe, self.machine.device
        n_stored = sum(
            n / (self.machine.group(group).n_ranks if recipe.zero else 1)
            for n, group in self._parameters(chunk)
        )
        rule = "fused-adamw" if software.fused_optimizer else "adamw"
        dtype, policy = precision_of(software)
        around_s = n_stored * _BYTES_AROUND_UPDATE / device.bytes_per_s
        return around_s + optimizer_time_s(n_stored, rule, dtype, device, policy)

    def stage_times(self, chunk: Chunk) -> StageTimes:
        recipe = self.layer.recipe
        forward, backward = self.passes(chunk)
        if recipe.zero == 3:
            gathers, both = self._gathering(chunk)
            forward, backward = forward + gathers, backward + both
        reduced, gathered = self.sync_s(chunk)
        overlaps = self.layer.software.overlapped_sync
        return StageTimes(
            n_ranks=recipe.ranks_per_stage,
            before=PartWork(),
            forward=forward,
            backward=backward.split() if recipe.splits_backward else backward,
            after=PartWork(0.0, gathered + (0.0 if overlaps else reduced)),
            update_s=self._update_s(chunk),
            sync_s=reduced if overlaps else 0.0,
            n_sync_buckets=max(chunk.n_layers, 1),
            overlap_slowdown_fraction=self.machine.slowdown,
        )

    def hop_s(self, source: int, target: int) -> float:
        """Seconds of an activation, or its gradient, between two stages; 0.0 within a device."""
        layer, recipe, machine = self.layer, self.layer.recipe, self.machine
        ends = source % recipe.pp, target % recipe.pp
        if ends[0] == ends[1]:
            return 0.0
        size = layer.input_bytes
        if recipe.sp or recipe.tp == 1 or not layer.software.split_messages:
            return machine.hop_s(size, *ends)
        return machine.hop_s(size / recipe.tp, *ends) + machine.exchange_s("all_gather", size, "tp")

    def ties(self) -> list[TieTimes]:
        layer, recipe = self.layer, self.layer.recipe
        if recipe.pp == 1 or not layer.shape.is_tied:
            return []
        size = layer.shape.embedding_parameters / recipe.tp * layer.gradient_width
        time_s = self.machine.exchange_s("all_reduce", size, "ends")
        return [TieTimes((0, recipe.n_chunks - 1), time_s, (0.0, 0.0))]

    def simulate(self) -> Timeline:
        stages = [self.stage_times(chunk) for chunk in self.chunks]
        waits = self.layer.software.waits_for_messages
        if waits:
            stages = [self._with_messages(i, stage) for i, stage in enumerate(stages)]

        def message_s(send: Action) -> float:
            return 0.0 if waits or send.peer is None else self.hop_s(send.stage, send.peer)

        return simulate(self.layer.recipe.script, stages, message_s, self.ties())

    def _with_messages(self, stage: int, times: StageTimes) -> StageTimes:
        """Times of a stage that waits for messages: each compute includes one message."""
        last = self.layer.recipe.n_chunks - 1
        before = PartWork(0.0, self.hop_s(max(stage - 1, 0), stage))
        after = PartWork(0.0, self.hop_s(min(stage + 1, last), stage))
        backward = times.backward
        if isinstance(backward, SplitBackward):
            backward = replace(backward, input=backward.input + after)
        else:
            backward = backward + after
        return replace(times, forward=times.forward + before, backward=backward)

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
        return footprint(self.peak_bytes(rank), self.machine.hardware, setting)

    def peak_bytes(self, rank: MemoryRank = "fullest") -> float:
        """Peak of allocated bytes on a rank."""
        recipe = self.layer.recipe
        peaks = list(device_peaks(self.layer, self.chunks, self.machine.hardware))
        if rank == "fullest":
            return max(peaks)
        named = {"first": 0, "last": recipe.pp - 1}
        return peaks[named[rank] if isinstance(rank, str) else rank * recipe.pp // recipe.n_ranks]
