"""Where "auto" tries an axis cp between dp and tp, on which sequences are cut.

With m microbatches, a view dp x cp x tp is tried where rows divide over m dp, and not over m dp cp.
Else the view (dp cp) x tp cuts rows where this one cuts sequences: it has the same shares, and no
keys and values to send, so it is never slower and needs no more memory.

The same holds for fewer microbatches, and more of them only take longer. So (dp cp) x tp with any
divisor of m for which its rows divide bounds the view from below (`rows_instead`), if memory has no
limit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product

from autopar.cost.hardware import Hardware
from autopar.mesh import LogicalMesh, Mesh, factored_view, has_degrees
from autopar.options import Options
from autopar.passes.analysis import Analysis


def stage_degrees(analysis: Analysis, options: Options, n_ranks: int) -> Iterator[dict[str, int]]:
    """Every dp x tp of a recipe's stage, then every dp x cp x tp, that `forbid` and `mesh_shape`
    allow."""
    forbid = options.forbid
    splits_batch = "data" not in forbid and bool(analysis.batch.size)
    tensor = [tp for tp in _divisors(n_ranks) if tp == 1 or "tensor" not in forbid]
    for tp, wants_context in product(tensor, (False, True)[: 2 - ("sequence" in forbid)]):
        for dp in _divisors(n_ranks // tp):
            cp = n_ranks // tp // dp
            axes = {"dp": dp, "cp": cp, "tp": tp} if wants_context else {"dp": dp, "tp": tp}
            may_be = (cp > 1) == wants_context and (dp == 1 or splits_batch)
            if may_be and has_degrees(options.mesh_shape, axes):
                yield axes


def context_counts(
    analysis: Analysis, options: Options, view: LogicalMesh, counts: list[int]
) -> list[int]:
    """Those of `counts` with which the view is tried; all of them if the user names its axes."""
    axes, n_rows = view.axes, analysis.batch.size
    if "cp" not in axes or options.mesh_shape != "auto":
        return counts
    return [
        m
        for m in counts
        if n_rows % (m * axes["dp"]) == 0 and (not n_rows or n_rows % (m * axes["dp"] * axes["cp"]))
    ]


def rows_instead(
    analysis: Analysis, mesh: Mesh, hardware: Hardware, view: LogicalMesh, m: int
) -> tuple[LogicalMesh, int] | None:
    """The view of two axes that bounds one with cp, and with how many microbatches; None if its
    rows do not divide with any."""
    dp, n_rows = view.axes["dp"] * view.axes["cp"], analysis.batch.size
    if not n_rows or n_rows % dp:
        return None
    axes = {"dp": dp, "tp": view.axes["tp"]}
    on = mesh, hardware.links, hardware.device
    return factored_view(*on, axes, view.first_rank), math.gcd(m, n_rows // dp)


def _divisors(n: int) -> list[int]:
    return [k for k in range(1, n + 1) if n % k == 0]
