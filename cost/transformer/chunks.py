"""Which layers, parameters and ends (embedding, head and loss) are where.

A device has `interleave` chunks of layers. If the layers do not divide evenly, embedding and loss
count as a layer each, so the first and the last chunk have one layer less. If that does not divide
evenly either, chunks differ by one layer.

The loss has T x V logits in float32. It reads and writes these bytes per logit:

    not fused   cast 2 + 4, maximum 4, subtract 8, exp 8, sum 4, divide 8      backward 8 + 6
    fused       read twice 4                                                  backward 2 + 2

The kernels are those of a cross-entropy over a sharded vocabulary (Megatron-LM,
core/tensor_parallel/cross_entropy.py). With tp > 1 it has three small all_reduces (`head_items`).

Bytes per logit at the peak, where the loss's backward begins (`bytes_per_logit`), in bf16:

    torch       log-softmax 4, its gradient 4, that of the float32 logits 4                  12
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
from dataclasses import dataclass, replace
from itertools import accumulate

from autopar.cost.hardware import Software
from autopar.cost.transformer.layer import ENTER, LEAVE, LayerModel
from autopar.cost.transformer.recipe import Group, Recipe
from autopar.cost.transformer.shape import TransformerShape
from autopar.cost.transformer.work import Item, Kernel, elementwise, exchange

_FLOAT32 = 4
_PEAK_BYTES = {"torch": 12, "fused": 6, "in-place": 6, "copied": 10, "engine": 5}


@dataclass(frozen=True)
class Chunk:
    """Consecutive layers on one device, of which so many are dense among a mixture's."""

    n_layers: int
    is_first: bool
    is_last: bool
    n_dense: int = 0

    def kinds(self, layer: LayerModel) -> list[tuple[LayerModel, int]]:
        """The kinds of layers here, and their numbers."""
        return [(layer, self.n_layers - self.n_dense), (layer.dense, self.n_dense)]

    def items(self, layer: LayerModel) -> Iterator[tuple[Item, int]]:
        """All items here, and how many times each: of layers, and before and after them."""
        yield from ((item, n) for kind, n in self.kinds(layer) if n for item in kind.items)
        for is_here, items in ((self.is_first, embedding_items), (self.is_last, head_items)):
            if is_here:
                yield from ((replace(item, part="end"), 1) for item in items(layer))


def chunks_of(n_layers: int, n_chunks: int, n_dense: int = 0) -> tuple[Chunk, ...]:
    """The chunks of a model, in the order of its layers, the first `n_dense` of which are dense."""
    each, left = divmod(n_layers, n_chunks)
    counts = [each + (i < left) for i in range(n_chunks)]
    if left and (n_layers + 2) % n_chunks == 0:
        counts = [(n_layers + 2) // n_chunks] * n_chunks
        counts[0] -= 1
        counts[-1] -= 1
    last, ends = n_chunks - 1, accumulate(counts)
    return tuple(
        Chunk(n, i == 0, i == last, min(max(n_dense - end + n, 0), n))
        for i, (n, end) in enumerate(zip(counts, ends, strict=True))
    )


def parameters_of(layer: LayerModel, chunk: Chunk) -> dict[Group, float]:
    """Parameters on a rank before ZeRO, by the group whose ranks all hold them.

    Those of its experts, and all others. A tied head has none where the embedding is.
    """
    found: dict[Group, float] = {"dp": 0.0, "expert_dp": 0.0}
    for item, n in chunk.items(layer):
        found[item.copies] += n * item.n_parameters
    if layer.shape.ties_head and chunk.is_first and chunk.is_last:
        found["dp"] -= layer.words * layer.shape.hidden
    return found


def model_flops_per_token(shape: TransformerShape, *, counts_recompute: bool = False) -> float:
    """FLOPs of forward, and twice as many of backward; a causal mask skips nothing.

    If recompute counts, layers run forward twice (Narayanan et al., arXiv 2104.04473, equation 3).
    """
    layer = LayerModel(shape, Recipe(), Software(fused_attention=False))
    whole = Chunk(shape.layers, is_first=True, is_last=True, n_dense=shape.dense_layers)
    flops = sum(
        n * step.flops * (4 if counts_recompute and item.part != "end" else 3)
        for item, n in whole.items(layer)
        for step in item.forward
        if isinstance(step, Kernel)
    )
    return flops / shape.seq


def embedding_items(layer: LayerModel) -> Iterator[Item]:
    """The embedding: rows of the vocabulary's shard, summed over ranks; backward scatters back."""
    shape, size = layer.shape, layer.tokens * layer.shape.hidden * layer.width
    masks = size / layer.width if layer.software.dropout else 0.0
    n_rows = layer.words + (shape.seq if shape.learns_positions else 0)
    yield elementwise(
        "embedding", 2 * size + masks, 3 * size + masks, masks, 2, 2,
        n_parameters=n_rows * shape.hidden,
    )  # fmt: skip
    yield from layer.boundary(LEAVE)


def head_items(layer: LayerModel) -> Iterator[Item]:
    """The last norm, the logits and the loss."""
    T, is_fused = layer.tokens, layer.software.fuses_loss
    words, logits = layer.words, T * layer.words
    yield layer.norm("last norm")
    yield from layer.boundary(ENTER)
    yield layer.matmul("logits", T, words, layer.shape.hidden, is_kept=is_fused, is_exact=True)
    if is_fused:
        yield elementwise("loss", 4 * logits, 4 * logits)
    else:
        yield elementwise("loss", 38 * logits, 14 * logits, _FLOAT32 * logits, 6, 2)
    if layer.recipe.tp > 1:
        yield exchange("loss", T * _FLOAT32, ("all_reduce",) * 3, ())


def loss_bytes(layer: LayerModel) -> float:
    """Bytes that the loss's backward holds besides those that `head_items` keep."""
    kept = layer.width if layer.software.fuses_loss else _FLOAT32
    each = bytes_per_logit(layer.software, is_sharded=layer.recipe.tp > 1)
    return layer.tokens * layer.words * (each - kept)


def stranded_bytes(layer: LayerModel) -> float:
    """Free bytes at the loss's peak that nothing fits in: the block of torch's 16-bit logits.

    The loss makes float32 tensors, which are twice as large, so the allocator takes new blocks. If
    moments that the first update makes lie in that block, about as much of another one is free.
    """
    is_torchs = layer.software.loss == "torch" and layer.recipe.tp == 1
    is_stranded = is_torchs and layer.width < _FLOAT32
    return is_stranded * layer.tokens * layer.words * layer.width


def bytes_per_logit(software: Software, *, is_sharded: bool) -> float:
    """The bytes of the table above."""
    is_torchs = is_sharded and software.fp32_parameters and software.loss in ("torch", "fused")
    return 18 if is_torchs else _PEAK_BYTES[software.loss]
