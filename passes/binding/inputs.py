"""The model's inputs and the mesh as data of a plan, and back."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from autopar.cost.hardware import Hardware
from autopar.errors import MeshError, OptionError, PlanError
from autopar.mesh import Device, Link, Mesh
from autopar.plans import InputSignature, MeshRecord, PlanData
from autopar.program import Program, flatten_inputs, row_dims

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
            raise OptionError(f"input {path} is a {type(leaf).__name__}, which a plan cannot keep")
        static[path] = leaf
    return tensors, static


def example_of(data: PlanData) -> ExampleInputs:
    """Meta tensors like the inputs of a plan. Raises `PlanError` if its inputs are nested."""
    leaves: dict[str, Any] = {
        i.path: torch.empty(i.shape, dtype=_dtype(i), device="meta") for i in data.inputs
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


def _dtype(signature: InputSignature) -> torch.dtype:
    dtype = getattr(torch, signature.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise PlanError(f"input {signature.path}: {signature.dtype!r} is no dtype of torch")
    return dtype


def check_mesh(data: PlanData, mesh: Mesh) -> None:
    """Raise `PlanError` if the mesh has another shape than the plan's; warn of other hardware."""
    if data.mesh.shape != mesh.shape:
        raise PlanError(
            f"the plan was made for a mesh {data.mesh.shape}, this one is {mesh.shape}",
            hint="use the plan's mesh shape, or plan again",
        )
    if mesh.hardware is not None and data.mesh.hardware != mesh.hardware:
        warnings.warn(
            f"the plan was made for {data.mesh.hardware}; it runs on {mesh.hardware}, "
            "where another plan may be faster",
            stacklevel=3,
        )


def record_of(mesh: Mesh, hardware: Hardware) -> MeshRecord:
    assert mesh.axis_names is not None
    device = hardware.device
    if hardware.profile_name == "explicit" and any(link.ratios for link in hardware.links):
        raise MeshError(
            "a plan cannot record explicit links with ratios of collectives",
            hint="write them in a profile: Mesh(hardware='path.toml')",
        )
    return MeshRecord(
        mesh.shape,
        mesh.axis_names,
        # As the user wrote it: the path of a profile finds it again, its name does not.
        mesh.hardware or hardware.profile_name,
        tuple(_numbers(link) for link in hardware.links),
        {
            "flops_per_s": device.flops_per_s,
            "bytes_per_s": device.bytes_per_s,
            "memory_bytes": device.memory_bytes,
            "launch_s": device.launch_s,
        },
    )


def _numbers(link: Link) -> tuple[float, ...]:
    """Latency, seconds per byte, and seconds per byte within a switch if there is one."""
    numbers = (link.latency_s, link.s_per_byte, link.in_switch_s_per_byte)
    return tuple(number for number in numbers if number is not None)


def mesh_of(record: MeshRecord) -> Mesh:
    if record.hardware != "explicit":
        return Mesh(record.shape, record.axis_names, hardware=record.hardware)
    links = [Link(*numbers) for numbers in record.links]
    return Mesh(record.shape, record.axis_names, links=links, device=Device(**record.device))
