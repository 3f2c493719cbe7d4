"""Buffers that a forward pass changes: statistics, counters, moving averages.

The old value of such a buffer is an input of the graph (`Program.buffers`). Its new value is an
extra result, after the model's results and without gradient. It is whole on every rank of the one
stage that reads and changes it. Other buffers are constants.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from autopar.capture.builder import Builder
from autopar.capture.inplace import functionalise
from autopar.errors import NotSupportedError
from autopar.program.graph import BufferInfo

_WORDS = {
    InputKind.PARAMETER: "parameter",
    InputKind.BUFFER: "buffer",
    InputKind.CONSTANT_TENSOR: "constant",
}


def return_changes(
    model: nn.Module, exported: ExportedProgram, graph: fx.Graph, prefix: str
) -> tuple[str, ...]:
    """Make `graph` functional, and append the new values of changed buffers to its output.

    Returns the placeholders of these buffers, in the order of their values. Raises
    `NotSupportedError` if anything but a buffer of the model visibly changes.
    """
    stored, own = {}, set()
    for spec in exported.graph_signature.input_specs:
        if spec.kind in _WORDS:
            name = str(spec.target).removeprefix(prefix)
            stored[spec.arg.name] = f"{_WORDS[spec.kind]} `{name}`"
            if spec.kind is InputKind.BUFFER and has_buffer(model, name):
                own.add(spec.arg.name)
    contents = functionalise(graph, stored, own)
    for placeholder in contents:
        _check_memory(model, stored[placeholder].split("`")[1])
    output = graph.output_node()
    output.args = ((*output.args[0], *contents.values()),)  # type: ignore[misc]
    graph.lint()
    return tuple(contents)


def has_buffer(model: nn.Module, name: str) -> bool:
    return any(name == own for own, _ in model.named_buffers(remove_duplicate=False))


def buffer_info(model: nn.Module, name: str, value: torch.Tensor) -> BufferInfo:
    """What the program knows of a buffer; `value` has the program's dtype."""
    tensor = model.get_buffer(name)
    named = model.named_buffers(remove_duplicate=False)
    first, *aliases = (other for other, buffer in named if buffer is tensor)
    path, _, leaf = first.rpartition(".")
    persistent = leaf not in model.get_submodule(path)._non_persistent_buffers_set
    return BufferInfo(first, tuple(aliases), tuple(value.shape), value.dtype, persistent)


def out_of_autograd(builder: Builder, value: fx.Node) -> fx.Node:
    """`value` as an operator's result without gradient, as a buffer has no autograd history."""
    is_result = value.op == "call_function" and value not in builder.has_grad
    return value if is_result else builder.detach(value)


def _check_memory(model: nn.Module, name: str) -> None:
    """Refuse a buffer that shares memory with another tensor: the trace would miss its writes."""
    tensor = model.get_buffer(name)
    for other, held in _tensors(model):
        if held is not tensor and not held.is_meta and _storage(held) == _storage(tensor):
            raise NotSupportedError(
                f"buffer `{name}` changes, and shares its memory with `{other}`",
                hint="register one of them, and compute the other in forward",
            )


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
