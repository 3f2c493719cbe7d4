"""Fused reshards equal the unfused ones, in fewer calls; gradient sync begins beside backward."""

from __future__ import annotations

from collections import Counter
from typing import cast

import pytest
import torch

import autopar
from autopar import Manual
from autopar.placement import COLLECTIVES, PrimitiveKind, Split
from autopar.program.communication import rank_collectives, sync_bucket_bytes
from autopar.runtime.collectives import apply_primitive
from autopar.runtime.execute.bucketed import BucketItem, bucketed_apply
from autopar.runtime.groups import Group, Recorder
from autopar.runtime.launch import ThreadWorld, run_threads
from tests.helpers.harness import generated_code
from tests.helpers.jobs import MlpWithLoss, machine
from tests.helpers.machines import mesh_of
from tests.helpers.ranks import above, pipeline_step
from tests.helpers.tensors import random_tensor

SPLITS: dict[str, list[tuple[Split, ...]]] = {
    "all_reduce": [()],
    "all_gather": [(Split(0),), (Split(1, 3),), (Split(1),)],
    "reduce_scatter": [(Split(0),), (Split(1, 3),), (Split(1),)],
    "all_to_all": [(Split(0), Split(1, 3)), (Split(1), Split(0, 2)), (Split(1, 3), Split(1))],
}


def items_of(kind: str, g: Group, rank: int, n_tensors: int) -> list[BucketItem]:
    items: list[BucketItem] = []
    for i in range(n_tensors):
        dtype = torch.float32 if i % 4 == 3 else torch.float64
        x = random_tensor(10 * rank + i, 8, 12, *([i] if i % 3 else [])).to(dtype)
        step = (cast(PrimitiveKind, kind), g, SPLITS[kind][i % len(SPLITS[kind])])
        items.append((x, (step,)))
    return items


@pytest.mark.parametrize("bucket_bytes", [1, 4000, 1 << 30])
@pytest.mark.parametrize("kind", sorted(COLLECTIVES))
def test_bucketed_equals_unbucketed(kind: str, bucket_bytes: int) -> None:
    def work(world: ThreadWorld) -> tuple[list[int], int]:
        g = world.make_groups(mesh_of(2, 2))[0, 1]
        items = items_of(kind, g, world.rank, 9)
        expected = [apply_primitive(k, x, g_, s) for x, ((k, g_, s),) in items]
        with Recorder() as recorder:
            got = bucketed_apply(items, bucket_bytes)
        for a, b in zip(got, expected, strict=True):
            assert a.is_contiguous()
            assert torch.equal(a, b)
        largest = max(x.nbytes * (g.size if kind == "all_gather" else 1) for x, _ in items)
        sizes = [call.size_bytes for call in recorder.calls]
        assert all(size <= max(bucket_bytes, largest) for size in sizes)
        return sizes, sum(x.nbytes for x, _ in items)

    results = run_threads(work, 4)
    sizes, total_bytes = results[0]
    assert all(result[0] == sizes for result in results)
    n_calls = {1: 9, 4000: len(sizes), 1 << 30: 2}[bucket_bytes]
    assert len(sizes) == n_calls
    assert sum(sizes) == total_bytes * (4 if kind == "all_gather" else 1)


def test_rounds_fuse_equal_steps_and_run_local_ones_directly() -> None:
    def work(world: ThreadWorld) -> list[tuple[str, str, int]]:
        groups = world.make_groups(mesh_of(2, 2))
        dp, tp = groups[(0,)], groups[(1,)]
        rows = (Split(0),)
        xs = [random_tensor(10 * world.rank + i, 8, 4).requires_grad_() for i in range(4)]
        items: list[BucketItem] = [
            (xs[0], (("reduce_scatter", dp, rows), ("all_reduce", tp, ()))),
            (xs[1], (("slice", tp, rows), ("reduce_scatter", dp, rows))),
            (xs[2], (("all_reduce", tp, ()),)),
            (xs[3], ()),
        ]
        with Recorder() as recorder:
            got = bucketed_apply(items, 1 << 20)
        assert torch.equal(got[0], tp.all_reduce(dp.reduce_scatter(xs[0], *rows)))
        assert torch.equal(got[1], dp.reduce_scatter(tp.slice(xs[1], *rows), *rows))
        assert torch.equal(got[2], tp.all_reduce(xs[2]))
        assert torch.equal(got[3], xs[3])
        assert not any(x.requires_grad for x in got)
        return [(c.kind, c.axes[0], c.size_bytes) for c in recorder.calls]

    calls = [
        ("reduce_scatter", "dp", 8 * (32 + 16)),
        ("all_reduce", "tp", 8 * 32),
        ("all_reduce", "tp", 8 * 16),
    ]
    assert run_threads(work, 4) == [calls] * 4


def test_a_number_is_fused_with_a_tensor() -> None:
    """The gradient of a learned temperature has no dims."""

    def work(world: ThreadWorld) -> None:
        g = world.make_groups(mesh_of(2))[(0,)]
        xs = [random_tensor(world.rank), random_tensor(world.rank + 2, 3)]
        got = bucketed_apply([(x, (("all_reduce", g, ()),)) for x in xs], 1 << 20)
        for found, x in zip(got, xs, strict=True):
            assert torch.equal(found, g.all_reduce(x))

    run_threads(work, 2)


__all__ = ["generated_code"]

MIB = 2**20
WIDTH, N_LAYERS = 512, 4  # a weight has 2 MiB, so it fills buckets of its own
# Period of the sync -> recipe: once a step, and once a microbatch.
PLANS = {
    "step": Manual(dp=2, tp=2),
    "step of four microbatches": Manual(dp=2, tp=2, microbatch_size=2),
    "microbatch": Manual(dp=2, tp=2, zero=2, microbatch_size=4),
}


@pytest.mark.parametrize("name", PLANS)
def test_it_begins_beside_backward(name: str) -> None:
    """Gradients are those of one process, and the calls are those foretold."""
    torch.manual_seed(0)
    batch = {key: torch.randn(16, WIDTH, dtype=torch.float64) for key in ("x", "y")}
    plan = autopar.plan(
        MlpWithLoss(WIDTH, N_LAYERS), machine((1, 4)), batch, precision="fp64", manual=PLANS[name]
    )
    assert plan.bound is not None
    pipeline = plan.bound.pipeline
    errors, calls = pipeline_step(plan.bound.analysis.program, pipeline, batch, 0)
    assert above(errors) == {}
    for rank, made in enumerate(calls):
        foretold: Counter[tuple[str, str, int]] = Counter()
        for c in rank_collectives(pipeline, rank):
            foretold[c.kind, c.phase, c.size_bytes] += c.count
        assert Counter((c.kind, c.phase, c.size_bytes) for c in made) == foretold
        phases = [c.phase for c in made]
        assert any(p == "grad_sync" and "backward" in phases[i:] for i, p in enumerate(phases))


def test_buckets_are_an_eighth_within_bounds() -> None:
    sizes = [sync_bucket_bytes(n * MIB) for n in (1, 8, 40, 4000)]
    assert sizes == [MIB, MIB, 5 * MIB, 25 * MIB]
