"""Bytes on a rank: state between steps, activations of microbatches, temporaries of a backward.

A rank holds at the same time

    static      parameters, gradients, optimizer state (`state.py`), divided by tensor parallelism
                and ZeRO
    kept        for every layer and microbatch in flight: the kept bytes of its items, minus those
                that recompute makes again, plus the inputs of the recomputation
                (if backward has two parts, inputs and gradients of matmuls stay for the second)
    in between  what recompute makes again for one layer; what the loss makes; under ZeRO-3
                gathered parameters of two layers, and their gradients
    libraries   workspaces (`cost/memory/workspace.py`); with sequence parallelism the buffer into
                which activations are gathered
                                                                             (`device_peaks`)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from autopar.cost.memory import workspace_bytes
from autopar.cost.transformer.chunks import Chunk, parameters_of
from autopar.cost.transformer.ends import embedding_items, head_items, loss_bytes
from autopar.cost.transformer.layer import LayerModel
from autopar.cost.transformer.machine import TransformerMachine
from autopar.cost.transformer.recipe import Module, Recipe
from autopar.cost.transformer.state import static_bytes
from autopar.cost.transformer.work import Item
from autopar.schedule import Schedule

# Whose peak: a rank's by its number, or that of the first, last or fullest stage.
MemoryRank = int | Literal["fullest", "first", "last"]

_FEED_FORWARD = ("mlp up", "activation", "mlp down", "sort by expert", "sort back")


def is_recomputed(item: Item, recipe: Recipe) -> bool:
    """Whether backward runs an item's forward again."""
    match recipe.recompute:
        case "full":
            return True
        case "attention-core":
            return item.part == "core"
        case "selective":
            return item.part == "elementwise"
        case "modules":
            return any(_is_in(item, module) for module in recipe.recomputed)
        case _:
            return False


def _is_in(item: Item, module: Module) -> bool:
    match module:
        case "norm":
            return item.name.endswith("norm")
        case "activation":
            return item.name == "activation"
        case "core":
            return item.part == "core"
        case "feed-forward":
            return item.name in _FEED_FORWARD


@dataclass(frozen=True)
class KeptBytes:
    """Bytes of one layer and microbatch: kept until backward, and made again by recompute."""

    kept_bytes: float
    recomputed_bytes: float


def kept_of_layer(layer: LayerModel) -> KeptBytes:
    """What a layer keeps, and what recompute makes again while its backward runs."""
    items, recipe = layer.items(), layer.recipe
    every = sum(item.kept_bytes + item.out_bytes for item in items)
    if recipe.recompute == "full":
        return KeptBytes(layer.input_bytes(), every)
    again = sum(item.kept_bytes for item in items if is_recomputed(item, recipe))
    return KeptBytes(every - again, again)


def device_peaks(
    layer: LayerModel, chunks: Sequence[Chunk], schedule: Schedule, machine: TransformerMachine
) -> list[float]:
    """Peak bytes of each device of the pipeline, over the whole step."""
    kept = [_kept_bytes(layer, chunk) for chunk in chunks]
    for_weights = sum(item.weight_bytes for item in layer.items())
    peaks = []
    for device, row in enumerate(schedule.rows):
        held = [chunks[stage] for stage in schedule.stages_on(device)]
        static = sum(_static_bytes(layer, chunk) for chunk in held)
        now = most = 0.0
        for action in row:
            size = kept[action.stage]
            left = min(size, chunks[action.stage].n_layers * for_weights)
            match action.kind:
                case "forward":
                    now += size
                case "backward":
                    now -= size
                case "backward_input":
                    now -= size - left
                case "backward_weight":
                    now -= left
            most = max(most, now)
        between = max(_between_bytes(layer, chunk) for chunk in held)
        peaks.append(static + most + between + _library_bytes(layer, machine))
    return peaks


def _library_bytes(layer: LayerModel, machine: TransformerMachine) -> float:
    """Workspaces, and the buffer into which sequence parallelism gathers activations."""
    software, experts = layer.software, layer.shape.experts
    gathered = layer.tokens * layer.shape.hidden * layer.width if layer.recipe.sp else 0.0
    if not machine.hardware.is_gpu:
        return gathered
    return gathered + workspace_bytes(
        machine.hardware.profile_name,
        has_engine=software.transformer_engine,
        is_grouped=experts is not None and experts.is_grouped,
        is_wide=software.wide_workspace,
    )


def _kept_bytes(layer: LayerModel, chunk: Chunk) -> float:
    """What a chunk keeps of one microbatch."""
    ends = [
        *(embedding_items(layer) if chunk.is_first else ()),
        *(head_items(layer) if chunk.is_last else ()),
    ]
    return chunk.n_layers * kept_of_layer(layer).kept_bytes + sum(
        item.kept_bytes + item.out_bytes for item in ends
    )


def _static_bytes(layer: LayerModel, chunk: Chunk) -> float:
    """Parameters, gradients and optimizer state of a chunk on its fullest rank.

    Muon has one moment of a matrix. Its ZeRO deals whole tensors to ranks, of which one has all of
    the embedding; other parameters have AdamW's moments.
    """
    each, recipe, has_muon = static_bytes(layer.software), layer.recipe, layer.software.muon
    of_matrix = replace(each, moments_bytes=each.moments_bytes / 2) if has_muon else each
    ends, _ = parameters_of(layer, replace(chunk, n_layers=0))
    shared, experts = parameters_of(layer, chunk)
    n_data = recipe.dp * recipe.cp
    n_expert_data = n_data * recipe.tp // (recipe.ep * recipe.etp)
    n_copies = n_data // recipe.zero_shards if recipe.zero_shards else 1
    return (
        ends * each.under_zero(0 if has_muon else recipe.zero, n_data // n_copies)
        + (shared - ends) * of_matrix.under_zero(recipe.zero, n_data // n_copies)
        + experts * of_matrix.under_zero(recipe.zero, max(n_expert_data // n_copies, 1))
    )


def _deferred_bytes(layer: LayerModel) -> float:
    """Inputs of the head and gradients of the logits, of microbatches whose weight waits."""
    each = layer.shape.hidden + layer.shape.vocab / layer.recipe.tp
    n = min(layer.recipe.deferred, layer.recipe.n_microbatches)
    return n * layer.tokens * each * layer.width


def _between_bytes(layer: LayerModel, chunk: Chunk) -> float:
    """Bytes that a backward needs temporarily."""
    again = kept_of_layer(layer).recomputed_bytes if chunk.n_layers else 0.0
    if chunk.is_last:
        again = max(again, loss_bytes(layer)) + _deferred_bytes(layer)
    if layer.recipe.zero < 3:
        return again
    shared, experts = parameters_of(layer, Chunk(1, is_first=False, is_last=False))
    vocabulary = chunk.is_last * layer.shape.embedding_parameters / layer.recipe.tp
    # Two gathered layers, and the larger of a layer's gradient and the head with its gradient.
    return again + layer.width * (2 * (shared + experts) + max(shared + experts, 2 * vocabulary))
