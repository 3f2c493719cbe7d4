"""What replaces an operator where one of its names is sharded and shards alone would be wrong.

The cross-entropy of logits whose classes are sharded is no cross-entropy of the shards: it needs
sums over ranks. A `Lowering` names the function of `autopar.runtime.lowered` that computes it, and
says what planning must know of that function: where its results are, its collectives, what it
keeps for backward and what it needs in between.

Formulas (`formulas.py`) speak of the notation's names with the sizes of one rank; besides, `width`
is the bytes of one number inside: the first tensor's, but half precision is computed in float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from autopar.moves import PrimitiveKind
from autopar.rules.formulas import evaluate

# The argument that is the group of the ranks that share the name.
GROUP = "group"


def width_bytes(itemsize: int) -> int:
    """Bytes of one number inside a lowered function, whose tensors have `itemsize`."""
    return 4 if itemsize == 2 else itemsize


@dataclass(frozen=True)
class Inner:
    """A collective inside a lowered function; `size_bytes` is a formula, NCCL's accounting."""

    kind: PrimitiveKind
    size_bytes: str
    phase: Literal["forward", "backward"] = "forward"


@dataclass(frozen=True)
class Lowering:
    """A function of `runtime.lowered` and what it costs.

    arguments       names of the operator's arguments that it takes, in order; `GROUP` among them
    outputs         placement of each result, None where the notation says it
    inner           its collectives, in the order of execution
    keeps           positions of the operator's tensors that autograd keeps
    saved_bytes     what it keeps besides
    forward_bytes, backward_bytes   temporaries
    contiguous      it counts in contiguous shards: only the outermost factor of a dim will do
    """

    function: str
    arguments: tuple[str, ...]
    outputs: tuple[str | None, ...] = ()
    inner: tuple[Inner, ...] = ()
    keeps: tuple[int, ...] = ()
    saved_bytes: str = "0"
    forward_bytes: str = "0"
    backward_bytes: str = "0"
    contiguous: bool = True

    def value(self, formula: str, sizes: Mapping[str, float], itemsize: int) -> float:
        """A formula of this lowering; `sizes` are those of one rank."""
        return evaluate(formula, {**sizes, "width": width_bytes(itemsize)})


VOCABULARY_EMBEDDING = Lowering(
    "vocab_parallel_embedding",
    ("weight", "indices", GROUP, "padding_idx"),
    saved_bytes="9*lead",  # the localised ids (int64), and which of them are another rank's
    forward_bytes="lead*h*width",  # rows before those of other ranks are masked
    backward_bytes="lead*h*width",  # the masked gradient
)

_PER_ROW = Inner("all_reduce", "n*width")
VOCABULARY_CROSS_ENTROPY = Lowering(
    "vocab_parallel_cross_entropy",
    ("self", "target", GROUP, "ignore_index", "label_smoothing"),
    outputs=("I",),
    inner=(_PER_ROW, _PER_ROW, _PER_ROW),
    keeps=(0,),
    saved_bytes="n*(width + 10)",  # per row: log-sum-exp, the localised label, two flags
    forward_bytes="2*n*v*width",  # shifted logits and their exponentials
)
