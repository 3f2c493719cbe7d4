"""Device meshes: the ranks, the links between them, and the axes that a stage sees.

A `Mesh` is the machine: nodes x devices per node, in several pods if another link joins some. A
`LogicalMesh` is a view of consecutive ranks with named axes (dp x tp ...); placements refer to
these axes, and each axis has the link that its collectives use. In both, ranks are row-major: the
last axis varies fastest.
"""

from __future__ import annotations

import keyword
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Any

from autopar.errors import MeshError, NotSupportedError, OptionError
from autopar.option_values import check_count, check_word

# Axes that a view has between dp and tp if `mesh_shape` says so; tp varies fastest over ranks.
INNER_AXES = ("ep", "cp")


@dataclass(frozen=True)
class Link:
    """An alpha-beta link: one message of n bytes takes `latency_s + n * s_per_byte`.

    `in_switch_s_per_byte` is for switches that sum (NVLS); None for others. It is the time per byte
    of one port during such a sum: an all_reduce of n bytes over p ranks keeps each port busy for
    (1 + 1/p) * n * `in_switch_s_per_byte`.
    `chunk_s`: latency of one chunk where collectives pass chunks on like a pipeline; None where
    they pass on whole buffers.
    `ratios` corrects the formulas of some collectives: pairs (kind, time on the backend / time by
    the formula).
    """

    latency_s: float
    s_per_byte: float
    in_switch_s_per_byte: float | None = None
    chunk_s: float | None = field(default=None, kw_only=True)
    ratios: tuple[tuple[str, float], ...] = field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        optional = (self.in_switch_s_per_byte or 0.0, self.chunk_s or 0.0)
        if min(self.latency_s, self.s_per_byte, *optional) < 0:
            raise MeshError(f"a link cannot have negative latency or s_per_byte: {self}")

    def ratio(self, kind: str) -> float:
        """Time / formula's time of a collective, or of a message (`send_recv`)."""
        return dict(self.ratios).get(kind, 1.0)

    def message_s(self, size_bytes: float) -> float:
        """Time of one message."""
        return self.ratio("send_recv") * (self.latency_s + size_bytes * self.s_per_byte)


@dataclass(frozen=True)
class Device:
    """One device: peak rates, memory, and `launch_s`, the least time of any operator."""

    flops_per_s: float
    bytes_per_s: float
    memory_bytes: float
    launch_s: float = 0.0

    def __post_init__(self) -> None:
        if min(self.flops_per_s, self.bytes_per_s, self.memory_bytes) <= 0 or self.launch_s < 0:
            raise MeshError(f"a device needs positive rates and memory: {self}")


@dataclass(frozen=True)
class Figures:
    """The figures of a hardware profile, key and value, as a plan carries them."""

    name: str
    values: tuple[tuple[str, float], ...]


def is_axis_name(name: str) -> bool:
    """May an axis be called so? Its name is a variable of generated programs."""
    is_variable = name.isascii() and name.isidentifier() and not keyword.iskeyword(name)
    return is_variable and len(name) <= 100


@dataclass(frozen=True)
class Mesh:
    """The machine: `shape` is (devices,), (nodes, devices per node) or (pods, nodes, devices per
    node): groups of nodes that another link joins.

    Give either `hardware` (the name of a profile, the path of one, or the figures of one in a
    plan), or both `links` (one per axis) and `device`. With neither,
    `autopar.cost.hardware.resolve` detects the hardware and falls back to `cpu-local`.

    Raises `MeshError` for a shape of more than three axes, a size below 1, bad axis names, links
    without device or device without links.
    """

    shape: tuple[int, ...]
    axis_names: tuple[str, ...] | None = None
    hardware: str | Figures | None = None
    links: tuple[Link, ...] | None = None
    device: Device | None = None

    def __init__(
        self,
        shape: Sequence[int] | int,
        axis_names: Sequence[str] | None = None,
        hardware: str | PurePath | Figures | None = None,
        links: Sequence[Link] | None = None,
        device: Device | None = None,
    ) -> None:
        if not isinstance(shape, (int, Sequence)):
            raise MeshError(f"a mesh shape is a tuple of sizes, not {shape!r}")
        sizes = (shape,) if isinstance(shape, int) else tuple(shape)
        if len(sizes) not in (1, 2, 3):
            raise MeshError(
                f"a mesh has one to three axes, not {len(sizes)}: {sizes}",
                hint="give (nodes, devices per node), or (pods, nodes, devices per node); the "
                "planner finds dp x tp views itself",
            )
        if any(not isinstance(n, int) or isinstance(n, bool) or n < 1 for n in sizes):
            raise MeshError(f"mesh sizes must be whole numbers of at least 1: {sizes}")
        if axis_names is None:
            axis_names = ("pod", "node", "device")[-len(sizes) :]
        names = tuple(axis_names)
        if any(not isinstance(name, str) for name in names):
            raise MeshError(f"axis_names are texts, not {names}")
        if len(names) != len(sizes) or len(set(names)) != len(names):
            raise MeshError(f"axis_names {names} must name each axis of {sizes} once")
        if wrong := [name for name in names if not is_axis_name(name)]:
            raise MeshError(
                f"axis name {wrong[0]!r} cannot be a variable of the generated program",
                hint="take ASCII letters, digits and _, and no keyword of Python, as 'dp'",
            )
        if (links is None) != (device is None):
            raise MeshError(
                "links and device describe the hardware together; only one was given",
                hint="give both, or a hardware profile name",
            )
        if links is not None and hardware is not None:
            raise MeshError("give either hardware or links and device, not both")
        if isinstance(hardware, PurePath):
            hardware = str(hardware)
        if not isinstance(hardware, str | Figures | None):
            raise MeshError(f"hardware is a profile's name or path, not {hardware!r}")
        link_tuple = None if links is None else tuple(links)
        if link_tuple is not None and len(link_tuple) != len(sizes):
            raise MeshError(f"{len(link_tuple)} links for {len(sizes)} axes: give one per axis")
        object.__setattr__(self, "shape", sizes)
        object.__setattr__(self, "axis_names", names)
        object.__setattr__(self, "hardware", hardware)
        object.__setattr__(self, "links", link_tuple)
        object.__setattr__(self, "device", device)

    @property
    def n_ranks(self) -> int:
        """Devices of the whole machine; each is a rank."""
        return math.prod(self.shape)

    @property
    def nodes(self) -> int:
        """Nodes of all pods; 1 for a shape of one axis."""
        return math.prod(self.shape[:-1])

    @property
    def devices_per_node(self) -> int:
        """Devices of one node."""
        return self.shape[-1]

    def node_of(self, rank: int) -> int:
        return rank // self.devices_per_node

    def link_axis(self, rank: int, other: int) -> int:
        """The axis whose link joins two ranks: the outermost on which they differ."""
        for axis in range(len(self.shape) - 1):
            n_inside = math.prod(self.shape[axis + 1 :])
            if rank // n_inside != other // n_inside:
                return axis
        return len(self.shape) - 1

    def link_axis_of_blocks(self, n_block: int, first_rank: int, n_ranks: int) -> int:
        """The outermost axis whose link joins ranks of one block, of `n_block` consecutive ranks,
        where blocks fill `n_ranks` from `first_rank` on."""
        for axis in range(len(self.shape) - 1):
            n_inside = math.prod(self.shape[axis + 1 :])
            begin = first_rank - first_rank % n_inside + n_inside
            units = range(begin, first_rank + n_ranks, n_inside)
            # A unit begins inside of a block. Where two begin with blocks, all of them do.
            if any((unit - first_rank) % n_block for unit in units[:2]):
                return axis
        return len(self.shape) - 1

    def submesh_sizes(self, first_rank: int, n_ranks: int) -> tuple[int, ...]:
        """The sizes of consecutive ranks on the mesh's axes. Unless they fill whole nodes, or whole
        pods, they are on one."""
        found, n_left, n_inside = [], n_ranks, 1
        for size in reversed(self.shape[1:]):
            n_inside *= size
            fills = n_left > size and n_left % size == 0 and first_rank % n_inside == 0
            found.append(size if fills else n_left)
            n_left = n_left // size if fills else 1
        return (n_left, *reversed(found))

    def submesh_shape(self, first_rank: int, n_ranks: int) -> tuple[int, int]:
        """(nodes, devices per node) of consecutive ranks; (1, n) unless they fill whole nodes."""
        *nodes, each = self.submesh_sizes(first_rank, n_ranks)
        return math.prod(nodes), each

    def with_links(self, links: Sequence[Link], device: Device) -> Mesh:
        """This mesh with explicit links and device instead of a profile name."""
        return Mesh(self.shape, self.axis_names, links=links, device=device)

    @staticmethod
    def of(value: Any) -> Mesh:
        """A `Mesh` from a mesh, a tuple of sizes, or a torch `DeviceMesh` (1-D: (1, n)).

        Raises `MeshError` for anything else.
        """
        if isinstance(value, Mesh):
            return value
        if isinstance(value, int) or (
            isinstance(value, Sequence) and all(isinstance(n, int) for n in value)
        ):
            return Mesh(value)
        if hasattr(value, "mesh_dim_names") and hasattr(value, "mesh"):
            shape = tuple(int(n) for n in value.mesh.shape)
            if len(shape) > 3:
                raise MeshError(
                    f"a {len(shape)}-D DeviceMesh is not a machine mesh: {shape}",
                    hint="pass (nodes, devices per node); the planner finds the inner axes",
                )
            if value.mesh.flatten().tolist() != list(range(math.prod(shape))):
                raise MeshError(
                    "a DeviceMesh must hold ranks 0..n-1 in row-major order, not "
                    f"{value.mesh.tolist()}",
                    hint="pass the mesh of all ranks, not a slice of one",
                )
            names = value.mesh_dim_names
            if len(shape) == 1:
                named = names and names[0] != "node"
                return Mesh((1, shape[0]), ("node", names[0]) if named else None)
            return Mesh(shape, names)
        raise MeshError(
            f"cannot make a mesh of {value!r}",
            hint="pass autopar.Mesh, a tuple such as (1, 4), or a torch DeviceMesh",
        )


@dataclass(frozen=True)
class Nodes:
    """The nodes of a machine: `n_ranks` consecutive ranks each; links inside and between nodes.

    `pods`: the ranks of a pod, and the link between pods; None if there is one pod.
    """

    n_ranks: int
    inside: Link
    across: Link
    pods: tuple[int, Link] | None = None

    @property
    def period(self) -> int:
        """The ranks after which the machine repeats."""
        return self.n_ranks if self.pods is None else self.pods[0]


@dataclass(frozen=True)
class LogicalMesh:
    """Named axes over the ranks of one stage, row-major: the last axis varies fastest.

    `links[i]` is the slowest link that the groups of axis i cross. The cost of their collectives
    depends on how the groups lie on `nodes` (`cost/hardware/topology.py`). If `nodes` is None, it
    depends on `links` alone.
    """

    sizes: tuple[int, ...]
    names: tuple[str, ...]
    links: tuple[Link, ...]
    device: Device
    first_rank: int = 0
    nodes: Nodes | None = None

    def __post_init__(self) -> None:
        assert len(self.sizes) == len(self.names) == len(self.links), self

    @staticmethod
    def unpriced(sizes: Sequence[int], names: Sequence[str], first_rank: int = 0) -> LogicalMesh:
        """A mesh of a machine that nothing is priced on."""
        links = (Link(0.0, 0.0),) * len(sizes)
        return LogicalMesh(tuple(sizes), tuple(names), links, Device(1.0, 1.0, 1.0), first_rank)

    def __hash__(self) -> int:
        # Cheap, because meshes are the keys of many tables. Few meshes share a hash.
        return hash((self.sizes, self.first_rank))

    @property
    def n_axes(self) -> int:
        return len(self.sizes)

    @property
    def n_ranks(self) -> int:
        return math.prod(self.sizes)

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(range(self.first_rank, self.first_rank + self.n_ranks))

    @property
    def active_axes(self) -> tuple[int, ...]:
        """Axes of more than one rank. On the others everything is Invariant and costs nothing."""
        return tuple(i for i, n in enumerate(self.sizes) if n > 1)

    @property
    def axes(self) -> dict[str, int]:
        return dict(zip(self.names, self.sizes, strict=True))

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """The position of `rank` on each axis."""
        index, out = rank - self.first_rank, []
        for size in reversed(self.sizes):
            index, position = divmod(index, size)
            out.append(position)
        return tuple(reversed(out))

    def groups(self, axes: Sequence[int]) -> list[tuple[int, ...]]:
        """Every group of ranks that differ only along `axes`, in row-major order of `axes`."""
        others = [i for i in range(self.n_axes) if i not in axes]
        offsets = self._offsets(axes)
        return [
            tuple(self.first_rank + fixed + moving for moving in offsets)
            for fixed in self._offsets(others)
        ]

    def _offsets(self, axes: Sequence[int]) -> list[int]:
        """The ranks of a group along `axes`, relative to its first; row-major over `axes`."""
        out = [0]
        for i in axes:
            step = math.prod(self.sizes[i + 1 :])
            out = [offset + k * step for offset in out for k in range(self.sizes[i])]
        return out

    def group_size(self, axes: Sequence[int]) -> int:
        return math.prod(self.sizes[i] for i in axes)

    @property
    def canonical(self) -> LogicalMesh:
        """The first view that lies on the nodes as this one does, and so costs the same."""
        first_rank = 0 if self.nodes is None else self.first_rank % self.nodes.period
        return replace(self, first_rank=first_rank)


def logical_views(
    mesh: Mesh,
    links: Sequence[Link],
    device: Device,
    mesh_shape: str | Mapping[str, int],
    first_rank: int = 0,
    n_ranks: int | None = None,
) -> list[LogicalMesh]:
    """The candidate views of a stage's consecutive ranks; by default of all ranks.

    `mesh_shape` "as-given": one view, with the axes of the mesh. "auto": every dp x tp. Degrees,
    as {"tp": 4}: those that have them; none, if the ranks do not divide. Their other axes are
    between dp and tp.
    """
    assert mesh.axis_names is not None
    n = mesh.n_ranks if n_ranks is None else n_ranks
    if mesh_shape == "as-given":
        sizes = mesh.submesh_sizes(first_rank, n)
        every = [dict(zip(mesh.axis_names, sizes, strict=True))]
    else:
        given = {} if isinstance(mesh_shape, str) else mesh_shape
        between = {name: given[name] for name in INNER_AXES if given.get(name, 1) > 1}
        left, rest = divmod(n, math.prod(between.values()))
        tensor = [tp for tp in range(1, left + 1) if left % tp == 0 and not rest]
        every = [{"dp": left // tp, **between, "tp": tp} for tp in tensor]
    wanted = (axes for axes in every if has_degrees(mesh_shape, axes))
    return [factored_view(mesh, links, device, axes, first_rank) for axes in wanted]


def check_mesh_shape(value: Any) -> str | Mapping[str, int]:
    """The option `mesh_shape`: a word, or degrees by the names of axes. Raises `OptionError`, or
    `NotSupportedError` for more than three axes."""
    if not isinstance(value, Mapping):
        return check_word("mesh_shape", value, ("auto", "as-given"), ())
    if not value or not value.keys() <= {"dp", *INNER_AXES, "tp"}:
        raise OptionError(
            f"mesh_shape fixes some of the degrees dp, ep, cp and tp, not {value!r}",
            hint='mesh_shape={"tp": 4}; stages=2 fixes the number of stages',
        )
    found = {name: check_count(f"mesh_shape[{name!r}]", n) for name, n in value.items()}
    if sum(found.get(name, 1) > 1 for name in INNER_AXES) > 1:
        raise NotSupportedError(
            f"mesh_shape={found}: a stage has three axes at most", hint="leave cp or ep out"
        )
    return found


def has_degrees(mesh_shape: str | Mapping[str, int], axes: Mapping[str, int]) -> bool:
    """Does a view with these axes have the degrees of `mesh_shape`, if it fixes any? An axis that
    it lacks has one rank."""
    return isinstance(mesh_shape, str) or all(
        axes.get(name, 1) == size for name, size in mesh_shape.items()
    )


def factored_view(
    mesh: Mesh,
    links: Sequence[Link],
    device: Device,
    axes: Mapping[str, int],
    first_rank: int = 0,
) -> LogicalMesh:
    """A view of consecutive ranks of `mesh`, from `first_rank`, with `axes` (outermost first).

    An axis gets the link between nodes if one of its groups leaves a node, that between pods if one
    leaves a pod. The view keeps the machine's nodes: costs follow from how groups lie on them.

    Raises `MeshError` for more ranks than the mesh has.
    """
    n_ranks = math.prod(axes.values())
    if first_rank + n_ranks > mesh.n_ranks:
        raise MeshError(
            f"axes {dict(axes)} hold {n_ranks} ranks from rank {first_rank}, "
            f"the mesh has {mesh.n_ranks}"
        )
    pods = (math.prod(mesh.shape[1:]), links[0]) if len(mesh.shape) == 3 else None
    nodes = Nodes(mesh.devices_per_node, links[-1], links[-2:][0], pods)
    view = LogicalMesh(
        tuple(axes.values()), tuple(axes), (links[-1],) * len(axes), device, first_rank, nodes
    )
    steps = [math.prod(view.sizes[axis:]) if n > 1 else 1 for axis, n in enumerate(view.sizes)]
    outermost = (mesh.link_axis_of_blocks(step, first_rank, n_ranks) for step in steps)
    return replace(view, links=tuple(links[axis] for axis in outermost))
