"""Bytes on a rank: state between steps, activations of microbatches, temporaries of a backward.

A rank holds at the same time

    static      parameters, gradients, optimizer state, divided by tensor parallelism and ZeRO
    kept        for every layer and microbatch in flight: the kept bytes of its items, minus those
                that recompute makes again, plus the inputs of the recomputation
                (if backward has two parts, inputs and gradients of matmuls stay for the second)
    in between  what recompute makes again for one layer; what the loss makes; under ZeRO-3
                gathered parameters of two layers, and their gradients
    libraries   workspaces (`cost/memory/workspace.py`); with sequence parallelism the buffer into
                which activations are gathered
                                                                             (`device_peaks`)

State per parameter are rows of `cost/memory/state.py`, which names their papers (`precision_of`):

    parameters in float32       `model`                        4 + 4 + 8
    gradients in float32        `bf16-mixed-fp32-gradients`    2 + 4 + 12
    neither                     `fp16-mixed`                   2 + 2 + 12
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

import torch

from autopar.cost.hardware import Hardware, Software
from autopar.cost.memory import (
    StageMemory,
    peak_of_row,
    static_bytes_per_param,
    workspace_bytes,
)
from autopar.cost.transformer.chunks import Chunk, loss_bytes, parameters_of
from autopar.cost.transformer.layer import LayerModel
from autopar.cost.transformer.shape import TransformerShape
from autopar.cost.transformer.work import Item

# Whose peak: a rank's by its number, or that of the first, last or fullest stage.
MemoryRank = int | Literal["fullest", "first", "last"]

# What each kind of recompute makes again: parts of a layer, or items by name.
AGAIN: dict[str, tuple[str, ...]] = {
    "none": (),
    "full": ("core", "elementwise", "matmul"),
    "selective": ("elementwise",),  # torchtitan's, with every second matmul
    "attention-core": ("core",),
    "norm": ("attention norm", "latent norm", "mlp norm"),
    "activation": ("activation",),
    "feed-forward": ("mlp up", "activation", "mlp down", "sort by expert", "sort back"),
}


def precision_of(software: Software) -> tuple[torch.dtype, str]:
    """The dtype of parameters, and the policy for the state beside them."""
    if software.fp32_parameters:
        return torch.float32, "model"
    policy = "bf16-mixed-fp32-gradients" if software.fp32_gradients else "fp16-mixed"
    return torch.bfloat16, policy


def rerun_share(item: Item, layer: LayerModel) -> float:
    """The share of an item's forward that backward runs again."""
    kinds = layer.recipe.recompute.split(",")
    again = [name for kind in kinds for name in AGAIN[kind]]
    if item.part in again or item.name in again:
        return 1.0
    return _every_second(layer.shape).get(item.name, 0.0) * ("selective" in kinds)


def _every_second(shape: TransformerShape) -> dict[str, float]:
    """The share of each matmul that selective recompute runs again, by item.

    Torchtitan's `_get_custom_policy` saves the first, third, fifth, ... matmul of a layer, in the
    order of its models. It saves no grouped ones, so those of experts run again. A shared expert's
    count as theirs.
    """
    latent, k = shape.latent, shape.key_features
    order = [("qkv", shape.query_features), ("qkv", k), ("qkv", k)]
    if latent:
        narrow = ("latent", latent.kv_rank + latent.rotary)
        order = [("latent", latent.q_rank)] * bool(latent.q_rank)
        order += [("queries", 1), narrow, ("keys and values", 1)]
    ups = [("mlp up", 1)] * (2 if shape.is_gated else 1)
    order += [("attention output", 1), *ups, ("mlp down", 1)]
    again, every = Counter[str](), Counter[str]()
    for i, (name, n_features) in enumerate(order):
        every[name] += n_features
        again[name] += n_features * (i % 2)
    shares = {name: again[name] / n for name, n in every.items()}
    return shares if shape.experts is None else shares | {"mlp up": 1.0, "mlp down": 1.0}


class KeptBytes(NamedTuple):
    """Bytes of one layer and microbatch: kept until backward, and made again by recompute."""

    kept_bytes: float
    recomputed_bytes: float


def kept_of_layer(layer: LayerModel) -> KeptBytes:
    """What a layer keeps, and what recompute makes again while its backward runs.

    Eager selective recompute also keeps what it saves and nothing reads, the result of the last
    matmul (torch, `_CachingTorchDispatchMode`); a compiled graph drops it.
    """
    items, recipe = layer.items, layer.recipe
    every = sum(item.kept_bytes + item.out_bytes for item in items)
    of_layer = recipe.recompute in ("selective", "full")  # whose checkpoints keep its input
    again = sum(
        rerun_share(item, layer) * (item.kept_bytes + of_layer * item.out_bytes) for item in items
    )
    beside = layer.input_bytes * of_layer
    if recipe.recompute == "selective" and not layer.software.fused_kernels:
        is_saved = 1.0 - _every_second(layer.shape)["mlp down"]
        beside += is_saved * layer.tokens * layer.shape.hidden * layer.width
    return KeptBytes(every - again + beside, again)


def device_peaks(layer: LayerModel, chunks: Sequence[Chunk], hardware: Hardware) -> Iterator[float]:
    """Peak bytes of each device of the pipeline, over the whole step."""
    schedule, beside = layer.recipe.schedule, _library_bytes(layer, hardware)
    memories = {chunk: _memory_of(layer, chunk) for chunk in set(chunks)}
    for device, row in enumerate(schedule.rows):
        own = {stage: memories[chunks[stage]] for stage in schedule.stages_on(device)}
        yield peak_of_row(row, own, {}).peak_bytes + beside


def _memory_of(layer: LayerModel, chunk: Chunk) -> StageMemory:
    items = list(chunk.items(layer))
    ends = sum(item.kept_bytes + item.out_bytes for item, _ in items if item.part == "end")
    kept = sum(n * kept_of_layer(kind).kept_bytes for kind, n in chunk.kinds(layer)) + ends
    for_weights = sum(n * item.weight_bytes for item, n in items if item.part != "end")
    static = _static_bytes(layer, chunk) + (_deferred_bytes(layer) if chunk.is_last else 0.0)
    above = {"forward": kept, "backward": _between_bytes(layer, chunk), "weights": 0.0}
    return StageMemory(static, 0.0, kept, min(kept, for_weights), 0.0, static, above, above)


def _library_bytes(layer: LayerModel, hardware: Hardware) -> float:
    """Workspaces, and the buffer into which sequence parallelism gathers activations."""
    software, experts = layer.software, layer.shape.experts
    gathered = layer.tokens * layer.shape.hidden * layer.width if layer.recipe.sp else 0.0
    if not hardware.is_gpu:
        return gathered
    return gathered + workspace_bytes(
        hardware.profile_name,
        has_engine=software.transformer_engine,
        is_grouped=experts is not None and experts.is_grouped,
        is_wide=software.wide_workspace,
    )


def _static_bytes(layer: LayerModel, chunk: Chunk) -> float:
    """Parameters, gradients and optimizer state of a chunk on its fullest rank.

    Muon has one moment of a matrix. Its ZeRO deals whole tensors to ranks, of which one has all of
    the embedding; other parameters have AdamW's moments.
    """
    recipe, has_muon = layer.recipe, layer.software.muon
    each = static_bytes_per_param("adamw", *precision_of(layer.software))
    of_matrix = replace(each, moments_bytes=each.moments_bytes / 2) if has_muon else each
    ends = parameters_of(layer, replace(chunk, n_layers=0, n_dense=0))["dp"]
    held = parameters_of(layer, chunk)
    shards, of_experts = recipe.shards("dp"), recipe.shards("expert_dp")
    return (
        ends * each.under_zero(0 if has_muon else recipe.zero, shards)
        + (held["dp"] - ends) * of_matrix.under_zero(recipe.zero, shards)
        + held["expert_dp"] * of_matrix.under_zero(recipe.zero, of_experts)
    )


def _deferred_bytes(layer: LayerModel) -> float:
    """Inputs of the head and gradients of the logits, of microbatches whose weight waits."""
    each = layer.shape.hidden + layer.words
    n = min(layer.recipe.deferred, layer.recipe.n_microbatches)
    return n * layer.tokens * each * layer.width


def _between_bytes(layer: LayerModel, chunk: Chunk) -> float:
    """Bytes that a backward needs temporarily."""
    again = kept_of_layer(layer).recomputed_bytes if chunk.n_layers else 0.0
    if chunk.is_last:
        again = max(again, loss_bytes(layer))
    if layer.recipe.zero < 3:
        return again
    of_layer = sum(parameters_of(layer, Chunk(1, is_first=False, is_last=False)).values())
    vocabulary = chunk.is_last * layer.words * layer.shape.hidden
    # Two gathered layers, and the larger of a layer's gradient and the head with its gradient.
    return again + layer.width * (2 * of_layer + max(of_layer, 2 * vocabulary))
