"""Says which lines a compiler may fuse with others: ATen operators on tensors and constants.

A region is a maximal run of such operators of one block (`RegionNumbers`): it is a function of the
generated file (`autopar/codegen/regions.py`), and so its prices and live bytes are counted.
"""

from __future__ import annotations

import itertools
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
_ATTENTION = "scaled_dot_product"
_FUSING_TAGS = {torch.Tag.pointwise, torch.Tag.reduction}
# Operators without such a tag that inductor fuses too (torch/_inductor/lowering.py).
_FUSED = frozenset(
    f"aten.{name}"
    for name in (
        "layer_norm.default", "native_layer_norm.default", "native_layer_norm_backward.default",
        "softmax.int", "_softmax.default", "_softmax_backward_data.default", "log_softmax.int",
        "_log_softmax.default", "_log_softmax_backward_data.default", "cat.default", "to.dtype",
        "clone.default", "constant_pad_nd.default", "pad.default", "var_mean.correction",
    )
)  # fmt: skip


@lru_cache
def operator_tags(target: str) -> frozenset[torch.Tag] | None:
    """The tags of an operator; None for what is no operator of PyTorch."""
    try:
        return frozenset(find_operator(target).tags)
    except OptionError:
        return None


@lru_cache
def is_fused(target: str) -> bool:
    """Does inductor make one kernel of this operator and its neighbours?"""
    return target in _FUSED or bool((operator_tags(target) or frozenset()) & _FUSING_TAGS)


def is_compilable_call(target: str) -> bool:
    """Is it an ATen operator whose results depend on its arguments alone, and no fused attention?

    Attention is a kernel of its own both ways. A region about it would mix what is before and after
    it, and hold both.
    """
    tags = operator_tags(target) if target.startswith("aten.") else None
    return tags is not None and not tags & _DYNAMIC and _ATTENTION not in target


def is_compilable(line: JointLine) -> bool:
    """Is a line an ATen operator whose results depend on tensors and constants alone?"""
    match line:
        case DetachLine():
            return True
        case KernelLine() | CallLine(lowered=None):
            is_here = DEVICE in (*line.args, *line.kwargs.values())
            return is_compilable_call(line.target) and not is_here
    return False


class RegionNumbers:
    """Numbers the regions of a program, operator by operator; `open` is that of the last one."""

    def __init__(self) -> None:
        self.open: int | None = None
        self._count = itertools.count()
        self._block: str | None = None

    def next(self, is_taken: bool, block: str | None, follows: bool = False) -> int | None:
        """The number of the region that an operator of a block is in; None if it is not taken. One
        that `follows` belongs to the block of the operator before."""
        if not is_taken:
            self.open = None
        elif self.open is None or not (follows or block == self._block):
            self.open = next(self._count)
        self._block = self._block if follows else block
        return self.open
