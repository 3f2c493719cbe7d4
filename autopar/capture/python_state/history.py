"""Tensors with a history of autograd that modules keep: an earlier forward's, or made beforehand.

    self.attention = weights       forward keeps what it computed, so a model that ran has one
    model.scaled = weight * 2      made before forward, which reads it

The first is written before it is read, so the trace needs no value of it. The second is refused:
the trace would keep its value, and gradients through it would be lost.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopar.capture.python_state.snapshot import INTERNAL
from autopar.errors import CaptureError
from autopar.program.graph import AttributeReads


def with_history(model: nn.Module) -> Iterator[tuple[tuple[str, str], Tensor]]:
    """((module path, attribute), tensor) of each, in lists and dicts too."""
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name not in INTERNAL:
                for leaf in pytree.tree_leaves(value):
                    if isinstance(leaf, Tensor) and not leaf.is_leaf:
                        yield (path, name), leaf


def check_history(model: nn.Module, reads: AttributeReads) -> None:
    """Raise `CaptureError` if a trace with these reads has read one."""
    for (path, name), _ in with_history(model):
        if (path, name) in reads:
            raise CaptureError(
                f"`{f'{path}.{name}'.removeprefix('.')}` was computed from parameters before "
                "forward; the trace would keep its value",
                hint="compute it in forward, or detach it and register it as a buffer",
            )
