"""Meshes: what is refused, how ranks are grouped, and which link an axis gets."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import MeshError
from autopar.mesh import Device, Link, LogicalMesh, Mesh, Nodes, factored_view, logical_views

SLOW, FAST = Link(1e-5, 1e-9), Link(1e-6, 1e-11)
DEVICE = Device(flops_per_s=1e12, bytes_per_s=1e11, memory_bytes=1e9)


@dataclass
class FakeDeviceMesh:
    """The two attributes of a torch DeviceMesh that are read; a real one needs processes."""

    mesh: torch.Tensor
    mesh_dim_names: tuple[str, ...] | None = None


def logical(*sizes: int, first_rank: int = 0) -> LogicalMesh:
    names = tuple(f"a{i}" for i in range(len(sizes)))
    return LogicalMesh(sizes, names, (FAST,) * len(sizes), DEVICE, first_rank)


shapes = st.lists(st.integers(1, 4), min_size=1, max_size=3)


class TestMesh:
    def test_two_axes(self) -> None:
        mesh = Mesh([2, 8])
        assert (mesh.n_ranks, mesh.nodes, mesh.devices_per_node) == (16, 2, 8)
        assert mesh.axis_names == ("node", "device")
        assert len({mesh, Mesh((2, 8)), Mesh((8, 2))}) == 2

    def test_three_axes_are_pods_of_nodes(self) -> None:
        mesh = Mesh((2, 3, 4))
        assert (mesh.n_ranks, mesh.nodes, mesh.devices_per_node) == (24, 6, 4)
        assert mesh.axis_names == ("pod", "node", "device")
        assert [mesh.link_axis(0, rank) for rank in (0, 3, 4, 11, 12, 23)] == [2, 2, 1, 1, 0, 0]
        assert [mesh.submesh_sizes(*of) for of in ((0, 24), (12, 12), (4, 8), (4, 12), (1, 2))] == [
            (2, 3, 4), (1, 3, 4), (1, 2, 4), (1, 3, 4), (1, 1, 2),
        ]  # fmt: skip
        assert mesh.submesh_shape(0, 24) == (6, 4)

    @pytest.mark.parametrize("shape", [4, (4,), [4]])
    def test_one_axis_is_one_node(self, shape: Any) -> None:
        mesh = Mesh(shape)
        assert (mesh.shape, mesh.nodes, mesh.devices_per_node) == ((4,), 1, 4)
        assert mesh.axis_names == ("device",)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"shape": (2, 2, 2, 2)}, r"one to three axes, not 4(.|\n)*hint: give \(nodes"),
            ({"shape": ()}, "one to three axes, not 0"),
            ({"shape": (0, 2)}, "at least 1"),
            ({"shape": (True, 2)}, "whole numbers"),
            ({"shape": (2.0, 2)}, "whole numbers"),
            ({"shape": 2.5}, "a tuple of sizes, not 2.5"),
            ({"shape": (2, 2), "axis_names": ("a",)}, "name each axis"),
            ({"shape": (2, 2), "axis_names": ("a", "a")}, "name each axis"),
            ({"shape": (2, 2), "axis_names": ("a", "b c")}, "axis name 'b c'"),
            ({"shape": 2, "links": [FAST]}, "only one was given(.|\n)*hint"),
            ({"shape": 2, "device": DEVICE}, "only one was given(.|\n)*hint"),
            ({"shape": 2, "links": [FAST], "device": DEVICE, "hardware": "h200"}, "not both"),
            ({"shape": (2, 2), "links": [FAST], "device": DEVICE}, "1 links for 2 axes"),
        ],
    )
    def test_refuses(self, arguments: dict[str, Any], message: str) -> None:
        with pytest.raises(MeshError, match=message):
            Mesh(**arguments)

    def test_with_links_replaces_the_profile(self) -> None:
        mesh = Mesh((2, 2), ("a", "b"), hardware="h200").with_links([SLOW, FAST], DEVICE)
        assert (mesh.hardware, mesh.axis_names) == (None, ("a", "b"))
        assert (mesh.links, mesh.device) == ((SLOW, FAST), DEVICE)


class TestMeshOf:
    @pytest.mark.parametrize("value", [(2, 4), [2, 4], torch.Size([2, 4]), Mesh((2, 4))])
    def test_sizes(self, value: Any) -> None:
        assert Mesh.of(value) == Mesh((2, 4))

    def test_device_mesh(self) -> None:
        value = FakeDeviceMesh(torch.arange(4).view(2, 2), ("dp", "tp"))
        assert Mesh.of(value) == Mesh((2, 2), ("dp", "tp"))

    def test_device_mesh_of_three_dims(self) -> None:
        names = ("dp", "cp", "tp")
        value = FakeDeviceMesh(torch.arange(16).view(2, 2, 4), names)
        assert Mesh.of(value) == Mesh((2, 2, 4), names)

    @pytest.mark.parametrize(
        ("names", "expected"),
        [(None, ("node", "device")), (("tp",), ("node", "tp")), (("node",), ("node", "device"))],
    )
    def test_one_dimensional_device_mesh(
        self, names: tuple[str, ...] | None, expected: tuple[str, str]
    ) -> None:
        assert Mesh.of(FakeDeviceMesh(torch.arange(4), names)) == Mesh((1, 4), expected)

    @pytest.mark.parametrize(
        ("value", "message"),
        [
            (FakeDeviceMesh(torch.arange(16).view(2, 2, 2, 2)), "4-D DeviceMesh(.|\n)*hint"),
            (FakeDeviceMesh(torch.tensor([0, 2])), r"0\.\.n-1 (.|\n)*\[0, 2\](.|\n)*hint"),
            ("2x4", "cannot make a mesh of '2x4'(.|\n)*hint"),
            (None, "cannot make a mesh of None"),
        ],
    )
    def test_refuses(self, value: Any, message: str) -> None:
        with pytest.raises(MeshError, match=message):
            Mesh.of(value)


def test_links_and_devices_refuse_what_is_not_positive() -> None:
    for latency, per_byte in ((-1.0, 0.0), (0.0, -1.0)):
        with pytest.raises(MeshError, match="negative"):
            Link(latency, per_byte)
    for arguments in ((0, 1, 1, 0), (1, 0, 1, 0), (1, 1, 0, 0), (1, 1, 1, -1)):
        with pytest.raises(MeshError, match="positive"):
            Device(*arguments)


class TestLogicalMesh:
    def test_coordinates_and_groups_are_row_major(self) -> None:
        mesh = logical(2, 3, first_rank=10)
        assert mesh.ranks == (10, 11, 12, 13, 14, 15)
        assert [mesh.coordinate(rank) for rank in mesh.ranks] == [*product(range(2), range(3))]
        assert mesh.groups((1,)) == [(10, 11, 12), (13, 14, 15)]
        assert mesh.groups((0,)) == [(10, 13), (11, 14), (12, 15)]
        assert mesh.groups((0, 1)) == [(10, 11, 12, 13, 14, 15)]
        assert mesh.groups((1, 0)) == [(10, 13, 11, 14, 12, 15)]

    @given(shapes, st.data())
    def test_groups_partition_the_ranks(self, sizes: list[int], data: st.DataObject) -> None:
        mesh = logical(*sizes)
        axes = data.draw(st.lists(st.integers(0, len(sizes) - 1), min_size=1, unique=True))
        groups = mesh.groups(axes)
        assert sorted(rank for group in groups for rank in group) == list(mesh.ranks)
        assert {len(group) for group in groups} == {mesh.group_size(axes)}
        for group in groups:
            fixed = [i for i in range(len(sizes)) if i not in axes]
            assert len({tuple(mesh.coordinate(r)[i] for i in fixed) for r in group}) == 1


class TestViews:
    def test_as_given(self) -> None:
        (view,) = logical_views(Mesh((2, 4), ("a", "b")), (SLOW, FAST), DEVICE, "as-given")
        nodes = Nodes(4, FAST, SLOW)
        assert view == LogicalMesh((2, 4), ("a", "b"), (SLOW, FAST), DEVICE, nodes=nodes)

    def test_auto_is_every_factorisation(self) -> None:
        views = logical_views(Mesh((2, 3)), (SLOW, FAST), DEVICE, "auto")
        assert [view.axes for view in views] == [{"dp": 6 // n, "tp": n} for n in (1, 2, 3, 6)]

    def test_other_axes_are_between_dp_and_tp(self) -> None:
        def of(degrees: dict[str, int]) -> list[dict[str, int]]:
            views = logical_views(Mesh((2, 4)), (SLOW, FAST), DEVICE, degrees)
            assert all([*view.axes] in (["dp", "cp", "tp"], ["dp", "tp"]) for view in views)
            return [view.axes for view in views]

        assert of({"cp": 2, "dp": 1, "tp": 4}) == [{"dp": 1, "cp": 2, "tp": 4}]
        assert of({"cp": 4}) == [{"dp": 2, "cp": 4, "tp": 1}, {"dp": 1, "cp": 4, "tp": 2}]
        assert of({"cp": 1, "tp": 2}) == [{"dp": 4, "tp": 2}]
        assert of({"cp": 3}) == of({"dp": 2, "cp": 2, "tp": 4}) == []

    def test_as_given_on_pods(self) -> None:
        links, mesh = (Link(1e-4, 1e-8), SLOW, FAST), Mesh((2, 3, 4))
        (view,) = logical_views(mesh, links, DEVICE, "as-given")
        assert (view.axes, view.links) == ({"pod": 2, "node": 3, "device": 4}, links)
        crossing = factored_view(mesh, links, DEVICE, {"dp": 3, "tp": 8})
        assert crossing.links == (links[0], links[0]), "ranks 8 to 15 are in both pods"
        within = factored_view(mesh, links, DEVICE, {"dp": 3, "tp": 4}, first_rank=12)
        assert (within.links, within.canonical.first_rank) == (links[1:], 0)

    def test_sizes_must_hold_the_ranks(self) -> None:
        with pytest.raises(MeshError, match="hold 16 ranks from rank 0, the mesh has 8"):
            factored_view(Mesh((2, 4)), (SLOW, FAST), DEVICE, {"dp": 2, "tp": 8})

    @given(st.tuples(st.integers(1, 4), st.integers(1, 6)), st.data())
    def test_an_axis_that_leaves_a_node_is_slow(
        self, shape: tuple[int, int], data: st.DataObject
    ) -> None:
        mesh = Mesh(shape)
        n = mesh.n_ranks
        sizes = [s for s in product(range(1, n + 1), repeat=3) if prod(s) == n]
        axes = {f"a{i}": size for i, size in enumerate(data.draw(st.sampled_from(sizes)))}
        view = factored_view(mesh, (SLOW, FAST), DEVICE, axes)
        for axis in view.active_axes:
            leaves_node = any(
                len({rank // mesh.devices_per_node for rank in group}) > 1
                for group in view.groups((axis,))
            )
            assert view.links[axis] == (SLOW if leaves_node else FAST)

    def test_a_placement_is_where_a_view_begins_in_its_node(self) -> None:
        views = [
            factored_view(Mesh((4, 4)), (SLOW, FAST), DEVICE, {"dp": 2, "tp": 2}, first)
            for first in (0, 2, 8, 10)
        ]
        assert views[0].canonical == views[2].canonical == views[0]
        assert views[1].canonical == views[3].canonical == views[1]
        assert logical(2, first_rank=6).canonical == logical(2)
