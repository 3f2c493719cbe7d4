"""A transformer's training step from its dims and a recipe, without a captured graph.

shape       dims and parameters            configs   shapes from Hugging Face configs
recipe      how it is laid out, with what software
work        kernels and collectives        layer     the items of one layer
ends        embedding, logits, loss        chunks    which layers and parameters are where
machine     seconds of items; where groups stand
memory      bytes on a rank                state     what a parameter keeps; its update
orders      schedules                      estimate  a step: stage times, simulated
scaling     the same recipe on more devices
"""

from autopar.cost.transformer.chunks import Chunk
from autopar.cost.transformer.configs import shape_of
from autopar.cost.transformer.estimate import StepModel
from autopar.cost.transformer.layer import LayerModel
from autopar.cost.transformer.machine import TransformerMachine
from autopar.cost.transformer.memory import kept_of_layer
from autopar.cost.transformer.recipe import Module, Order, Recipe, Recompute, Software
from autopar.cost.transformer.scaling import (
    ScalePoint,
    Scaling,
    default_nodes,
    training_dtype,
    weak_scaling,
)
from autopar.cost.transformer.shape import Experts, TransformerShape

__all__ = [
    "Chunk",
    "Experts",
    "LayerModel",
    "Module",
    "Order",
    "Recipe",
    "Recompute",
    "ScalePoint",
    "Scaling",
    "Software",
    "StepModel",
    "TransformerMachine",
    "TransformerShape",
    "default_nodes",
    "kept_of_layer",
    "shape_of",
    "training_dtype",
    "weak_scaling",
]
