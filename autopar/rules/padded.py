"""Operators over a vocabulary that ends in padding: what they compute, and their lowerings.

Rows of a table, or classes of logits, at or above `n_valid` are padding
(`passes/analysis/padding.py`):

    padded_embedding        an id of at least n_valid fails like one outside of the table
    padded_cross_entropy    uses only classes below n_valid, also to smooth labels

So their results are those without padding, bit for bit, and the gradient of padding is exactly 0.
Both take the arguments of their ATen operator and `n_valid`, and share its rule.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from autopar.rules.lowering import VOCABULARY_CROSS_ENTROPY, VOCABULARY_EMBEDDING, Lowering

aten = torch.ops.aten
N_VALID = "n_valid"

_library = torch.library.Library("autopar", "FRAGMENT")
_library.define(
    "padded_embedding(Tensor weight, Tensor indices, int padding_idx=-1, "
    "bool scale_grad_by_freq=False, bool sparse=False, *, int n_valid) -> Tensor"
)
_library.define(
    "padded_cross_entropy(Tensor self, Tensor target, Tensor? weight=None, int reduction=1, "
    "int ignore_index=-100, float label_smoothing=0.0, *, int n_valid) -> Tensor"
)


def _embedding(
    weight: Tensor, indices: Tensor, padding_idx: int = -1, scale_grad_by_freq: bool = False,
    sparse: bool = False, *, n_valid: int,
) -> Tensor:  # fmt: skip
    outside = weight.shape[0]
    ids = indices.masked_fill(indices >= n_valid, outside)
    return aten.embedding(weight, ids, padding_idx, scale_grad_by_freq, sparse)


def _cross_entropy(
    self: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = 1,
    ignore_index: int = -100, label_smoothing: float = 0.0, *, n_valid: int,
) -> Tensor:  # fmt: skip
    valid = self.narrow(min(self.dim() - 1, 1), 0, n_valid)
    return aten.cross_entropy_loss(valid, target, weight, reduction, ignore_index, label_smoothing)


_library.impl("padded_embedding", _embedding, "CompositeImplicitAutograd")
_library.impl("padded_cross_entropy", _cross_entropy, "CompositeImplicitAutograd")


def _knowing_valid(lowering: Lowering) -> Lowering:
    return replace(lowering, arguments=(*lowering.arguments, N_VALID))


# ATen operator -> its padded form (padding in the dim named `v`), and the lowering of that.
PADDED: dict[str, tuple[torch._ops.OpOverload, Lowering]] = {
    "aten.embedding.default": (
        torch.ops.autopar.padded_embedding.default,
        _knowing_valid(VOCABULARY_EMBEDDING),
    ),
    "aten.cross_entropy_loss.default": (
        torch.ops.autopar.padded_cross_entropy.default,
        _knowing_valid(VOCABULARY_CROSS_ENTROPY),
    ),
}
