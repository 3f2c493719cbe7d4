"""The items before the first layer and after the last one: embedding, logits, loss.

The loss has T x V logits in float32. It reads and writes these bytes per logit:

    not fused   cast 2 + 4, maximum 4, subtract 8, exp 8, sum 4, divide 8      backward 8 + 6
    fused       read twice 4                                                  backward 2 + 2

The kernels are those of a cross-entropy over a sharded vocabulary (Megatron-LM,
core/tensor_parallel/cross_entropy.py). With tp > 1 it has three small all_reduces (`head_items`).

Bytes per logit at the peak, where the loss's backward begins (`bytes_per_logit`), in bf16:

    torch       log-softmax 4, its gradient 4, the gradient cast 2                           10
    FSDP, tp    log-softmax 4; one-hot, softmax, sum and product 4 each, the last two at the
                end of the other two; logits 2. DTensor calls its operators one by one, also if
                layers are compiled (torch, distributed/tensor/parallel/loss.py)             18
    fused       logits 2, gradients 2 + 2                                                     6
    in-place    softmax in the memory of the float32 logits 4, its gradient there, cast 2     6
    copied      Megatron's fused loss: float32 logits 4, softmax 4, gradient cast 2          10
    engine      Transformer Engine's: statistics in float32, gradients over the logits        5
"""

from __future__ import annotations

from collections.abc import Iterator

from autopar.cost.hardware import Software
from autopar.cost.transformer.layer import LayerModel
from autopar.cost.transformer.work import Item, elementwise, exchange, matmul

_FLOAT32 = 4


def embedding_items(layer: LayerModel) -> Iterator[Item]:
    """The embedding: rows of the vocabulary's shard, summed over ranks; backward scatters back."""
    size = layer.tokens * layer.shape.hidden * layer.width
    masks = size / layer.width if layer.software.dropout else 0.0
    yield elementwise("embedding", 2 * size + masks, 3 * size + masks, masks, 2, 2)
    if layer.recipe.tp > 1:
        kind = "reduce_scatter" if layer.recipe.sp else "all_reduce"
        back = [("all_gather", size)] if layer.recipe.sp else []
        yield exchange("embedding", [(kind, size)], back)


def head_items(layer: LayerModel) -> Iterator[Item]:
    """The last norm, the logits and the loss."""
    recipe, T, h = layer.recipe, layer.tokens, layer.shape.hidden
    words = layer.shape.vocab / recipe.tp
    yield layer.norm("last norm")
    yield from layer.enter(h)
    yield matmul(
        "logits", T, words, h, layer.width, accumulated_bytes=layer.accumulated_bytes,
        is_kept=layer.software.fused_loss,
    )  # fmt: skip
    logits = T * words
    if layer.software.fused_loss:
        yield elementwise("loss", 4 * logits, 4 * logits)
    else:
        yield elementwise("loss", 38 * logits, 14 * logits, _FLOAT32 * logits, 6, 2)
    if recipe.tp > 1:
        yield exchange("loss", [("all_reduce", T * _FLOAT32)] * 3, [])


def loss_bytes(layer: LayerModel) -> float:
    """Bytes that the loss's backward holds besides those that `head_items` keep."""
    kept = layer.width if layer.software.fused_loss else _FLOAT32
    each = bytes_per_logit(layer.software, is_sharded=layer.recipe.tp > 1)
    return layer.tokens * layer.shape.vocab / layer.recipe.tp * (each - kept)


def bytes_per_logit(software: Software, *, is_sharded: bool) -> float:
    """The bytes of the table above."""
    if software.engine_loss:
        return 5
    if software.in_place_loss:
        return 6
    if software.copied_loss:
        return 10
    if is_sharded and software.fp32_parameters:
        return 18
    return 6 if software.fused_loss else 10
