"""Which layers and parameters are where.

A device has `interleave` chunks of layers. If the layers do not divide evenly, embedding and loss
count as a layer each, so the first and the last chunk have one layer less. If that does not divide
evenly either, chunks differ by one layer.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.cost.transformer.layer import LayerModel


@dataclass(frozen=True)
class Chunk:
    """Consecutive layers on one device."""

    n_layers: int
    is_first: bool
    is_last: bool


def chunks_of(n_layers: int, n_chunks: int) -> tuple[Chunk, ...]:
    """The chunks of a model, in the order of its layers."""
    each, left = divmod(n_layers, n_chunks)
    counts = [each + (i < left) for i in range(n_chunks)]
    if left and (n_layers + 2) % n_chunks == 0:
        each = (n_layers + 2) // n_chunks
        counts = [each] * n_chunks
        counts[0] -= 1
        counts[-1] -= 1
    last = n_chunks - 1
    return tuple(Chunk(n, i == 0, i == last) for i, n in enumerate(counts))


def parameters_of(layer: LayerModel, chunk: Chunk) -> tuple[float, float]:
    """Parameters on a rank before ZeRO: (those that all dp ranks share, those of its experts)."""
    shape, recipe = layer.shape, layer.recipe
    shared = shape.attention_parameters / recipe.tp + shape.norm_parameters
    experts = 0.0
    if shape.experts is None:
        shared += shape.mlp_parameters / recipe.tp
    else:
        shared += shape.router_parameters
        experts = shape.experts.n_experts / (recipe.ep * recipe.etp) * shape.mlp_parameters
    n_ends = chunk.is_first + chunk.is_last
    if n_ends == 2 and shape.is_tied:
        n_ends = 1
    vocabulary = n_ends * shape.embedding_parameters / recipe.tp
    positions = chunk.is_first * shape.position_parameters
    return chunk.n_layers * shared + vocabulary + positions, chunk.n_layers * experts
