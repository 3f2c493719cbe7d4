"""The schedule of a recipe, built once and cached for all steps that are simulated with it."""

from __future__ import annotations

from functools import lru_cache

from autopar.cost.transformer.recipe import Order, Recipe
from autopar.schedule import ORDERS, Schedule, Script, devices_of, script_of, zero_bubble


def schedule_of(recipe: Recipe) -> Schedule:
    """The order of actions on every device; messages are those of a chain of stages."""
    return _schedule(recipe.order, recipe.pp, recipe.interleave, recipe.n_microbatches)


def script_of_recipe(recipe: Recipe) -> Script:
    """The script of that schedule, with each message sent as soon as it is made."""
    return _script(recipe.order, recipe.pp, recipe.interleave, recipe.n_microbatches)


@lru_cache(maxsize=64)
def _schedule(order: Order, n_devices: int, n_chunks: int, n_microbatches: int) -> Schedule:
    if order == "zero-bubble-2":
        return zero_bubble(range(n_devices), n_microbatches, zb_h2=True)
    word = "1f1b" if n_chunks == 1 and order == "interleaved" else order
    return ORDERS[word](devices_of(word, n_devices, n_chunks), n_microbatches)


@lru_cache(maxsize=64)
def _script(order: Order, n_devices: int, n_chunks: int, n_microbatches: int) -> Script:
    schedule = _schedule(order, n_devices, n_chunks, n_microbatches)
    return script_of(schedule, sends_as_made=True)
