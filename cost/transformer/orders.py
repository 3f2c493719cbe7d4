"""The schedule of a recipe."""

from __future__ import annotations

from autopar.cost.transformer.recipe import Recipe
from autopar.schedule import Schedule, gpipe, interleaved, one_f_one_b, zero_bubble


def schedule_of(recipe: Recipe) -> Schedule:
    """What every device does, in order; messages are those of a chain."""
    m = recipe.n_microbatches
    match recipe.order:
        case "interleaved":
            return interleaved(recipe.pp, recipe.interleave, m)
        case "zero-bubble":
            return zero_bubble(recipe.pp, m)
        case "gpipe":
            return gpipe(recipe.pp, m)
        case "1f1b":
            return one_f_one_b(recipe.pp, m)
