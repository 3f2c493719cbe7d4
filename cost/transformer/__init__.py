"""A transformer's training step from its dims and a recipe, without a captured graph.

Read `shape.py` (dims; those of Hugging Face configs), `recipe.py` (layout, schedule), `work.py`
(kernels, collectives), `layer.py` (items of a layer), `chunks.py` (where layers, embedding and loss
are; parameters), `memory.py` (bytes), `estimate.py` (a step on a machine), `scaling.py` (more
nodes).

May import `laws`, `memory`, `simulate`, `hardware`, and what lies below `cost`; not `price`, its
neighbour. Mainly hands on `StepModel`, `LayerModel` and `weak_scaling`.
"""

from autopar.cost.transformer.chunks import Chunk, model_flops_per_token, parameters_of
from autopar.cost.transformer.estimate import StepModel
from autopar.cost.transformer.layer import LayerModel
from autopar.cost.transformer.memory import MemoryRank, kept_of_layer
from autopar.cost.transformer.recipe import Order, Recipe
from autopar.cost.transformer.scaling import (
    ScalePoint,
    Scaling,
    default_nodes,
    training_dtype,
    weak_scaling,
)
from autopar.cost.transformer.shape import Experts, Latent, TransformerShape, shape_of

__all__ = [
    "Chunk",
    "Experts",
    "Latent",
    "LayerModel",
    "MemoryRank",
    "Order",
    "Recipe",
    "ScalePoint",
    "Scaling",
    "StepModel",
    "TransformerShape",
    "default_nodes",
    "kept_of_layer",
    "model_flops_per_token",
    "parameters_of",
    "shape_of",
    "training_dtype",
    "weak_scaling",
]
