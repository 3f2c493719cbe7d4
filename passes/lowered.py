"""What lowering must know of the functions in `autopar.runtime.lowered`.

They replace an operator whose sharded dim needs more than its own shard; arguments, inner
collectives and what they keep for backward are theirs, not the operator's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from autopar.stage_program import Local, Workspace


@dataclass(frozen=True)
class LoweredFunction:
    """One function of `runtime.lowered`.

    arguments    the operator's argument names it takes; the group follows the second one
    keeps        positions of inputs that autograd keeps
    saved_bytes  bytes it keeps besides, per element of the second input, by the logits' width
    forward_copies, backward_copies     temporaries as large as its largest tensor
    """

    arguments: tuple[str, ...]
    keeps: tuple[int, ...]
    saved_bytes: Callable[[int], int]
    forward_copies: int
    backward_copies: int


_INDEX, _FLAG = torch.int64.itemsize, torch.bool.itemsize

LOWERED: dict[str, LoweredFunction] = {
    # The localised ids, and which of them are another rank's.
    "vocab_parallel_embedding": LoweredFunction(
        ("weight", "indices", "padding_idx"),
        (),
        lambda width: _INDEX + _FLAG,
        forward_copies=1,  # rows before those of other ranks are masked
        backward_copies=1,  # the masked gradient
    ),
    # Logits; per row its log-sum-exp, the localised label and two flags.
    "vocab_parallel_cross_entropy": LoweredFunction(
        ("self", "target", "ignore_index", "label_smoothing"),
        (0,),
        lambda width: width + _INDEX + 2 * _FLAG,
        forward_copies=2,  # shifted logits and their exponentials
        backward_copies=0,
    ),
}


def inner_width(dtype: torch.dtype) -> int:
    """Bytes of one inner number: half-precision logits are computed in float32."""
    return torch.float32.itemsize if dtype.itemsize == 2 else dtype.itemsize


def lowered_saved_bytes(name: str, inputs: Sequence[Local]) -> int:
    """Bytes that one rank keeps for backward, inputs excepted."""
    per_element = LOWERED[name].saved_bytes(inner_width(inputs[0].dtype))
    return math.prod(inputs[1].shape) * per_element


def lowered_workspace(name: str, inputs: Sequence[Local], outs: Sequence[Local]) -> Workspace:
    """Temporaries of one rank: copies of the logits, or of the embedded rows."""
    activations = inputs[0] if name == "vocab_parallel_cross_entropy" else outs[0]
    copy_bytes = math.prod(activations.shape) * inner_width(activations.dtype)
    function = LOWERED[name]
    return Workspace(function.forward_copies * copy_bytes, function.backward_copies * copy_bytes)
