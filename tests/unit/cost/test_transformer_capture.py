"""Two descriptions of one model agree: its captured graph as planned, and its dims alone.

Both use the Megatron recipe and elements of the same width. These must be equal:

    matmuls      FLOPs of every layer and of the head on a rank, forward, and with backward;
                 seconds
    collectives  kind, number and bytes: of the residual stream, forward and backward, and
                 of the loss
    parameters   on a rank

These differ by a known amount:

    attention    the graph's has an explicit mask and counts whole. The dims are therefore asked
                 for unfused attention, because a fused one is causal and skips half
    sequence     with sequence parallelism, a plan keeps the gathered input of a matmul for
                 backward. The dims keep a shard and gather it again, as Megatron does. They also
                 leave out that gradients of norms are summed over ranks

Dropout is off in both.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch

import autopar
from autopar import Manual, Mesh, Plan
from autopar.cost.hardware import Software, load_profile, load_software
from autopar.cost.transformer import Chunk, LayerModel, Recipe, StepModel, shape_of
from autopar.cost.transformer.chunks import embedding_items, head_items, parameters_of
from autopar.cost.transformer.work import Exchange, Item, Kernel
from autopar.program.lines import CallLine
from tests.helpers.jobs import BATCH, CASES, SEQUENCE, WIDTH

N_LAYERS, TP, FLOAT32 = 2, 2, 4
RESIDUAL_BYTES = BATCH * SEQUENCE * WIDTH * FLOAT32
FAMILIES = pytest.mark.parametrize("family", ["gpt2", "llama"])
Calls = Counter[tuple[str, str, float]]


@lru_cache
def planned(family: str, sp: bool = False) -> tuple[Plan, LayerModel]:
    """(plan of a two-layer model under the recipe, one of its layers by its dims)."""
    case = CASES[family]
    model: Any = case.model()
    plan = autopar.plan(
        model, Mesh((1, TP), hardware="a100-80gb"), case.batch(0), microbatches=1,
        manual=Manual(tp=TP, sp=sp),
    )  # fmt: skip
    shape = shape_of(model.config, SEQUENCE)
    recipe = Recipe(tp=TP, sp=sp, microbatch_size=BATCH, global_batch=BATCH)
    return plan, LayerModel(shape, recipe, Software(fused_attention=False), FLOAT32)


def whole(layer: LayerModel) -> list[Item]:
    return [*embedding_items(layer), *layer.items * N_LAYERS, *head_items(layer)]


def lines(plan: Plan) -> list[CallLine]:
    """The lines of operators that have FLOPs."""
    assert plan.bound is not None
    (stage,) = plan.bound.pipeline.stages
    return [line for line in stage.body if isinstance(line, CallLine) and line.flops]


def calls_of_plan(plan: Plan) -> Calls:
    found: Calls = Counter()
    for call in plan.collectives():
        found[call.phase, call.kind, call.size_bytes] += call.count
    return found


def calls_of_dims(items: list[Item]) -> Calls:
    return Counter(
        (phase, one.kind, one.size_bytes)
        for item in items
        for phase, ones in (("forward", item.forward), ("backward", item.backward))
        for one in ones
        if isinstance(one, Exchange)
    )


@FAMILIES
def test_flops_of_products(family: str) -> None:
    plan, layer = planned(family)
    forward = backward = 0.0
    for item in whole(layer):
        forward += sum(one.flops for one in item.forward if isinstance(one, Kernel))
        backward += sum(one.flops for one in item.backward if isinstance(one, Kernel))
    assert sum(line.flops for line in lines(plan)) == forward
    assert sum(line.model_flops for line in lines(plan)) == TP * (forward + backward)


@FAMILIES
def test_matmuls_of_the_same_operands_take_the_same_seconds(family: str) -> None:
    """Of those that are one kernel in both: keys and gates are apart in Llamas, biases in GPT-2."""
    plan, layer = planned(family)
    software = replace(load_software("autopar"), fused_attention=False)
    step = StepModel.of(
        layer.shape, layer.recipe, software, load_profile("a100-80gb"), torch.float32, 8
    )
    priced = {(line.flops, line.forward_s, line.backward_s) for line in lines(plan)}
    alike = [i for i in whole(layer) if i.name in ("attention output", "mlp down", "logits")]
    assert len(alike) == 2 * N_LAYERS + 1
    for item in alike:
        both = (step.work([(item, 1)], is_backward=way).compute_s for way in (False, True))
        (matmul,) = (one for one in item.forward if isinstance(one, Kernel))
        assert (matmul.flops, *both) in priced


@FAMILIES
def test_collectives(family: str) -> None:
    plan, layer = planned(family)
    found = calls_of_plan(plan)
    assert found == calls_of_dims(whole(layer))
    per_pass = 2 * N_LAYERS + 1
    assert found["forward", "all_reduce", RESIDUAL_BYTES] == per_pass
    assert found["backward", "all_reduce", RESIDUAL_BYTES] == per_pass


def test_collectives_of_layers_with_sequence_parallelism() -> None:
    plan, layer = planned("gpt2", sp=True)
    found: Calls = Counter()
    for call in plan.collectives():
        if ".h." in call.tensor and call.phase in ("forward", "backward"):
            found[call.phase, call.kind, call.size_bytes] += call.count
    again = Counter({("backward", "all_gather", RESIDUAL_BYTES): 2 * N_LAYERS})
    assert found + again == calls_of_dims(layer.items * N_LAYERS)


@FAMILIES
def test_parameters(family: str) -> None:
    """Of the whole model, and of a rank."""
    plan, layer = planned(family)
    assert plan.bound is not None
    (stage,) = plan.bound.pipeline.stages
    stored_bytes = sum(parameter.stored.size_bytes for parameter in stage.parameters)
    whole_model = Chunk(N_LAYERS, is_first=True, is_last=True)
    assert parameters_of(layer, whole_model) == {"dp": stored_bytes / FLOAT32, "expert_dp": 0}
    n_parameters = sum(p.numel() for p in CASES[family].model().parameters())
    assert parameters_of(replace(layer, recipe=Recipe()), whole_model)["dp"] == n_parameters
