"""Hypothesis strategies that several test files share."""

from __future__ import annotations

import itertools
import math

from hypothesis import strategies as st

from autopar.cost.simulate import PartWork, SplitBackward, StageTimes
from autopar.placement import (
    ELLIPSIS,
    Dim,
    Notation,
    Placement,
    S,
    Spec,
    TensorType,
    Term,
    all_specs,
)
from autopar.schedule import CHUNKS, ORDERS, Schedule, Transfer, devices_of, forward_only

AXIS_SIZES = ((2,), (4,), (2, 2), (1, 4), (2, 3))
NAMES = ("a", "b", "c", "head_dim", "x1")


def placements() -> st.SearchStrategy[Placement]:
    plain = st.sampled_from([Placement(kind) for kind in "IRP"])
    return plain | st.builds(S, st.integers(0, 3), st.integers(0, 2))


@st.composite
def specs(draw: st.DrawFn, max_axes: int = 3) -> Spec:
    """Any spec in canonical form, whatever the tensor."""
    placed = draw(st.lists(placements(), min_size=1, max_size=max_axes))
    return Spec.of(placed, draw(st.permutations(range(len(placed)))))


@st.composite
def tensor_types(
    draw: st.DrawFn, max_dims: int = 2, max_factors: int = 3, max_cells: int = 4
) -> TensorType:
    """Up to three factors per dim; sizes that divide by 2, 3 or 4, and one that does not."""
    sizes = st.sampled_from((2, 3, 4, 5, 6, 8, 12))
    dims: list[tuple[int, ...]] = []
    for _ in range(draw(st.integers(1, max_dims))):
        room = max_cells - sum(map(len, dims))
        n_least = min(draw(st.sampled_from((1, 1, 2, 0))), room)
        factors = draw(st.lists(sizes, min_size=n_least, max_size=min(max_factors, room)))
        dims.append(tuple(factors) if math.prod(factors) <= 144 else (12,))
    return TensorType(tuple(dims), 8, draw(st.booleans()))


@st.composite
def reshards(draw: st.DrawFn) -> tuple[TensorType, tuple[int, ...], Spec, Spec]:
    """A tensor, a mesh's axis sizes, and two specs that are legal on them."""
    tensor, sizes = draw(tensor_types()), draw(st.sampled_from(AXIS_SIZES))
    legal = all_specs(tensor, sizes)
    return tensor, sizes, draw(st.sampled_from(legal)), draw(st.sampled_from(legal))


@st.composite
def notations(draw: st.DrawFn) -> Notation:
    """Terms of distinct names, products, dims of 1, sizes, and at most one ellipsis each."""

    def term() -> Term:
        names = draw(st.lists(st.sampled_from(NAMES), unique=True))
        dims: list[Dim] = []
        for name in names:
            if dims and len(dims[-1]) < 3 and draw(st.booleans()):
                dims[-1] = (*dims[-1], name)
            else:
                dims.append((name,))
        for dim in draw(st.sampled_from(((), ((),), ((), ()), (ELLIPSIS,), (ELLIPSIS, ())))):
            dims.insert(draw(st.integers(0, len(dims))), dim)
        return tuple(dims)

    inputs = tuple(term() for _ in range(draw(st.integers(1, 3))))
    outputs = tuple(term() for _ in range(draw(st.integers(1, 2))))
    used = sorted({n for t in (*inputs, *outputs) for dim in t for n in dim} - {"..."})
    if not used:
        return Notation(inputs, outputs)
    frozen = draw(st.frozensets(st.sampled_from(used)))
    sizes = draw(st.dictionaries(st.sampled_from(used), st.integers(1, 12)))
    return Notation(inputs, outputs, frozen, frozenset(sizes.items()))


def placed(order: str, n_devices: int, n_microbatches: int, n_chunks: int = 1) -> Schedule:
    """A schedule on the placement of its order."""
    return ORDERS[order](devices_of(order, n_devices, n_chunks), n_microbatches)


@st.composite
def schedules(draw: st.DrawFn, max_stages: int = 12, max_microbatches: int = 12) -> Schedule:
    """Of every order, without messages."""
    order = draw(st.sampled_from(("forward", *ORDERS)))
    if order == "forward":
        devices = draw(st.permutations(range(draw(st.integers(1, max_stages // 2))))) * 2
        return forward_only(devices, draw(st.integers(1, max_microbatches)))
    fewest, most = CHUNKS[order]
    n_chunks = draw(st.integers(fewest, most or 4))
    n_devices = draw(st.integers(1, max_stages // n_chunks))
    fewest_m = 2 * n_devices if order == "dualpipe-v" else 1
    n_microbatches = draw(st.integers(fewest_m, max(fewest_m, max_microbatches)))
    return placed(order, n_devices, n_microbatches, n_chunks)


@st.composite
def transfers(draw: st.DrawFn, n_stages: int) -> frozenset[Transfer]:
    """Any graph over ordered stages: skips, missing links, pairs without gradient."""
    pairs = list(itertools.combinations(range(n_stages), 2))
    chosen = draw(st.sets(st.sampled_from(pairs))) if pairs else set()
    return frozenset(Transfer(a, b, draw(st.booleans())) for a, b in sorted(chosen))


@st.composite
def stage_times(draw: st.DrawFn, splits_backward: bool = False) -> StageTimes:
    """Durations of every part of a step on one stage: some nothing, some overlapped."""
    seconds = st.sampled_from((0.0, 0.5)) | st.floats(0.1, 10.0)

    def spent() -> PartWork:
        return PartWork(draw(seconds), draw(seconds), draw(seconds))

    return StageTimes(
        n_ranks=draw(st.integers(1, 3)),
        before=spent(),
        forward=spent(),
        backward=SplitBackward(spent(), spent()) if splits_backward else spent(),
        after=spent(),
        update_s=draw(seconds),
        sync_s=draw(seconds),
        n_sync_buckets=draw(st.integers(1, 4)),
        overlap_slowdown_fraction=draw(st.sampled_from((0.0, 0.3, 1.0))),
    )
