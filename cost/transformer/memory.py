"""Bytes on a rank of a stage: what stays between steps, and what microbatches keep.

    static        parameters, gradients, optimizer state, divided by tensor parallelism and ZeRO
    kept          of a layer and microbatch: the kept bytes of its items less what recompute makes
                  again, plus what recompute starts from
    head          logits and their gradient, where the loss is
    peak          static + kept x layers x chunks in flight + the most a backward needs at once
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.cost.transformer.layer import LayerModel
from autopar.cost.transformer.work import Item


def is_recomputed(item: Item, recompute: str) -> bool:
    """Whether backward runs an item's forward again."""
    match recompute:
        case "full":
            return True
        case "attention-core":
            return item.part == "core"
        case "norm-act":
            return item.name == "activation" or item.name.endswith("norm")
        case "selective":
            return item.part == "elementwise"
        case _:
            return False


@dataclass(frozen=True)
class KeptBytes:
    """Of one layer and microbatch, between forward and backward, and what its backward adds."""

    kept_bytes: float
    again_bytes: float


def kept_of_layer(layer: LayerModel) -> KeptBytes:
    """What a layer keeps, and what recompute brings back while its backward runs."""
    items, recompute = layer.items(), layer.recipe.recompute
    every = sum(item.kept_bytes + item.out_bytes for item in items)
    if recompute == "full":
        return KeptBytes(layer.input_bytes(), every)
    again = sum(item.kept_bytes for item in items if is_recomputed(item, recompute))
    return KeptBytes(every - again, again)
