"""Weak scaling: one recipe on more and more nodes, where the batch grows with data parallelism.

tp, pp, cp and ep are fixed, dp = devices / (tp pp cp) grows, and every rank keeps the same work:

    batch(n) / batch(n0) = dp(n) / dp(n0)
    efficiency(n)        = (tokens per second and device on n nodes) / (the same on n0)

So an efficiency below 1 is due to gradient sync, over groups that span more nodes, and to the
slowest of more ranks. All nodes are equally fast, and the switches between them carry the full rate
of all ports: there is no congestion and there are no faults.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from autopar.cost.hardware import Profile, Software, load_software
from autopar.cost.transformer.estimate import StepModel
from autopar.cost.transformer.recipe import Recipe
from autopar.cost.transformer.shape import TransformerShape
from autopar.errors import OptionError

# With several stages and no given batch. The bubble is then (p - 1) / (9 p - 1).
MICROBATCHES_PER_STAGE = 8
LARGEST_NODES = 2048  # of 8 devices: 16,384


@dataclass(frozen=True)
class ScalePoint:
    """A step on one number of devices."""

    n_nodes: int
    n_devices: int
    dp: int
    global_batch: int
    step_time_s: float
    tokens_per_s: float
    efficiency: float
    compute_time_s: float
    exposed_comm_s: float
    bubble: float
    peak_bytes: float


@dataclass(frozen=True)
class Scaling:
    """Points on one machine, in the order of the requested numbers of nodes."""

    hardware: str
    points: tuple[ScalePoint, ...]
    memory_limit_bytes: float


def training_dtype(profile: Profile) -> torch.dtype:
    """bfloat16, or float16 if the device multiplies it more than twice as fast."""
    rates = profile.rates_flops_per_s()
    slow = 2 * rates.get("bfloat16", 0.0) < rates.get("float16", 0.0)
    return torch.float16 if slow else torch.bfloat16


def default_nodes(recipe: Recipe, devices_per_node: int) -> tuple[int, ...]:
    """The fewest nodes that hold the recipe, times powers of two."""
    first = _fewest_nodes(recipe, devices_per_node)
    return tuple(n for k in range(12) if (n := first << k) <= max(first, LARGEST_NODES))


def _fewest_nodes(recipe: Recipe, devices_per_node: int) -> int:
    """The fewest nodes that hold the recipe a whole number of times; their multiples do too."""
    return math.lcm(recipe.tp * recipe.cp * recipe.pp, devices_per_node) // devices_per_node


def weak_scaling(
    shape: TransformerShape,
    recipe: Recipe,
    profile: Profile,
    nodes: Sequence[int],
    devices_per_node: int,
    batch: int | None = None,
    software: Software | None = None,
) -> Scaling:
    """Simulate a step on each number of nodes.

    recipe      its dp and global batch are replaced
    software    by default Megatron's, with Transformer Engine on devices whose kernels it calls
    batch       rows on the first number of nodes; by default one microbatch per dp rank, or, with
                several stages, 8 x stages of them

    Raises `OptionError` if the recipe does not fit the model or the devices.
    """
    is_new = "device.new_attention_fraction.forward" in profile.quantities
    software = software or load_software("transformer-engine" if is_new else "megatron-core")
    first_dp = _dp(recipe, nodes[0], devices_per_node)
    if batch is None:
        n_microbatches = MICROBATCHES_PER_STAGE * recipe.pp if recipe.pp > 1 else 1
        batch = first_dp * recipe.microbatch_size * n_microbatches
    points: list[ScalePoint] = []
    for n_nodes in nodes:
        dp = _dp(recipe, n_nodes, devices_per_node)
        scaled = replace(recipe, dp=dp, global_batch=batch * dp // first_dp)
        _check(shape, scaled)
        dtype = training_dtype(software.apply_to(profile))
        model = StepModel.of(shape, scaled, software, profile, dtype, devices_per_node)
        points.append(_point(model, n_nodes, points[0] if points else None))
    return Scaling(profile.name, tuple(points), model.hardware.memory_limit_bytes)


def _point(model: StepModel, n_nodes: int, first: ScalePoint | None) -> ScalePoint:
    recipe, timeline, step_s = model.layer.recipe, model.simulate(), model.step_time_s()
    tokens_per_s = recipe.global_batch * model.layer.shape.seq / step_s
    per_device = tokens_per_s / recipe.n_ranks
    return ScalePoint(
        n_nodes, recipe.n_ranks, recipe.dp, recipe.global_batch, step_s, tokens_per_s,
        per_device / (first.tokens_per_s / first.n_devices) if first else 1.0,
        timeline.compute_time_s, timeline.exposed_comm_s, timeline.bubble, model.peak_bytes(),
    )  # fmt: skip


def _dp(recipe: Recipe, n_nodes: int, devices_per_node: int) -> int:
    """The dp of a recipe on `n_nodes`."""
    n_devices, each = n_nodes * devices_per_node, recipe.tp * recipe.cp * recipe.pp
    if n_nodes < 1 or n_devices % each:
        raise OptionError(
            f"{n_nodes} nodes of {devices_per_node} devices are no multiple of "
            f"tp={recipe.tp} x cp={recipe.cp} x pp={recipe.pp} = {each}",
            hint=f"multiples of {_fewest_nodes(recipe, devices_per_node)} hold it",
        )
    return n_devices // each


def _check(shape: TransformerShape, recipe: Recipe) -> None:
    """Raise `OptionError` unless the degrees of the recipe divide the dims of the model, and ep its
    ranks."""
    n_experts = shape.experts.n_experts if shape.experts else 1
    for what, size, word, degree in (
        ("heads", shape.heads, "tp", recipe.tp),
        ("tokens per row", shape.seq, "cp", recipe.cp),
        ("experts", n_experts, "ep", recipe.ep),
        ("ranks of a stage", recipe.ranks_per_stage, "ep", recipe.ep),
    ):
        if size % degree:
            raise OptionError(f"{word}={degree} does not divide the {size} {what}")
    if recipe.n_chunks > shape.layers:
        raise OptionError(
            f"pp={recipe.pp} x interleave={recipe.interleave} are more chunks than the model's "
            f"{shape.layers} layers"
        )
