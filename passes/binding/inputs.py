"""The model's inputs and the mesh as data of a plan, and back."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from autopar.cost.hardware import Hardware, figures_of, load_profile, shipped_name
from autopar.errors import MeshError, OptionError, PlanError
from autopar.mesh import Device, Figures, Link, Mesh
from autopar.plans import InputSignature, MeshRecord, PlanData
from autopar.program.graph import Program, flatten_inputs, row_dims

ExampleInputs = Mapping[str, Any] | Sequence[Any]


def signature_of(
    program: Program, example_inputs: ExampleInputs
) -> tuple[tuple[InputSignature, ...], dict[str, Any]]:
    """Tensor inputs by path, as the user gives them, and the other leaves by path.

    The graph has the other leaves as constants. Raises `OptionError` if a plan cannot keep one.
    """
    leaves = flatten_inputs(example_inputs)
    given = {i.path: leaves[i.path] for i in program.inputs.values()}
    tensors = tuple(
        InputSignature(path, tuple(leaf.shape), str(leaf.dtype).removeprefix("torch."))
        for path, leaf in given.items()
    )
    static: dict[str, Any] = {}
    for path, leaf in leaves.items():
        if isinstance(leaf, torch.Tensor):
            continue
        if not isinstance(leaf, (bool, int, float, str, type(None))):
            raise OptionError(
                f"input {path} is a {type(leaf).__name__}, which a plan cannot keep",
                hint="make it a tensor, or an attribute of the model",
            )
        if isinstance(leaf, float) and not math.isfinite(leaf):
            raise OptionError(f"input {path} is {leaf}, which a plan cannot keep")
        static[path] = leaf
    return tensors, static


def example_of(data: PlanData) -> ExampleInputs:
    """Meta tensors like the inputs of a plan. Raises `PlanError` if its inputs are nested."""
    leaves: dict[str, Any] = {
        i.path: torch.empty(i.shape, dtype=getattr(torch, i.dtype), device="meta")
        for i in data.inputs
    }
    leaves.update(data.static_inputs)
    if has_nested_inputs(data):
        raise PlanError(
            "the plan has nested inputs, which it cannot rebuild",
            hint="pass example_inputs as well",
        )
    if data.positional:
        return tuple(leaves[str(i)] for i in range(len(leaves)))
    return leaves


def planned_row_dims(data: PlanData) -> dict[str, int | None]:
    """Input path -> the dim of its rows in the planned batch; None without rows.

    In a batch of another size, an input without rows may happen to be as long as the rows.
    """
    dims, size = row_dims({i.path: i.shape for i in data.inputs}, data.batch_dims)
    if size <= 1:
        return dict(data.batch_dims)
    return {i.path: dims.get(i.path) for i in data.inputs} | dict(data.batch_dims)


def has_nested_inputs(data: PlanData) -> bool:
    return any("." in path for path in (*(i.path for i in data.inputs), *data.static_inputs))


def check_mesh(data: PlanData, mesh: Mesh) -> None:
    """Raise `PlanError` if the mesh has another shape than the plan's; warn of other hardware."""
    if data.mesh.shape != mesh.shape:
        raise PlanError(
            f"the plan was made for a mesh {data.mesh.shape}, this one is {mesh.shape}",
            hint="use the plan's mesh shape, or plan again",
        )
    if mesh.hardware is None:
        return
    profile, name = load_profile(mesh.hardware), data.mesh.hardware
    if profile.name != name or _own_figures(mesh) != data.mesh.figures:
        given = profile.name if profile.name != name else f"other figures of {name}"
        warnings.warn(
            f"the plan was made for {name}; it runs on {given}, where another plan may be faster",
            stacklevel=3,
        )


def record_of(mesh: Mesh, hardware: Hardware) -> MeshRecord:
    assert mesh.axis_names is not None
    device = hardware.device
    unrecorded = any(link.ratios or link.chunk_s is not None for link in hardware.links)
    if hardware.profile_name == "explicit" and unrecorded:
        raise MeshError(
            "a plan cannot record explicit links with ratios or chunks of collectives",
            hint="write them in a profile: Mesh(hardware='path.toml')",
        )
    return MeshRecord(
        mesh.shape,
        mesh.axis_names,
        hardware.profile_name,
        tuple(_numbers(link) for link in hardware.links),
        {
            "flops_per_s": device.flops_per_s,
            "bytes_per_s": device.bytes_per_s,
            "memory_bytes": device.memory_bytes,
            "launch_s": device.launch_s,
        },
        _own_figures(mesh),
    )


def _own_figures(mesh: Mesh) -> dict[str, float]:
    """The figures of a mesh's profile, unless it is a shipped one, which its name finds again."""
    if mesh.hardware is None or shipped_name(mesh.hardware) is not None:
        return {}
    return dict(figures_of(load_profile(mesh.hardware)).values)


def _numbers(link: Link) -> tuple[float, ...]:
    """Latency, seconds per byte, and seconds per byte within a switch if there is one."""
    numbers = (link.latency_s, link.s_per_byte, link.in_switch_s_per_byte)
    return tuple(number for number in numbers if number is not None)


def mesh_of(record: MeshRecord) -> Mesh:
    """The mesh that a plan was made for, from what the plan carries: no file is read.

    Raises `PlanError` if the plan names a profile that is not shipped, without its figures.
    """
    if record.figures:
        figures = Figures(record.hardware, tuple(record.figures.items()))
        return Mesh(record.shape, record.axis_names, hardware=figures)
    if record.hardware == "explicit":
        links = [Link(*numbers) for numbers in record.links]
        return Mesh(record.shape, record.axis_names, links=links, device=Device(**record.device))
    if shipped_name(record.hardware) is None:
        raise PlanError(
            f"the plan is for hardware {record.hardware!r}, which is no shipped profile, and does "
            "not have its figures",
            hint=f"give the mesh: plan.bind(model, autopar.Mesh({record.shape}, hardware=...)); "
            "on the command line, --hardware",
        )
    return Mesh(record.shape, record.axis_names, hardware=record.hardware)
