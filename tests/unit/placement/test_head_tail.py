"""Head-tail order: equal causal work, and moves that keep to it."""

from __future__ import annotations

import pytest
import torch

from autopar.placement import Spec, Split, folds_of, head_tail_order, intervals_of
from autopar.runtime.execute import shard
from autopar.runtime.launch import ThreadWorld, run_threads
from tests.helpers.machines import mesh_of


@pytest.mark.parametrize("n_ranks", [2, 3, 8])
def test_all_ranks_see_as_many_keys(n_ranks: int) -> None:
    """At most 2% apart. In order, the last of 8 ranks would see 15 times as many as the first."""
    size = 64 * n_ranks
    seen = [
        sum(row + 1 for a, b in intervals_of(rank, n_ranks, size, True) for row in range(a, b))
        for rank in range(n_ranks)
    ]
    assert max(seen) - min(seen) <= 0.02 * min(seen)
    in_order = [size // n_ranks * (2 * rank + 1) for rank in range(n_ranks)]
    assert max(in_order) == (2 * n_ranks - 1) * min(in_order)


def test_ranks_have_one_piece_of_the_head_and_one_of_the_tail() -> None:
    assert head_tail_order(3) == [0, 5, 1, 4, 2, 3]
    assert intervals_of(1, 3, 12, True) == [(2, 4), (8, 10)]
    assert intervals_of(1, 3, 12, False) == [(4, 8)]


def test_it_needs_pieces_and_no_axis_further_out() -> None:
    spec, both, other_order = map(Spec.parse, ("S(0) R", "S(0) S(0)", "S(0) S(0) order 1,0"))
    assert folds_of(((8,),), spec, 0, (2, 2)) == 2
    assert folds_of(((6,),), spec, 0, (2, 2)) == 1
    assert folds_of(((8,),), both, 0, (2, 2)) == 2
    assert folds_of(((8,),), both, 1, (2, 2)) == 1
    assert folds_of(((8,),), other_order, 0, (2, 2)) == 1


@pytest.mark.parametrize("outer", [1, 3])
def test_moves_and_deliveries_agree(outer: int) -> None:
    """Every primitive of a folded split, with a dim of several factors; also over two axes, of
    which the inner one cuts what the outer one has."""
    whole = torch.arange(2 * outer * 24).reshape(2, outer * 24)
    dims = ((2,), (outer, 24)) if outer > 1 else ((2,), (24,))
    shard_of = "S(1.1)" if outer > 1 else "S(1)"

    def work(world: ThreadWorld) -> None:
        mesh = mesh_of(2, 3)
        groups = world.make_groups(mesh)
        for axes in ((0,), (0, 1)):
            g, split = groups[axes], Split(1, outer, 2)
            spec = Spec.parse(" ".join(shard_of if axis in axes else "R" for axis in (0, 1)))
            coordinate = mesh.coordinate(world.rank)
            mine = g.slice(whole, split)
            assert torch.equal(mine, shard(whole, dims, spec, mesh.sizes, coordinate, folded=0))
            assert torch.equal(g.all_gather(mine, split), whole)
            assert torch.equal(g.all_reduce(g.zero_pad(mine, split)), whole)
            assert torch.equal(g.reduce_scatter(whole, split), mine * g.size)
        g, rows = groups[0,], Split(0)
        mine = g.slice(whole, Split(1, outer, 2))
        assert torch.equal(g.all_to_all(mine, Split(1, outer, 2), rows), g.slice(whole, rows))
        back = g.all_to_all(g.slice(whole, rows), rows, Split(1, outer, 2))
        assert torch.equal(back, mine)

    run_threads(work, 6)
