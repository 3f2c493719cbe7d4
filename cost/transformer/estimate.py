"""A training step of a transformer under a recipe: seconds by simulation, bytes by formulas.

    forward    its items                                       per microbatch and chunk
    backward   the items in reverse, with the forward of recomputed items
    sync       gradients over data parallelism, beside the last backward or after it
    update     the optimizer, on the parameters that a rank stores

ZeRO-3 gathers a layer's parameters before its forward and again before its backward, and
reduce_scatters its gradients after it, beside the compute of the neighbouring layers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from autopar.cost.hardware import Software
from autopar.cost.memory import Footprint, Setting, footprint
from autopar.cost.simulate import PartWork, SplitBackward, StageTimes, TieTimes, Timeline, simulate
from autopar.cost.transformer.chunks import Chunk, chunks_of, parameters_of
from autopar.cost.transformer.ends import embedding_items, head_items
from autopar.cost.transformer.layer import LayerModel
from autopar.cost.transformer.machine import Spending, TransformerMachine
from autopar.cost.transformer.memory import MemoryRank, device_peaks, is_recomputed
from autopar.cost.transformer.orders import schedule_of, script_of_recipe
from autopar.cost.transformer.state import update_time_s
from autopar.cost.transformer.work import Item
from autopar.schedule import Action

# Of a layer, without experts. Smaller tensors stay whole (DeepSpeed's documents of ZeRO-3:
# stage3_param_persistence_threshold, 1e5 elements).
_N_MATRICES = 4


@dataclass(frozen=True)
class StepModel:
    """The parts of a step, priced on a machine."""

    layer: LayerModel
    machine: TransformerMachine

    @cached_property
    def chunks(self) -> tuple[Chunk, ...]:
        return chunks_of(self.layer.shape.layers, self.layer.recipe.n_chunks)

    @cached_property
    def _layer_passes(self) -> tuple[Spending, Spending]:
        items = self.layer.items()
        return self.machine.forward(items), self._backward(items)

    def _backward(self, items: list[Item]) -> Spending:
        again = [i for i in items if is_recomputed(i, self.layer.recipe)]
        return self.machine.backward(items) + self.machine.forward(again)

    def passes(self, chunk: Chunk) -> tuple[Spending, Spending]:
        """Forward and backward of one microbatch in a chunk."""
        forward, backward = (s.times(chunk.n_layers) for s in self._layer_passes)
        ends = [
            *(embedding_items(self.layer) if chunk.is_first else ()),
            *(head_items(self.layer) if chunk.is_last else ()),
        ]
        return forward + self.machine.forward(ends), backward + self.machine.backward(ends)

    def _chunk_gathers_s(self, chunk: Chunk) -> tuple[float, float]:
        """ZeRO-3: seconds to gather a chunk's parameters once, and to reduce_scatter gradients."""
        width = self.layer.width
        gather_s = scatter_s = 0.0
        each_layer = 1 if self.layer.software.gathers_by_layer else _N_MATRICES
        calls = max(chunk.n_layers, 1) * each_layer
        # Gradients are reduced at the width of the parameters in use.
        for n, group in zip(parameters_of(self.layer, chunk), ("dp", "expert_dp"), strict=True):
            each = n * width / calls
            gather_s += calls * self.machine.gather_s("all_gather", each, group)
            scatter_s += calls * self.machine.gather_s("reduce_scatter", each, group)
        return gather_s, scatter_s

    def sync_s(self, chunk: Chunk) -> tuple[float, float]:
        """Seconds over data parallelism, once a step: (gradient sync, gather of new parameters)."""
        recipe, width = self.layer.recipe, self.layer.width
        gradient = 4 if self.layer.software.fp32_gradients else width
        reduced = gathered = 0.0
        for n, group in zip(parameters_of(self.layer, chunk), ("dp", "expert_dp"), strict=True):
            if recipe.zero == 0:
                reduced += self.machine.exchange_s("all_reduce", n * gradient, group)
            elif recipe.zero < 3:
                reduced += self.machine.exchange_s("reduce_scatter", n * gradient, group)
                gathered += self.machine.exchange_s("all_gather", n * width, group)
        return reduced, gathered

    def stage_times(self, chunk: Chunk) -> StageTimes:
        recipe, software, machine = self.layer.recipe, self.layer.software, self.machine
        forward, backward = self.passes(chunk)
        if recipe.zero == 3:
            gather_s, scatter_s = self._chunk_gathers_s(chunk)
            forward += _gathering(gather_s, software)
            backward += _gathering(gather_s + scatter_s, software)
        reduced, gathered = self.sync_s(chunk)
        overlaps = software.overlapped_sync
        spent = _spent(backward)
        n_stored = sum(
            n / (machine.group(group).n_ranks if recipe.zero else 1)
            for n, group in zip(parameters_of(self.layer, chunk), ("dp", "expert_dp"), strict=True)
        )
        return StageTimes(
            n_ranks=recipe.tp * recipe.cp * recipe.dp,
            before=PartWork(),
            forward=_spent(forward),
            backward=_split(spent) if recipe.splits_backward else spent,
            after=PartWork(0.0, gathered + (0.0 if overlaps else reduced)),
            update_s=update_time_s(n_stored, software, machine.device),
            sync_s=reduced if overlaps else 0.0,
            n_sync_buckets=max(chunk.n_layers, 1),
            overlap_slowdown_fraction=machine.slowdown,
        )

    def hop_s(self, source: int, target: int) -> float:
        """Seconds of an activation, or its gradient, between two stages; 0.0 within a device."""
        layer, recipe, machine = self.layer, self.layer.recipe, self.machine
        ends = source % recipe.pp, target % recipe.pp
        if ends[0] == ends[1]:
            return 0.0
        size = layer.outer_tokens * layer.shape.hidden * layer.width
        if recipe.sp or recipe.tp == 1 or not layer.software.split_messages:
            return machine.hop_s(size, *ends)
        return machine.hop_s(size / recipe.tp, *ends) + machine.exchange_s("all_gather", size, "tp")

    def ties(self) -> list[TieTimes]:
        shape, recipe = self.layer.shape, self.layer.recipe
        if recipe.pp == 1 or not shape.is_tied:
            return []
        width = 4 if self.layer.software.fp32_gradients else self.layer.width
        size = shape.embedding_parameters / recipe.tp * width
        time_s = self.machine.exchange_s("all_reduce", size, "ends")
        return [TieTimes((0, recipe.n_chunks - 1), time_s, (0.0, 0.0))]

    def simulate(self) -> Timeline:
        stages = [self.stage_times(chunk) for chunk in self.chunks]
        waits = self.layer.software.waits_for_messages
        if waits:
            stages = [self._with_messages(i, stage) for i, stage in enumerate(stages)]

        def message_s(send: Action) -> float:
            return 0.0 if waits or send.peer is None else self.hop_s(send.stage, send.peer)

        return simulate(script_of_recipe(self.layer.recipe), stages, message_s, self.ties())

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
        peaks = device_peaks(self.layer, self.chunks, schedule_of(recipe), self.machine)
        match rank:
            case "fullest":
                return max(peaks)
            case "first":
                return peaks[0]
            case "last":
                return peaks[-1]
            case _:
                return peaks[rank * recipe.pp // recipe.n_ranks]


def _gathering(time_s: float, software: Software) -> Spending:
    """ZeRO-3's collectives of a pass, beside its compute or waited for."""
    if software.overlapped_gathers:
        return Spending(beside_s=time_s)
    return Spending(comm_s=time_s)


def _spent(spending: Spending) -> PartWork:
    """The interpreter's delay counts as compute: it delays collectives as well."""
    return PartWork(spending.compute_s + spending.stalled_s, spending.comm_s, spending.beside_s)


def _split(whole: PartWork) -> SplitBackward:
    """Half of a backward's compute is for parameters: one matmul of each two."""
    weight = whole.compute_s / 2
    return SplitBackward(
        PartWork(whole.compute_s - weight, whole.collectives_s, whole.overlapped_s),
        PartWork(weight),
    )
