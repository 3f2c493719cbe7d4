"""Which submeshes a stage may have: its number of devices, its views, its place in a node."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from autopar.cost.hardware import Hardware
from autopar.errors import InfeasibleError, MeshError, OptionError
from autopar.mesh import LogicalMesh, Mesh, factored_view, logical_views
from autopar.options import Options
from autopar.passes.analysis import Analysis
from autopar.passes.intra import AxisPin


def submesh_sizes(mesh: Mesh) -> list[int]:
    """How many devices a stage may have, if there are other stages.

    The divisors of a node's size, and k whole nodes, where k is a power of two or divides the
    number of nodes.
    """
    each, nodes = mesh.devices_per_node, mesh.nodes
    parts = [n for n in range(1, each + 1) if each % n == 0]
    groups = [k * each for k in range(2, nodes) if nodes % k == 0 or k & (k - 1) == 0]
    return [n for n in (*parts, *groups) if n < mesh.n_ranks]


def views_of(
    mesh: Mesh, hardware: Hardware, options: Options, first_rank: int, n_ranks: int
) -> list[LogicalMesh]:
    """The views of the `n_ranks` ranks from `first_rank` on."""
    shape = options.mesh_shape
    return logical_views(mesh, hardware.links, hardware.device, shape, first_rank, n_ranks)


def distinct_views(
    mesh: Mesh, hardware: Hardware, options: Options, sizes: Sequence[int]
) -> tuple[LogicalMesh, ...]:
    """The views of the first n ranks, for every n in `sizes`.

    Without `force`, views that differ only in the names of their axes count as one.
    """
    found: dict[object, LogicalMesh] = {}
    for size in sizes:
        for view in views_of(mesh, hardware, options, 0, size):
            axes = tuple((view.sizes[a], view.links[a]) for a in view.active_axes)
            key = (view.sizes, view.names) if options.force else (size, axes)
            found.setdefault(key, view)
    return tuple(found.values())


def all_views(
    mesh: Mesh, hardware: Hardware, options: Options, sizes: Sequence[int]
) -> tuple[LogicalMesh, ...]:
    """The views of the first n ranks, for every n in `sizes`, names of axes told apart.

    Recipes need them all: a recipe gives every axis a role, so it matters which axis is in use.
    """
    return tuple(v for size in sizes for v in views_of(mesh, hardware, options, 0, size))


def view_at(mesh: Mesh, hardware: Hardware, view: LogicalMesh, first_rank: int) -> LogicalMesh:
    """The same axes over the ranks from `first_rank` on."""
    return factored_view(mesh, hardware.links, hardware.device, view.axes, first_rank)


def pins_on(
    analysis: Analysis, options: Options, view: LogicalMesh
) -> Mapping[str, tuple[AxisPin, ...]]:
    """The pins that `force` sets on one view, by parameter placeholder.

    Raises `OptionError` for a name that is no parameter, or an axis that the view does not have.
    """
    placeholders = {
        name: placeholder
        for placeholder, info in analysis.program.parameters.items()
        for name in (info.name, *info.aliases)
    }
    pins: dict[str, tuple[AxisPin, ...]] = {}
    for pin in options.force:
        if pin.parameter not in placeholders:
            raise OptionError(
                f"force names {pin.parameter!r}, which is no parameter of the model",
                hint=f"parameters are such as {', '.join(list(placeholders)[:3])}",
            )
        axis = pin.axis_index(view.names)
        if options.mesh_shape == "as-given" or view.sizes[axis] > 1 or pin.shards:
            storage = pin.storage
            if view.sizes[axis] == 1 and pin.use is not None and pin.use.is_shard:
                storage = pin.use  # no shard is stored on an axis of one rank: allows nothing
            key = placeholders[pin.parameter]
            pins[key] = (*pins.get(key, ()), AxisPin(storage, pin.use, axis))
    return pins


def pinnable_views(options: Options, views: Sequence[LogicalMesh]) -> list[LogicalMesh]:
    """The views on which every axis that `force` shards over has several ranks."""
    return [
        view
        for view in views
        if all(view.sizes[p.axis_index(view.names)] > 1 for p in options.force if p.shards)
    ]


def check_pinned_axes(options: Options, views: Sequence[LogicalMesh]) -> None:
    """Raise `InfeasibleError` if `force` shards over an axis of one rank on all of the views."""
    for pin in options.force:
        if not pinnable_views(replace(options, force=(pin,)), views):
            found = ", ".join(dict.fromkeys(axes_text(view) for view in views))
            raise InfeasibleError(
                f"axis {pin.axis} has one rank, so nothing can be sharded over it; a stage is "
                f"seen as {found}",
                where=f"force[{pin.parameter!r}] = {str(pin)!r}",
                hint="pin another axis, give more ranks, or choose other stages or mesh_shape",
            )


def check_degrees(mesh: Mesh, options: Options, sizes: Sequence[int]) -> None:
    """Raises `MeshError` if stages of none of these sizes have the degrees asked for."""
    shape = options.mesh_shape
    if isinstance(shape, str):
        return
    each = math.prod(shape.values())
    is_whole = {"dp", "tp"} <= shape.keys()
    if not any(n == each if is_whole else n % each == 0 for n in sizes):
        raise MeshError(
            f"mesh_shape={dict(shape)} fits no stage of {mesh.n_ranks} ranks; stages may have "
            f"{', '.join(map(str, sorted(set(sizes))))}",
            hint="choose degrees whose product divides the ranks of a stage",
        )


def views_text(views: Sequence[LogicalMesh]) -> str:
    """`2 stages: 8 + 8 devices (dp=2 x tp=4 | dp=4 x tp=2)`; equal views are written once."""
    sizes = " + ".join(str(view.n_ranks) for view in views)
    texts = [axes_text(view) for view in views]
    within = texts[0] if len(set(texts)) == 1 else " | ".join(texts)
    return f"{len(views)} stages: {sizes} devices ({within})"


def axes_text(view: LogicalMesh) -> str:
    return " x ".join(f"{name}={size}" for name, size in view.axes.items())
