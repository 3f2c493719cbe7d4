"""Which links a group crosses: any view against a count of ranks per node."""

from __future__ import annotations

from collections import Counter
from math import prod

from hypothesis import given
from hypothesis import strategies as st

from autopar.cost.hardware import LinkGroup, flat_group, group_on
from autopar.mesh import Device, Link, LogicalMesh, Mesh, factored_view

SLOW, FAST = Link(1e-5, 1e-9), Link(1e-6, 1e-11)
DEVICE = Device(flops_per_s=1e12, bytes_per_s=1e11, memory_bytes=1e9)


def view(shape: tuple[int, int], first_rank: int = 0, **axes: int) -> LogicalMesh:
    return factored_view(Mesh(shape), (SLOW, FAST), DEVICE, axes, first_rank)


def test_a_view_without_nodes_has_its_slowest_axis() -> None:
    mesh = LogicalMesh((2, 2, 1), ("a", "b", "c"), (SLOW, FAST, SLOW), DEVICE)
    assert group_on(mesh, (0, 1)) == flat_group(4, SLOW)
    assert group_on(mesh, (1, 2)) == flat_group(2, FAST), "an axis of one rank carries nothing"
    assert group_on(mesh, (2,)) == flat_group(1, SLOW)


def test_a_group_of_several_pods_has_the_link_between_them() -> None:
    links = (Link(1e-4, 1e-8), SLOW, FAST)
    mesh = factored_view(Mesh((2, 2, 2)), links, DEVICE, {"a": 2, "b": 2, "c": 2})
    assert group_on(mesh, (2,)) == LinkGroup(2, 1, 2, FAST, SLOW)
    assert group_on(mesh, (1, 2)) == LinkGroup(4, 2, 2, FAST, SLOW)
    assert group_on(mesh, (0,)) == LinkGroup(2, 2, 1, FAST, links[0])
    assert group_on(mesh, (0, 1, 2)) == LinkGroup(8, 4, 2, FAST, links[0])


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
