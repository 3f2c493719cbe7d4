"""Every row of the reshard table against the definition of placements, on threads and gloo.

A row takes placement a to b: inputs are one global tensor by a, outputs by b; gradients the other
way, under the gradient placements (R <-> P, I, S).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.errors import VerificationError
from autopar.placement import TABLE, Split
from autopar.runtime.groups import CollectiveCall, Group, Recorder, cut, join, make_groups, phase
from autopar.runtime.launch import ThreadWorld, run_threads
from tests.helpers.differentiable import moved
from tests.helpers.machines import mesh_of
from tests.helpers.pools import Pool
from tests.helpers.tensors import random_tensor

SHAPE = (12, 144, 2)
N_FACTOR = 12  # dim 1 of SHAPE is 12 x 12, so both factors split over 2, 3, 4 and 6 ranks
GRADIENT_PLACEMENT = {"r": "p", "i": "i", "s": "s", "p": "r"}
Groups = Mapping[tuple[int, ...], Group]


@dataclass(frozen=True)
class Case:
    """One row with its splits: as arguments of the move, and as cuts of the global tensor."""

    row: str
    arguments: Callable[[int], tuple[Any, ...]] = lambda n: ()
    source: Split | None = None
    target: Split | None = None

    def __str__(self) -> str:
        return f"{self.row}-{self.source}-{self.target}"


def single_split_cases(row: str) -> list[Case]:
    cases = []
    for dim, outer in ((0, 1), (1, 1), (1, N_FACTOR), (1, 2)):
        split = Split(dim, outer)
        sources = (split, None) if row.startswith("s") else (None, split)
        cases.append(Case(row, lambda n, dim=dim, outer=outer: (dim, outer), *sources))  # type: ignore[misc]
    return cases


CASES = [
    *(Case(row) for row in TABLE if "s" not in row.split("_")),
    *(
        c
        for row in TABLE
        if "s" in row.split("_") and row != "s_to_s"
        for c in single_split_cases(row)
    ),
    Case("s_to_s", lambda n: ((0, 1), (1, 1)), Split(0), Split(1)),
    Case("s_to_s", lambda n: ((1, 2), (0, 1)), Split(1, 2), Split(0)),
    # Between the two factors of one dim: outer sizes are local, so they depend on the split.
    Case("s_to_s", lambda n: ((1, N_FACTOR // n), (1, 1)), Split(1, N_FACTOR), Split(1)),
    Case("s_to_s", lambda n: ((1, 1), (1, N_FACTOR // n)), Split(1), Split(1, N_FACTOR)),
]


def test_cases_cover_the_table() -> None:
    assert {case.row for case in CASES} == set(TABLE)


def indices(split: Split, n: int, rank: int) -> Tensor:
    """The positions along `split.dim` of SHAPE that `rank` holds, element by element."""
    size = SHAPE[split.dim]
    rest = size // split.outer
    return torch.tensor([i for i in range(size) if i % rest // (rest // n) == rank])


def placed(placement: str, x: Tensor, split: Split | None, n: int, rank: int) -> Tensor:
    """The local tensor of `rank` if the global value is `x`."""
    if placement == "s":
        assert split is not None
        return x.index_select(split.dim, indices(split, n, rank))
    if placement == "p":
        parts = [random_tensor(1000 + r, *x.shape) for r in range(n - 1)]
        return [*parts, x - sum(parts)][rank]
    return x.clone()


def assert_placed(
    placement: str, locals_: list[Tensor], x: Tensor, split: Split | None, what: str
) -> None:
    n = len(locals_)
    if placement == "p":
        torch.testing.assert_close(sum(locals_), x, rtol=0, atol=1e-12, msg=what)
        return
    for rank, local in enumerate(locals_):
        expected = placed(placement, x, split, n, rank)
        torch.testing.assert_close(local, expected, rtol=0, atol=1e-12, msg=f"{what}, rank {rank}")


def run_case(case: Case, g: Group) -> tuple[Tensor, Tensor]:
    """This rank's output and gradient of the case."""
    a, b = case.row.split("_to_")
    x, upstream = random_tensor(g.ranks[0], *SHAPE), random_tensor(100 + g.ranks[0], *SHAPE)
    local = placed(a, x, case.source, g.size, g.rank).requires_grad_()
    out = moved(case.row, local, g, *case.arguments(g.size))
    assert out.is_contiguous()
    out.backward(placed(GRADIENT_PLACEMENT[b], upstream, case.target, g.size, g.rank))
    assert local.grad is not None
    plain = moved(case.row, local.detach(), g, *case.arguments(g.size))
    assert torch.equal(plain, out)
    return out.detach(), local.grad


def check_case(
    case: Case, by_rank: Mapping[int, tuple[Tensor, Tensor]], ranks: tuple[int, ...]
) -> None:
    a, b = case.row.split("_to_")
    x, upstream = random_tensor(ranks[0], *SHAPE), random_tensor(100 + ranks[0], *SHAPE)
    outs, grads = ([by_rank[r][i] for r in ranks] for i in (0, 1))
    assert_placed(b, outs, x, case.target, f"{case} value on {ranks}")
    assert_placed(
        GRADIENT_PLACEMENT[a], grads, upstream, case.source, f"{case} gradient on {ranks}"
    )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_row_on_threads(case: Case) -> None:
    mesh = mesh_of(2, 3)

    def work(world: ThreadWorld) -> dict[tuple[int, ...], tuple[Tensor, Tensor]]:
        return {axes: run_case(case, g) for axes, g in world.make_groups(mesh).items()}

    results = run_threads(work, mesh.n_ranks)
    for axes in ((0,), (1,), (0, 1)):
        for ranks in mesh.groups(axes):
            check_case(case, {r: results[r][axes] for r in ranks}, ranks)


DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool)


def numbers_of_rows(g: Group) -> tuple[list[int], list[int]]:
    """Row counts sent to and received from every member; some are 0."""
    return (
        [(2 * g.rank + r) % 3 for r in range(g.size)],
        [(2 * r + g.rank) % 3 for r in range(g.size)],
    )


def primitives_of(g: Group, x: Tensor) -> list[Tensor]:
    scalar = x[3, 3]
    return [
        g.all_reduce(x),
        g.all_reduce(x, op="max"),
        g.all_reduce(scalar),
        g.all_gather(x, Split(1, 2)),
        g.reduce_scatter(x, Split(0, 3)),
        g.all_to_all(x, Split(0, 3), Split(1)),
        g.slice(x, Split(1, 2)),
        g.zero_pad(x, Split(1, 2)),
        g.keep_first(scalar),
    ]


def primitives(groups: Groups, rank: int) -> list[Tensor]:
    """Every primitive on every dtype, on strided inputs and scalars; sums are exact."""
    outs = []
    for g in groups.values():
        for dtype in DTYPES:
            x = (torch.arange(96).reshape(8, 12) * (rank + 1) % 5 - 1).to(dtype).t()
            sent, received = numbers_of_rows(g)
            rows = x[: sum(sent)]
            came = g.send_rows(rows, sent, received, rows.nbytes).wait()
            returned = g.send_rows(came, received, sent, rows.nbytes).wait()
            assert torch.equal(returned, rows)
            outs += [came, returned, *primitives_of(g, x)]
    assert all(out.is_contiguous() for out in outs)
    return outs


def on_gloo() -> tuple[int, list[Any], list[Tensor]]:
    mesh = mesh_of(2, 2)
    groups, again = make_groups(mesh), make_groups(mesh)
    line = make_groups(mesh_of(4))
    rank = torch.distributed.get_rank()
    for axes, g in groups.items():
        assert g.process_group is again[axes].process_group  # type: ignore[attr-defined]
    assert groups[0, 1].process_group is torch.distributed.group.WORLD  # type: ignore[attr-defined]
    assert line[(0,)].process_group is torch.distributed.group.WORLD  # type: ignore[attr-defined]
    rows = [{axes: run_case(case, g) for axes, g in groups.items()} for case in CASES]
    return rank, rows, primitives(groups, rank)


def test_rows_and_primitives_on_gloo_processes(workers: Pool) -> None:
    mesh = mesh_of(2, 2)
    results = workers(4).run(on_gloo)
    for axes in ((0,), (1,), (0, 1)):
        for ranks in mesh.groups(axes):
            for i, case in enumerate(CASES):
                check_case(case, {r: results[r][1][i][axes] for r in ranks}, ranks)
    threads = run_threads(lambda w: primitives(w.make_groups(mesh), w.rank), 4)
    for rank, (_, _, got) in enumerate(results):
        assert len(got) == len(threads[rank]) == 3 * len(DTYPES) * 11
        for a, b in zip(got, threads[rank], strict=True):
            assert a.dtype == b.dtype
            assert torch.equal(a, b)


def test_primitives_return_new_tensors() -> None:
    def work(world: ThreadWorld) -> None:
        g = world.make_groups(mesh_of(2))[(0,)]
        x = torch.ones(12, 8)
        for out in primitives_of(g, x):
            out.fill_(7)
        assert torch.equal(x, torch.ones(12, 8))

    run_threads(work, 2)


def test_cut_and_join_are_inverse() -> None:
    x = random_tensor(0, 4, 24)
    for split in (Split(0), Split(1), Split(1, 3)):
        assert torch.equal(join(cut(x, split, 4), split), x)


@pytest.mark.parametrize("split", [Split(0), Split(1, 4), Split(2)], ids=str)
def test_a_split_that_does_not_divide_is_refused(split: Split) -> None:
    def work(world: ThreadWorld) -> None:
        world.make_groups(mesh_of(2))[(0,)].slice(torch.ones(3, 12), split)

    with pytest.raises(VerificationError, match=rf"\(3, 12\) has no dim {split.dim}"):
        run_threads(work, 2)


def test_recorder_counts_bytes_as_nccl_does_and_knows_the_phase() -> None:
    def work(world: ThreadWorld) -> list[CollectiveCall]:
        g = world.make_groups(mesh_of(1, 2))[(1,)]
        x = torch.ones(4, 4, dtype=torch.float64, requires_grad=True)
        g.all_reduce(x)
        with Recorder() as recorder:
            moved("s_to_r", x, g, 0).sum().backward()
            with phase("grad_sync"):
                g.all_reduce(x)
            moved("s_to_s", x, g, (0, 1), (1, 1))
            g.slice(x, Split(0))
        g.all_reduce(x)
        return recorder.calls

    expected = [
        CollectiveCall("all_gather", ("tp",), 256, "forward"),
        CollectiveCall("reduce_scatter", ("tp",), 256, "backward"),
        CollectiveCall("all_reduce", ("tp",), 128, "grad_sync"),
        CollectiveCall("all_to_all", ("tp",), 128, "forward"),
    ]
    assert run_threads(work, 2) == [expected, expected]
