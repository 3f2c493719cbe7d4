"""Reshards: a path's moves give the right shards and gradients, at the least cost."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from autopar.passes.reshard import MoveStep, ReshardTable, ReshardTables, moves_from, step_time_s
from autopar.passes.reshard.move_graph import PrimitiveTime, move_graph
from autopar.placement import (
    COLLECTIVES,
    TABLE,
    I,
    Move,
    P,
    PrimitiveKind,
    R,
    S,
    Spec,
    TensorType,
    all_specs,
    gather,
    gradient_spec,
    local_shape,
    scatter,
)
from autopar.runtime.groups import Group, Recorder
from autopar.runtime.launch import ThreadWorld, run_threads
from tests.helpers.differentiable import moved
from tests.helpers.machines import mesh_of
from tests.helpers.nightly import nightly
from tests.helpers.strategies import reshards

TOLERANCE = 1e-13
Reshard = tuple[TensorType, tuple[int, ...], Spec, Spec]


def apply(move: Move, x: Tensor, groups: Mapping[tuple[int, ...], Group]) -> Tensor:
    """Call the runtime's function of a move as generated programs do."""
    group = groups[move.axes]
    if len(move.splits) == 2:
        source, target = ((s.dim, s.outer) for s in move.splits)
        return moved(move.name, x, group, source, target)
    return moved(move.name, x, group, *(n for s in move.splits for n in (s.dim, s.outer)))


def check_steps(
    steps: Sequence[MoveStep],
    tensor: TensorType,
    sizes: tuple[int, ...],
    source: Spec,
    target: Spec,
) -> list[list[tuple[str, int]]]:
    """Run `steps` on thread ranks, forward and backward, and check values and gradients.

    Returns rank 0's collectives as (kind, bytes): one list per step, and one of backward.
    """
    random = torch.Generator().manual_seed(0)
    value, gradient = (
        torch.randn(tensor.shape, generator=random, dtype=torch.float64) for _ in range(2)
    )
    inputs = scatter(value, tensor, source, sizes, random)
    seeds = scatter(gradient, tensor, gradient_spec(target), sizes, random)

    def work(world: ThreadWorld) -> tuple[Tensor, Tensor | None, list[list[tuple[str, int]]]]:
        groups = world.make_groups(mesh_of(*sizes))
        x = at = inputs[world.rank].requires_grad_(tensor.has_grad)
        seen: list[list[tuple[str, int]]] = []
        with Recorder() as recorder:
            for step in steps:
                at = apply(step.move, at, groups)
                assert tuple(at.shape) == local_shape(tensor, step.target, sizes)
                seen.append([(c.kind, c.size_bytes) for c in recorder.calls])
                recorder.calls.clear()
            if tensor.has_grad:
                at.backward(seeds[world.rank])
            seen.append([(c.kind, c.size_bytes) for c in recorder.calls])
        return at.detach(), x.grad, seen

    ranks = run_threads(work, math.prod(sizes))
    whole, spread = gather([y for y, _, _ in ranks], tensor, target, sizes)
    torch.testing.assert_close(whole, value, rtol=0, atol=TOLERANCE)
    assert spread <= TOLERANCE
    if tensor.has_grad:
        gradients = [g for _, g, _ in ranks if g is not None]
        whole, spread = gather(gradients, tensor, gradient_spec(source), sizes)
        torch.testing.assert_close(whole, gradient, rtol=0, atol=TOLERANCE)
        assert spread <= TOLERANCE
    return ranks[0][2]


def check_bytes(
    steps: Sequence[MoveStep], tensor: TensorType, seen: list[list[tuple[str, int]]]
) -> None:
    """The bytes a plan charges for are those of the collectives that ran."""
    *forward, backward = seen
    for step, calls in zip(steps, forward, strict=True):
        kind = step.move.forward
        assert calls == ([(kind, step.forward_bytes)] if kind in COLLECTIVES else [])
    expected = [
        (s.move.backward, s.backward_bytes)
        for s in reversed(steps)
        if tensor.has_grad and s.move.backward in COLLECTIVES
    ]
    assert backward == expected


def ring_time_s(kind: PrimitiveKind, size_bytes: int, axes: tuple[int, ...]) -> float:
    """Times that differ between primitives, sizes and axes; the outer axis is slower."""
    if kind == "identity":
        return 0.0
    per_byte = 1e-9 * sum(3.0 if axis == 0 else 1.0 for axis in axes)
    if kind not in COLLECTIVES:
        return size_bytes * 1e-10
    return 1e-6 * len(axes) + size_bytes * per_byte * (2.0 if kind == "all_reduce" else 1.0)


def latency_only_s(kind: PrimitiveKind, size_bytes: int, axes: tuple[int, ...]) -> float:
    return 1.0 if kind in COLLECTIVES else 0.0


def table_of(
    tensor: TensorType,
    sizes: tuple[int, ...],
    time_of: PrimitiveTime,
    no_reduce_scatter: bool = False,
) -> ReshardTable:
    """The table of one tensor on one mesh whose primitives take `time_of` seconds."""
    seconds = [
        time_of(p.kind, tensor.size_bytes // math.prod(sizes[a] for a in p.shards), p.axes)
        for p in move_graph(tensor, sizes).primitives
    ]
    return ReshardTables.build([tensor], [sizes], np.array([seconds]), no_reduce_scatter).of(0)


@nightly
def test_every_single_move() -> None:
    """From every spec of a matrix with a strided dim, also with two axes on one factor."""
    tensor, sizes = TensorType(((4, 4), (4,)), 8, True), (2, 2)
    legal = frozenset(all_specs(tensor, sizes))
    names = set()
    for source in all_specs(tensor, sizes):
        for step in moves_from(tensor, source, sizes, legal):
            check_bytes([step], tensor, check_steps([step], tensor, sizes, source, step.target))
            names.add(step.move.name)
    assert names == set(TABLE)


@settings(max_examples=100)
@given(reshards(), st.sampled_from([ring_time_s, latency_only_s]), st.booleans())
def test_a_path_takes_shards_to_shards_and_gradients_back(
    case: Reshard, time_of: object, no_reduce_scatter: bool
) -> None:
    tensor, sizes, source, target = case
    assert callable(time_of)
    table = table_of(tensor, sizes, time_of, no_reduce_scatter)
    steps = table.path(source, target)
    seen = check_steps(steps, tensor, sizes, source, target)
    check_bytes(steps, tensor, seen)
    kinds = {kind for calls in seen for kind, _ in calls}
    assert not (no_reduce_scatter and "reduce_scatter" in kinds)


def shortest_s(tensor: TensorType, sizes: tuple[int, ...], source: Spec) -> dict[Spec, float]:
    """The least seconds from `source` to every spec, by Dijkstra over single moves."""
    legal = frozenset(all_specs(tensor, sizes))
    best = {source: 0.0}
    queue = [(0.0, str(source), source)]
    while queue:
        time_s, _, spec = heapq.heappop(queue)
        if time_s > best[spec]:
            continue
        for step in moves_from(tensor, spec, sizes, legal):
            after_s = time_s + sum(step_time_s(step, tensor.has_grad, ring_time_s))
            if after_s < best.get(step.target, math.inf):
                best[step.target] = after_s
                heapq.heappush(queue, (after_s, str(step.target), step.target))
    return best


def legal_specs(table: ReshardTable) -> list[Spec]:
    graph, legal = table.tables.graph, table.tables.legal[table.case]
    return [spec for spec, is_legal in zip(graph.specs, legal, strict=True) if is_legal]


@settings(max_examples=60)
@given(reshards())
def test_no_path_is_cheaper(case: Reshard) -> None:
    tensor, sizes, source, _ = case
    table = table_of(tensor, sizes, ring_time_s)
    best = shortest_s(tensor, sizes, source)
    at = table.index[source]
    every = range(len(table.index))
    seconds = table.tables.between(every, every)[0][0]
    assert set(best) == set(legal_specs(table))
    for spec, time_s in best.items():
        there = table.index[spec]
        steps = table.path(source, spec)
        walked_s = sum(sum(step_time_s(s, tensor.has_grad, ring_time_s)) for s in steps)
        assert walked_s == pytest.approx(time_s, rel=1e-9, abs=1e-15)
        assert seconds[at, there] == pytest.approx(time_s, rel=1e-9, abs=1e-15)
        through = seconds[at, :] + seconds[:, there]
        assert seconds[at, there] <= through.min() * (1 + 1e-9)


@given(st.permutations([(2, 2), (2, 3), (4, 2), (6, 2)]), st.booleans())
def test_paths_are_the_same_whatever_they_are_found_with(
    sizes: list[tuple[int, ...]], has_grad: bool
) -> None:
    """Tables built together equal tables built alone, also if legal specs differ by size."""
    tensors = [TensorType(((4, n), (12,)), 8, has_grad) for n in (2, 3, 4, 6)]
    alone = [table_of(*case, ring_time_s) for case in zip(tensors, sizes, strict=True)]
    seconds = np.concatenate([table.tables.seconds for table in alone])
    together = ReshardTables.build(tensors, sizes, seconds)
    every = range(len(together.index))
    assert len({len(legal_specs(table)) for table in alone}) > 1
    for case, table in enumerate(alone):
        specs = legal_specs(table)
        assert specs == legal_specs(together.of(case))
        expected, found = table.tables.between(every, every), together.between(every, every)
        np.testing.assert_array_equal([of[case] for of in found], [of[0] for of in expected])
        source, target = specs[0], specs[-1]
        assert table.path(source, target) == together.of(case).path(source, target)


MATRIX = TensorType(((8,), (8,)), 4, True)
FUSED = TensorType(((3, 4, 2),), 4, True)


@pytest.mark.parametrize(
    ("tensor", "sizes", "source", "target", "moves"),
    [
        (MATRIX, (2,), (P,), (I,), "p_to_i@0"),
        (MATRIX, (2,), (P,), (S(1),), "p_to_s@0"),
        (MATRIX, (2,), (S(0),), (S(1),), "s_to_s@0"),
        (MATRIX, (2,), (I,), (R,), "i_to_r@0"),
        (MATRIX, (1, 2), (I, P), (I, R), "p_to_r@1"),
        (MATRIX, (2, 2), (P, P), (I, I), "p_to_i@0,1"),
        (MATRIX, (2, 2), (S(0), S(0)), (R, R), "s_to_r@0,1"),
        (MATRIX, (2, 2), (P, P), (S(0), S(0)), "p_to_s@0,1"),
        (MATRIX, (2, 2), (S(0), S(0)), (R, S(0)), "s_to_r@0,1 r_to_s@1"),
        (FUSED, (2,), (S(0, 1),), (S(0, 2),), "s_to_s@0"),
    ],
)
def test_paths_one_would_write(
    tensor: TensorType, sizes: tuple[int, ...], source: tuple[object, ...],
    target: tuple[object, ...], moves: str,
) -> None:  # fmt: skip
    table = table_of(tensor, sizes, latency_only_s)
    steps = table.path(Spec(source), Spec(target))  # type: ignore[arg-type]
    shown = " ".join(f"{s.move.name}@{','.join(map(str, s.move.axes))}" for s in steps)
    assert shown == moves


def test_splits_count_local_sizes() -> None:
    """A fused projection (3, heads 4, head_dim 2): heads on axis 1, head_dim on axis 0."""
    table = table_of(FUSED, (2, 2), ring_time_s)
    (step,) = table.path(Spec((S(0, 2), I)), Spec((S(0, 2), S(0, 1))))
    assert [(s.dim, s.outer) for s in step.move.splits] == [(0, 3)]
    (step,) = table.path(Spec((I, S(0, 1))), Spec((S(0, 2), S(0, 1))))
    assert [(s.dim, s.outer) for s in step.move.splits] == [(0, 6)]
