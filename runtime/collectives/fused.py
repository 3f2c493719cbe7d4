"""One collective for many tensors, on a flat buffer.

A collective over n ranks costs a latency α per call besides its bytes. Tensor t contributes to the
buffer of one call for all

    all_reduce       t                       [numel]
    all_gather       t, to every rank        [numel]        -> [n, numel], joined along t's split
    reduce_scatter   cut(t)                  [n, numel/n]   -> [numel/n]
    all_to_all       cut(t) along target     [n, numel/n]   -> same, joined along t's source

with `cut` and `join` of `runtime/groups/group.py`. They keep each rank's part of each tensor
together, so every tensor's result equals that of a call of its own, strided splits included. The
order of a buffer is that of the tensors, so sums do not depend on what is ready first.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from autopar.placement import PrimitiveKind, Split
from autopar.runtime.groups import Group, Pending, cut, join


def start_fused(
    kind: PrimitiveKind,
    g: Group,
    xs: list[Tensor],
    splits_of: Sequence[Sequence[Split]],
    owns: bool = False,
) -> Pending[list[Tensor]]:
    """Begin one collective for all of `xs`; empties the list. A tensor alone is not copied.

    `splits_of` are each tensor's splits, as those of `Group.start`. With `owns` nobody else reads
    the tensors.
    """
    if len(xs) == 1:
        return g.start(kind, xs.pop(), splits_of[0], owns).then(lambda value: [value])
    rows = Split(0)
    shapes = [x.shape for x in xs]
    match kind:
        case "all_reduce" | "all_gather":
            flat = torch.cat([x.reshape(-1) for x in xs])
            xs.clear()
            if kind == "all_reduce":
                return g.start(kind, flat, owns=True).then(lambda total: _parts(total, shapes))
            return g.start(kind, flat, [rows]).then(
                lambda whole: _joined(_parts(whole.view(g.size, -1), shapes), splits_of)
            )
        case "reduce_scatter":
            stacks = [cut(x, splits[0], g.size) for x, splits in zip(xs, splits_of, strict=True)]
            flat, pieces = _side_by_side(stacks), [s.shape[1:] for s in stacks]
            xs.clear()
            return g.start(kind, flat, [rows]).then(lambda mine: _parts(mine[0], pieces))
        case "all_to_all":
            stacks = [cut(x, splits[1], g.size) for x, splits in zip(xs, splits_of, strict=True)]
            flat, pieces = _side_by_side(stacks), [s.shape[1:] for s in stacks]
            xs.clear()
            return g.start(kind, flat, [rows, rows]).then(
                lambda received: _joined(_parts(received, pieces), splits_of)
            )
    raise AssertionError(f"{kind} is no collective")


def _joined(stacks: list[Tensor], splits_of: Sequence[Sequence[Split]]) -> list[Tensor]:
    return [join(stack, splits[0]) for stack, splits in zip(stacks, splits_of, strict=True)]


def _side_by_side(stacks: list[Tensor]) -> Tensor:
    """Stacks [n, *piece] as one buffer [n, total]: each rank's part is one row."""
    return torch.cat([s.flatten(1) for s in stacks], dim=1)


def _parts(flat: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Cut the last dim of `flat` back into tensors of `shapes` (after a leading dim, if any)."""
    parts = flat.split([prod(shape) for shape in shapes], dim=-1)
    lead = flat.shape[:-1]
    return [p.reshape((*lead, *shape)) for p, shape in zip(parts, shapes, strict=True)]
