"""Which links a group crosses: examples, and any view against a count of ranks per node."""

from __future__ import annotations

from collections import Counter
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cost.hardware import LinkGroup, flat_group, group_on
from autopar.cost.hardware.topology import group_of
from autopar.cost.laws import CostModel
from autopar.mesh import Device, Link, LogicalMesh, Mesh, factored_view

SLOW, FAST = Link(1e-5, 1e-9), Link(1e-6, 1e-11)
DEVICE = Device(flops_per_s=1e12, bytes_per_s=1e11, memory_bytes=1e9)


def view(shape: tuple[int, int], first_rank: int = 0, **axes: int) -> LogicalMesh:
    return factored_view(Mesh(shape), (SLOW, FAST), DEVICE, axes, first_rank)


@pytest.mark.parametrize(
    ("members", "ranks_per_node", "expected"),
    [
        (range(8), 8, (8, 1, 8)),
        (range(16), 8, (16, 2, 8)),
        (range(0, 16, 4), 8, (4, 2, 2)),
        (range(0, 32, 8), 8, (4, 4, 1)),
        (range(6, 14), 8, (8, 2, 2)),
    ],
)
def test_a_group_is_counted_by_nodes(
    members: range, ranks_per_node: int, expected: tuple[int, int, int]
) -> None:
    assert group_of(members, ranks_per_node, FAST, SLOW) == LinkGroup(*expected, FAST, SLOW)


def test_a_stage_that_begins_inside_a_node() -> None:
    # Ranks 4 to 11 on nodes of 8: tensor-parallel groups stay in a node, data-parallel cross.
    mesh = view((2, 8), 4, dp=2, tp=4)
    assert group_on(mesh, (1,)) == LinkGroup(4, 1, 4, FAST, SLOW)
    assert group_on(mesh, (0,)) == LinkGroup(2, 2, 1, FAST, SLOW)
    # From rank 6 on, some groups of four span two nodes: the axis is as slow as those.
    assert group_on(view((2, 8), 6, dp=2, tp=4), (1,)) == LinkGroup(4, 2, 2, FAST, SLOW)
    assert group_on(view((2, 8), 5, dp=2, tp=4), (1,)) == LinkGroup(4, 2, 1, FAST, SLOW)


def test_a_view_without_nodes_has_its_slowest_axis() -> None:
    mesh = LogicalMesh((2, 2, 1), ("a", "b", "c"), (SLOW, FAST, SLOW), DEVICE)
    assert group_on(mesh, (0, 1)) == flat_group(4, SLOW)
    assert group_on(mesh, (1, 2)) == flat_group(2, FAST), "an axis of one rank carries nothing"
    assert group_on(mesh, (2,)) == flat_group(1, SLOW)


@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    ranks_per_node=st.integers(1, 9),
    first_rank=st.integers(0, 9),
    data=st.data(),
)
def test_the_group_of_an_axis_spans_most_nodes(
    sizes: list[int], ranks_per_node: int, first_rank: int, data: st.DataObject
) -> None:
    n_nodes = -(-(first_rank + prod(sizes)) // ranks_per_node)
    named = {f"a{i}": size for i, size in enumerate(sizes)}
    mesh = view((n_nodes, ranks_per_node), first_rank, **named)
    axes = data.draw(st.lists(st.integers(0, len(sizes) - 1), min_size=1, unique=True))
    held = [Counter(rank // ranks_per_node for rank in g).values() for g in mesh.groups(axes)]
    most = max(len(counts) for counts in held)
    fewest = min(min(counts) for counts in held if len(counts) == most)
    assert group_on(mesh, axes) == LinkGroup(mesh.group_size(axes), most, fewest, FAST, SLOW)


def test_equal_placements_cost_the_same_and_others_do_not() -> None:
    def sync_s(first_rank: int) -> float:
        model = CostModel(view((4, 8), first_rank, dp=2, tp=4))
        return model.primitive_time_s("all_reduce", 10**8, (1,))

    assert sync_s(0) == sync_s(4) == sync_s(12)
    assert sync_s(0) < sync_s(6) < sync_s(5)
