"""Buffers that a forward pass changes: statistics, counters, moving averages.

What such a buffer holds at the end is one more result of the graph, after those of the model and
out of autograd, and what it held before is an input (`Program.buffers`).
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
from autopar.program import BufferInfo

_WORDS = {
    InputKind.PARAMETER: "parameter",
    InputKind.BUFFER: "buffer",
    InputKind.CONSTANT_TENSOR: "constant",
}


def return_changes(
    model: nn.Module, exported: ExportedProgram, graph: fx.Graph, prefix: str
) -> tuple[str, ...]:
    """Make `graph` functional; its output node returns what changed buffers then hold as well.

    The placeholders of those buffers, in the order of what is returned. Raises
    `NotSupportedError` where anything but a buffer of the model is seen to change.
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
    """`value` has the dtype of the program."""
    tensor = model.get_buffer(name)
    named = model.named_buffers(remove_duplicate=False)
    first, *aliases = (other for other, buffer in named if buffer is tensor)
    path, _, leaf = first.rpartition(".")
    persistent = leaf not in model.get_submodule(path)._non_persistent_buffers_set
    return BufferInfo(first, tuple(aliases), tuple(value.shape), value.dtype, persistent)


def out_of_autograd(builder: Builder, value: fx.Node) -> fx.Node:
    """A result of the graph's own: what a buffer holds has no history."""
    is_result = value.op == "call_function" and value not in builder.has_grad
    return value if is_result else builder.detach(value)


def _check_memory(model: nn.Module, name: str) -> None:
    """Refuse a buffer that is a part of another tensor: the trace does not see its writes."""
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
