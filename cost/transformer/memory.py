"""Bytes on a rank: state between steps, activations of microbatches, temporaries of a backward.

A rank holds at the same time

    static      parameters, gradients, optimizer state (`state.py`), divided by tensor parallelism
                and ZeRO
    kept        for every layer and microbatch in flight: the kept bytes of its items, minus those
                that recompute makes again, plus the inputs of the recomputation
                (if backward has two parts, inputs and gradients of matmuls stay for the second)
    in between  what recompute makes again for one layer; gradients of the logits; under ZeRO-3
                gathered parameters of two layers, and their gradients
                                                                             (`peak_bytes`)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.cost.transformer.chunks import Chunk, parameters_of
from autopar.cost.transformer.ends import embedding_items, head_items, logits_gradient_bytes
from autopar.cost.transformer.layer import LayerModel
from autopar.cost.transformer.machine import TransformerMachine
from autopar.cost.transformer.recipe import Module, Recipe
from autopar.cost.transformer.state import static_bytes
from autopar.cost.transformer.work import Item
from autopar.schedule import Schedule

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


def peak_bytes(
    layer: LayerModel, chunks: Sequence[Chunk], schedule: Schedule, machine: TransformerMachine
) -> float:
    """Peak bytes on the rank that needs most, over all devices and the whole step."""
    kept = [_kept_bytes(layer, chunk) for chunk in chunks]
    for_weights = sum(item.weight_bytes for item in layer.items())
    peaks = []
    for device, row in enumerate(schedule.rows):
        held = [chunks[stage] for stage in schedule.stages_on(device)]
        static = sum(_static_bytes(layer, chunk, machine) for chunk in held)
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
        peaks.append(static + most + between)
    return max(peaks)


def _kept_bytes(layer: LayerModel, chunk: Chunk) -> float:
    """What a chunk keeps of one microbatch."""
    ends = [
        *(embedding_items(layer) if chunk.is_first else ()),
        *(head_items(layer) if chunk.is_last else ()),
    ]
    return chunk.n_layers * kept_of_layer(layer).kept_bytes + sum(
        item.kept_bytes + item.out_bytes for item in ends
    )


def _static_bytes(layer: LayerModel, chunk: Chunk, machine: TransformerMachine) -> float:
    each = static_bytes(layer.software)
    return sum(
        n * each.under_zero(layer.recipe.zero, machine.group(group).n_ranks)
        for n, group in zip(parameters_of(layer, chunk), ("dp", "expert_dp"), strict=True)
    )


def _between_bytes(layer: LayerModel, chunk: Chunk) -> float:
    """Bytes that a backward needs temporarily."""
    again = kept_of_layer(layer).recomputed_bytes if chunk.n_layers else 0.0
    if chunk.is_last:
        again = max(again, logits_gradient_bytes(layer))
    if layer.recipe.zero < 3:
        return again
    shared, experts = parameters_of(layer, Chunk(1, is_first=False, is_last=False))
    vocabulary = chunk.is_last * layer.shape.embedding_parameters / layer.recipe.tp
    # Two gathered layers, and the larger of a layer's gradient and the head with its gradient.
    return again + layer.width * (2 * (shared + experts) + max(shared + experts, 2 * vocabulary))
