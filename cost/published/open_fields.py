"""What a run does not say about its layout is what a careful benchmarker would have chosen: the
fastest by simulation of what fits in memory.

    microbatch   1, 2, 4 or 8 rows, as far as they divide the batch of a rank
    interleave   chunks of layers per rank, in an interleaved schedule as many as there are layers
    sp           with tensor parallelism, with and without
    recompute    none, the attention core, full
    zero         0 or 1: optimizer state whole, or in shards

Steps are compared with at most `_ROUNDS` microbatches per stage: more change neither what is kept
nor which is faster. The values chosen are listed as assumed. If nothing fits, the defaults stay
(`rows.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import Any

from autopar.cost.published.predict import step_model
from autopar.cost.published.rows import PublishedRun
from autopar.cost.transformer import Recipe, Recompute
from autopar.errors import OptionError

_MICROBATCHES = (1, 2, 4, 8)
_ROUNDS = 4
_RECOMPUTE: tuple[Recompute, ...] = ("none", "attention-core", "full")


def settle(row: PublishedRun) -> PublishedRun:
    """The run with its open fields chosen; the same run if it has none."""
    if not row.open_fields:
        return row
    fitting = []
    for choice in _choices(row):
        shown = _shortened(choice)
        step = step_model(shown)
        if step.peak_bytes() <= step.machine.hardware.memory_limit_bytes:
            rows_per_s = shown.recipe.global_batch / step.step_time_s()
            fitting.append((rows_per_s, choice))
    if not fitting:
        return row
    _, best = max(fitting, key=lambda pair: pair[0])
    chosen = [f"{name}: {_said(best.recipe, name)}" for name in row.open_fields]
    others = [what for what in row.assumed if what.split(":")[0] not in row.open_fields]
    return replace(best, assumed=(*others, *chosen))


def _shortened(row: PublishedRun) -> PublishedRun:
    """The run with fewer microbatches, if it has many."""
    recipe = row.recipe
    most = _ROUNDS * recipe.pp
    if recipe.n_microbatches <= most:
        return row
    batch = most * recipe.microbatch_size * recipe.dp
    return replace(row, recipe=replace(recipe, global_batch=batch))


def _choices(row: PublishedRun) -> Iterator[PublishedRun]:
    """The run with every combination of values of its open fields."""
    recipe, fields = row.recipe, row.open_fields
    rows_of_rank = recipe.global_batch // recipe.dp
    layers = row.shape.layers
    each = -(-layers // recipe.pp)
    chunks = [
        v for v in range(1, each + 1) if any(n % (v * recipe.pp) == 0 for n in (layers, layers + 2))
    ]
    options: dict[str, list[Any]] = {
        "microbatch": [n for n in _MICROBATCHES if rows_of_rank % n == 0],
        "interleave": chunks if recipe.pp > 1 and row.software.interleaves else [1],
        "sp": [False, True] if recipe.tp > 1 else [False],
        "recompute": list(_RECOMPUTE),
        "zero": [0, 1],
    }
    tried: list[list[Any]] = [options[name] if name in fields else [None] for name in options]
    for values in product(*tried):
        try:
            changed = _changed(recipe, dict(zip(options, values, strict=True)))
        except OptionError:
            continue
        if changed.interleave == 1 or changed.n_microbatches % changed.pp == 0:
            yield replace(row, recipe=changed)


def _changed(recipe: Recipe, values: Mapping[str, Any]) -> Recipe:
    """The recipe with the values that are not None."""
    given = {name: value for name, value in values.items() if value is not None}
    if "microbatch" in given:
        given["microbatch_size"] = given.pop("microbatch")
    if "interleave" in given and recipe.order in ("1f1b", "interleaved"):
        given["order"] = "interleaved" if given["interleave"] > 1 else "1f1b"
    return replace(recipe, **given)


def _said(recipe: Recipe, name: str) -> object:
    return recipe.microbatch_size if name == "microbatch" else getattr(recipe, name)
