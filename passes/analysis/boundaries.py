"""How a value may be placed when it crosses between two stages.

Every slice of a tensor should cross once and be gathered inside the stage that reads it. So a
crossing tensor is S on each axis of more than one rank, wherever a factor divides. Where none
divides, one rank of the axis takes part: a sent tensor is R there (its gradient P), a received one
P (its gradient R). See `Boundary` in `autopar/program/stage_program.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

from autopar.placement import I, P, R, S, Spec, TensorType, divides, illegal_reason

Side = Literal["sent", "received"]


@lru_cache(maxsize=4096)
def boundary_specs(tensor: TensorType, sizes: tuple[int, ...], side: Side) -> tuple[Spec, ...]:
    """The legal specs that cut the tensor on the most axes; never empty.

    Cuts of leading dims come first, so that ties prefer the batch.
    """
    legal: dict[int, list[Spec]] = {}
    for spec in cuts(tensor, sizes, side):
        if divides(tensor, spec.placements, sizes):
            legal.setdefault(n_cut(spec), []).append(spec)
    return tuple(legal[max(legal)])


def cuts(tensor: TensorType, sizes: Sequence[int], side: Side) -> list[Spec]:
    """All specs of a crossing tensor if every factor divides; they depend on its cells only."""
    rest = R if side == "sent" else P
    cells = [S(*cell) for cell in tensor.cells]
    options = [(I,) if n == 1 else (*cells, rest) for n in sizes]
    return [Spec(placements) for placements in itertools.product(*options)]


def n_cut(spec: Spec) -> int:
    """The number of axes that cut a tensor."""
    return sum(p.is_shard for p in spec.placements)


def is_boundary_spec(tensor: TensorType, spec: Spec, sizes: Sequence[int], side: Side) -> bool:
    """May the tensor cross in this spec? An edited plan may cut fewer axes than it could."""
    rest = R if side == "sent" else P
    return illegal_reason(tensor, spec, sizes) is None and all(
        p.is_shard or p == rest for p, n in zip(spec.placements, sizes, strict=True) if n > 1
    )
