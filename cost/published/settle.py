"""What a published run leaves open about its layout.

It is what a careful benchmarker would have chosen: the fastest by simulation of what fits in
memory (`settle`).

    microbatch   1, 2, 4 or 8 rows, as far as they divide the batch of a rank
    interleave   chunks of layers per rank, in an interleaved schedule as many as there are layers
    sp           with tensor parallelism, with and without
    recompute    none, the attention core, norms and activations (which are cheap), full
    zero         0 or 1: optimizer state whole, or in shards

Steps are compared with at most `_ROUNDS` microbatches per stage: more change neither what is kept
nor which is faster. The values chosen are listed as assumed. If nothing fits, the defaults stay
(`rows.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

from autopar.cost.published.rows import PublishedRun
from autopar.errors import OptionError

_MICROBATCHES = (1, 2, 4, 8)
_ROUNDS = 4
_RECOMPUTE = ("none", "attention-core", "norm,activation", "full")


def settle(row: PublishedRun) -> PublishedRun:
    """The run with its open fields chosen; the same run if it has none."""
    fitting = []
    for choice in _choices(row) if row.open_fields else ():
        recipe, most = choice.recipe, _ROUNDS * choice.recipe.pp
        if recipe.n_microbatches > most:
            recipe = replace(recipe, global_batch=most * recipe.microbatch_size * recipe.dp)
        step = replace(choice, recipe=recipe).step()
        if step.peak_bytes() <= step.hardware.memory_limit_bytes:
            fitting.append((recipe.global_batch / step.step_time_s(), choice))
    if not fitting:
        return row
    _, best = max(fitting, key=lambda pair: pair[0])
    found = {"microbatch": best.recipe.microbatch_size}
    chosen = [f"{n}: {found.get(n) or getattr(best.recipe, n)}" for n in row.open_fields]
    others = [what for what in row.assumed if what.split(":")[0] not in row.open_fields]
    return replace(best, assumed=(*others, *chosen))


def _choices(row: PublishedRun) -> Iterator[PublishedRun]:
    """The run with every combination of values of its open fields."""
    recipe, layers = row.recipe, row.shape.layers
    chunks = [
        v
        for v in range(1, -(-layers // recipe.pp) + 1)
        if any(n % (v * recipe.pp) == 0 for n in (layers, layers + 2))
    ]
    options: dict[str, list[Any]] = {
        "microbatch": [n for n in _MICROBATCHES if recipe.global_batch // recipe.dp % n == 0],
        "interleave": chunks if recipe.pp > 1 and row.software.interleaves else [1],
        "sp": [False, True] if recipe.tp > 1 else [False],
        "recompute": list(_RECOMPUTE),
        "zero": [0, 1],
    }
    for values in product(*(options[name] for name in row.open_fields)):
        given = dict(zip(row.open_fields, values, strict=True))
        if "microbatch" in given:
            given["microbatch_size"] = given.pop("microbatch")
        if "interleave" in given and recipe.order in ("1f1b", "interleaved"):
            given["order"] = "interleaved" if given["interleave"] > 1 else "1f1b"
        try:
            changed = replace(recipe, **given)
        except OptionError:
            continue
        if changed.interleave == 1 or changed.n_microbatches % changed.pp == 0:
            yield replace(row, recipe=changed)
