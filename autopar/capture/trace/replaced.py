"""Replaces functions of torch that cannot be traced, or refuses them with advice.

`ctc_loss` becomes autopar's operator (`operators/ctc.py`), reduced as torch does. Lists of lengths
become tensors, and targets without a batch a batch of one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from autopar.errors import NotSupportedError
from autopar.operators.ctc import ctc_loss

NONE, MEAN, SUM = 0, 1, 2  # torch's at::Reduction


class Replaced(TorchFunctionMode):
    """While it is entered, torch's functions of the table below are others."""

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        return _REPLACED.get(function, function)(*args, **(kwargs or {}))


def _functional_ctc_loss(
    log_probs: Tensor, targets: Tensor, input_lengths: Any, target_lengths: Any, blank: int = 0,
    reduction: str = "mean", zero_infinity: bool = False,
) -> Tensor:  # fmt: skip
    """What `torch.nn.functional.ctc_loss` computes."""
    number = torch.nn._reduction.get_enum(reduction)
    lengths = (input_lengths, target_lengths)
    return _ctc_loss(log_probs, targets, *lengths, blank, number, zero_infinity)


def _ctc_loss(
    log_probs: Tensor, targets: Tensor, input_lengths: Any, target_lengths: Any, blank: int = 0,
    reduction: int = MEAN, zero_infinity: bool = False,
) -> Tensor:  # fmt: skip
    """What `torch.ctc_loss` computes."""
    is_batched = log_probs.dim() == 3
    if not is_batched:
        log_probs = log_probs.unsqueeze(1)
        targets = targets if targets.dim() == 2 else targets.unsqueeze(0)
    n_rows = log_probs.shape[1]
    read = _lengths(input_lengths, n_rows)
    written = _lengths(target_lengths, n_rows)
    starts = written.cumsum(0) - written if targets.dim() == 1 else None
    losses: Tensor = ctc_loss(log_probs, targets, read, written, starts, blank, zero_infinity)
    if reduction == MEAN:
        return (losses / written.clamp_min(1)).mean()
    if reduction == SUM:
        return losses.sum()
    return losses if is_batched else losses.squeeze(0)


def _lengths(lengths: Any, n_rows: int) -> Tensor:
    if isinstance(lengths, Tensor):
        return lengths.reshape(n_rows).long()
    values = [int(length) for length in lengths]
    if len({*values}) == 1:
        return torch.full((n_rows,), values[0])
    return torch.tensor(values)


def _pack(*args: Any, **kwargs: Any) -> NoReturn:
    raise NotSupportedError(
        "the shape of a packed sequence depends on the lengths",
        hint="run the RNN over the padding, and mask what it gives there; what a forward direction "
        "gives before the padding does not depend on it",
    )


_REPLACED: dict[Any, Callable[..., Any]] = {
    F.ctc_loss: _functional_ctc_loss,
    torch.ctc_loss: _ctc_loss,
    torch._VF._pack_padded_sequence: _pack,
}
