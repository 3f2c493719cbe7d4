"""Says which lines a compiler may fuse with others: ATen operators on tensors and constants."""

from __future__ import annotations

from functools import lru_cache

import torch

from autopar.errors import OptionError
from autopar.program.lines.joint_program import JointLine, KernelLine
from autopar.program.lines.stage_program import CallLine, DetachLine
from autopar.program.lines.variables import DEVICE
from autopar.rules import find_operator

# Operators whose results depend on more than their arguments, or have no shape beforehand.
_DYNAMIC = {
    torch.Tag.nondeterministic_seeded, torch.Tag.dynamic_output_shape,
    torch.Tag.data_dependent_output,
}  # fmt: skip


@lru_cache
def operator_tags(target: str) -> frozenset[torch.Tag] | None:
    """The tags of an operator; None for what is no operator of PyTorch."""
    try:
        return frozenset(find_operator(target).tags)
    except OptionError:
        return None


def is_compilable(line: JointLine) -> bool:
    """Is a line an ATen operator whose results depend on tensors and constants alone?"""
    match line:
        case DetachLine():
            return True
        case KernelLine() | CallLine(lowered=None):
            tags = operator_tags(line.target) if line.target.startswith("aten.") else None
            is_here = DEVICE in (*line.args, *line.kwargs.values())
            return tags is not None and not tags & _DYNAMIC and not is_here
    return False
