"""Thread ranks: repeatable results, and errors instead of hangs."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

from autopar.errors import MeshError, VerificationError
from autopar.placement import Split
from autopar.runtime.groups import Group
from autopar.runtime.launch import ThreadWorld, run_threads
from tests.helpers.machines import mesh_of

MESH = mesh_of(2, 2)


def test_groups_are_those_of_the_mesh() -> None:
    groups = run_threads(lambda world: world.make_groups(mesh_of(2, 1, 2)), 4)
    for rank, mine in enumerate(groups):
        assert list(mine) == [(0,), (2,), (0, 2)]
        assert [g.label for g in mine.values()] == ["dp", "cp", "dp+cp"]
        assert all(g.ranks[g.rank] == rank for g in mine.values())
        assert mine[0, 2].ranks == (0, 1, 2, 3)
    with pytest.raises(MeshError, match="ranks up to 3"):
        run_threads(lambda world: world.make_groups(MESH), 2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda g, x: g.all_gather(x, Split(0)), r"all_reduce\(float32 \[4, 4\], sum\) over dp"),
        (lambda g, x: g.all_reduce(x[:2]), r"all_reduce\(float32 \[2, 4\], sum\)"),
        (lambda g, x: g.all_reduce(x.double()), r"all_reduce\(float64 \[4, 4\], sum\)"),
        (lambda g, x: g.all_reduce(x, op="max"), r"all_reduce\(float32 \[4, 4\], max\)"),
    ],
    ids=["kind", "shape", "dtype", "op"],
)
def test_members_that_disagree_are_named(
    call: Callable[[Group, torch.Tensor], object], message: str
) -> None:
    def work(world: ThreadWorld) -> None:
        g = world.make_groups(MESH)[(0,)]
        x = torch.ones(4, 4)
        if world.rank == 2:
            call(g, x)
        else:
            g.all_reduce(x)

    with pytest.raises(VerificationError, match=message) as caught:
        run_threads(work, 4)
    assert "rank 0 calls" in str(caught.value)
    assert "rank 2 calls" in str(caught.value)


def test_splits_that_differ_are_named() -> None:
    def work(world: ThreadWorld) -> None:
        world.make_groups(MESH)[(1,)].all_gather(torch.ones(4, 4), Split(0, 1 + world.rank))

    with pytest.raises(VerificationError, match=r"dim 0 outer 1.*dim 0 outer 2"):
        run_threads(work, 4)


def test_an_error_of_one_rank_releases_the_others() -> None:
    def work(world: ThreadWorld) -> None:
        g = world.make_groups(MESH)[0, 1]
        g.all_reduce(torch.ones(1))
        if world.rank == 1:
            raise ZeroDivisionError("planted")
        g.all_reduce(torch.ones(1))

    with pytest.raises(ZeroDivisionError, match="planted") as caught:
        run_threads(work, 4)
    assert caught.value.__notes__ == ["raised on rank 1 of 4"]


def test_waits_that_never_end_are_named() -> None:
    def crossed(world: ThreadWorld) -> None:
        groups = world.make_groups(MESH)
        order = [(0,), (1,)] if world.rank in (0, 3) else [(1,), (0,)]
        for axes in order:
            groups[axes].all_reduce(torch.ones(1))

    with pytest.raises(VerificationError, match=r"rank 0 in .* over dp .* without \[2\]"):
        run_threads(crossed, 4)

    def early(world: ThreadWorld) -> None:
        if world.rank != 3:
            world.make_groups(MESH)[0, 1].all_reduce(torch.ones(1))

    with pytest.raises(VerificationError, match="1 of 4 ranks have returned"):
        run_threads(early, 4)


def test_a_rank_that_does_not_arrive_times_out() -> None:
    def work(world: ThreadWorld) -> None:
        if world.rank == 1:
            time.sleep(3.0)
        else:
            world.make_groups(mesh_of(2))[(0,)].all_reduce(torch.ones(1))

    with pytest.raises(VerificationError, match=r"rank 0 waited 0\.2 s for rank 1"):
        run_threads(work, 2, timeout_s=0.2)
