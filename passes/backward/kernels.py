"""Templates as lines: slots become variables of the program, in forward and in backward."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from autopar.passes.backward.names import Names, result_word
from autopar.passes.backward.recording import Kernel, Meta, Slot, filled
from autopar.passes.backward.templates import OCCURRENCE, Call
from autopar.program.lines import DEVICE, UNUSED, CallLine, KernelLine, Ref, Variable

# Recorded results may have other strides than real ones (`softplus_backward`), which a view of them
# may not fit. A reshape is the same view where it fits.
_PRINTED = {"aten.view.default": "aten.reshape.default"}


def call_of(line: CallLine, metas: Mapping[str, Meta], device: str) -> tuple[Call, list[str]]:
    """The operator of a line as a call, and the variables that its slots stand for."""
    names: list[str] = []

    def numbered(value: Any) -> Any:
        if isinstance(value, Ref):
            if value.name not in metas:
                return torch.device(device) if value == DEVICE else value
            names.append(value.name)
            return Slot(len(names) - 1)
        if isinstance(value, (list, tuple)):
            return type(value)([numbered(item) for item in value])
        return value

    args = tuple(numbered(value) for value in line.args)
    kwargs = {name: numbered(value) for name, value in line.kwargs.items()}
    at = occurrence_at(line)
    if at is not None:
        args = (*args[:at], OCCURRENCE, *args[at + 1 :])
    return Call(line.target, args, kwargs, tuple(metas[name] for name in names)), names


def occurrence_at(line: CallLine) -> int | None:
    """The position of the number of a random draw among the arguments, if it draws."""
    if not line.target.startswith("autopar."):
        return None
    packet, overload = line.target.split(".")[1:]
    schema = getattr(getattr(torch.ops.autopar, packet), overload)._schema
    names = [argument.name for argument in schema.arguments]
    return names.index("occurrence") if "occurrence" in names else None


class KernelPrinter:
    """Turns the kernels of one operator into lines; `variables` maps slots to variables."""

    def __init__(
        self, line: CallLine, names: Names, stem: str, metas: Sequence[Meta],
        variables: Mapping[int, str], is_forward: bool = False,
    ) -> None:  # fmt: skip
        self.line, self.names, self.stem, self.metas = line, names, stem, metas
        self.variables, self.is_forward = dict(variables), is_forward
        at = occurrence_at(line)
        self._occurrence = None if at is None else line.args[at]

    def lines(
        self, kernels: Iterable[Kernel], known: Mapping[int, Variable], read: frozenset[int]
    ) -> list[KernelLine]:
        """The kernels as lines.

        `known` has the variables of some slots. Of the others, those in `read` get a name.
        """
        found = []
        for kernel in kernels:
            given = kernel.args
            if self._occurrence is not None:
                given = self._with_occurrence(given)
            args = filled(given, self._ref)
            kwargs = {n: _no_device(filled(v, self._ref)) for n, v in kernel.kwargs.items()}
            made = tuple(self._made(kernel, k, known, read) for k in range(len(kernel.outs)))
            key, where = self.line.key, self.line.where
            flags = self.is_forward, kernel.is_view
            target = _PRINTED.get(kernel.name, kernel.name)
            found.append(KernelLine(made, target, args, kwargs, key, where, *flags))
        return found

    def _ref(self, slot: int) -> Ref:
        return Ref(self.variables[slot])

    def _made(
        self, kernel: Kernel, position: int, known: Mapping[int, Variable], read: frozenset[int]
    ) -> Variable:
        slot = kernel.outs[position]
        if slot is None or (slot not in known and slot not in read):
            return Variable(UNUSED, (), torch.float32)
        if slot in known:
            variable = known[slot]
        else:
            meta = self.metas[slot]
            word = result_word(kernel.target, position, self.stem if self.is_forward else "")
            name = self.names.new(f"{self.stem}_{word}")
            variable = Variable(name, meta.shape, meta.dtype)
        self.variables[slot] = variable.name
        return variable

    def _with_occurrence(self, value: Any) -> Any:
        if isinstance(value, (list, tuple)) and not isinstance(value, Slot):
            return type(value)([self._with_occurrence(item) for item in value])
        is_number = type(value) is int and value == OCCURRENCE
        return self._occurrence if is_number else value


def _no_device(value: Any) -> Any:
    return DEVICE if isinstance(value, torch.device) else value
