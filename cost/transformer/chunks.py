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
from dataclasses import dataclass
from itertools import accumulate

from autopar.cost.hardware import Software
from autopar.cost.transformer.layer import LayerModel
from autopar.cost.transformer.work import Item, elementwise, exchange

_FLOAT32 = 4
_PEAK_BYTES = {"torch": 10, "fused": 6, "in-place": 6, "copied": 10, "engine": 5}


@dataclass(frozen=True)
class Chunk:
    """Consecutive layers on one device, of which so many are dense among a mixture's."""

    n_layers: int
    is_first: bool
    is_last: bool
    n_dense: int = 0

    def kinds(self, layer: LayerModel) -> list[tuple[LayerModel, int]]:
        """The kinds of layers here, and their numbers."""
        if not self.n_dense:
            return [(layer, self.n_layers)]
        return [(layer, self.n_layers - self.n_dense), (layer.dense, self.n_dense)]

    def ends(self, layer: LayerModel) -> list[Item]:
        """The items before the first layer, and after the last one."""
        before = embedding_items(layer) if self.is_first else ()
        return [*before, *(head_items(layer) if self.is_last else ())]


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


def parameters_of(layer: LayerModel, chunk: Chunk) -> tuple[float, float]:
    """Parameters on a rank before ZeRO: (those that all dp ranks share, those of its experts)."""
    shape, recipe = layer.shape, layer.recipe
    shared = experts = 0.0
    for kind, n in chunk.kinds(layer):
        of = kind.shape
        each = of.attention_parameters + of.shared_parameters
        each += 0 if of.experts else of.mlp_parameters
        shared += n * (each / recipe.tp + of.norm_parameters + of.router_parameters)
        if of.experts is not None:
            experts += n * of.experts.n_experts / (recipe.ep * recipe.etp) * of.mlp_parameters
    n_ends = chunk.is_first + chunk.is_last
    if n_ends == 2 and shape.is_tied:
        n_ends = 1
    vocabulary = n_ends * shape.embedding_parameters / recipe.tp
    positions = chunk.is_first * shape.position_parameters
    return shared + vocabulary + positions, experts


def embedding_items(layer: LayerModel) -> Iterator[Item]:
    """The embedding: rows of the vocabulary's shard, summed over ranks; backward scatters back."""
    size = layer.tokens * layer.shape.hidden * layer.width
    masks = size / layer.width if layer.software.dropout else 0.0
    yield elementwise("embedding", 2 * size + masks, 3 * size + masks, masks, 2, 2)
    yield from layer.leave("embedding")


def head_items(layer: LayerModel) -> Iterator[Item]:
    """The last norm, the logits and the loss."""
    tp, T, is_fused = layer.recipe.tp, layer.tokens, layer.software.fuses_loss
    logits = T * layer.shape.vocab / tp
    yield layer.norm("last norm")
    yield from layer.enter()
    words, h = layer.shape.vocab / tp, layer.shape.hidden
    yield layer.matmul("logits", T, words, h, is_kept=is_fused, is_exact=True)
    if is_fused:
        yield elementwise("loss", 4 * logits, 4 * logits)
    else:
        yield elementwise("loss", 38 * logits, 14 * logits, _FLOAT32 * logits, 6, 2)
    if tp > 1:
        yield exchange("loss", (("all_reduce", T * _FLOAT32),) * 3, ())


def loss_bytes(layer: LayerModel) -> float:
    """Bytes that the loss's backward holds besides those that `head_items` keep."""
    kept = layer.width if layer.software.fuses_loss else _FLOAT32
    each = bytes_per_logit(layer.software, is_sharded=layer.recipe.tp > 1)
    return layer.tokens * layer.shape.vocab / layer.recipe.tp * (each - kept)


def bytes_per_logit(software: Software, *, is_sharded: bool) -> float:
    """The bytes of the table above."""
    is_torchs = is_sharded and software.fp32_parameters and software.loss in ("torch", "fused")
    return 18 if is_torchs else _PEAK_BYTES[software.loss]
