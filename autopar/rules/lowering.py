"""What replaces an operator where one of its names is sharded and shards alone would be wrong.

The cross-entropy of logits whose classes are sharded is no cross-entropy of the shards: it needs
sums over ranks. A `Lowering` names the function of `autopar.runtime.lowered` that computes it, and
says what planning must know of that function: where its results are, its collectives, what it
keeps for backward and what it needs in between.

Formulas (`formulas.py`) speak of the notation's names with the sizes of one rank; besides, `item`
is the bytes of one number of the first tensor, and `width` of one inside: half precision is
computed in float32. `ranks` is how many share the name.

A rule lowers a name, "v", or a pair, "n e": tensors that carry n and tensors that carry e are
sharded on the same axis, and no tensor carries both. The function counts in shards of the last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from autopar.placement import PrimitiveKind
from autopar.rules.formulas import Sizes, evaluate, evaluate_all

# The argument that is the group of the ranks that share the name.
GROUP = "group"


def width_bytes(itemsize: int) -> int:
    """Bytes of one number inside a lowered function, whose tensors have `itemsize`."""
    return 4 if itemsize == 2 else itemsize


@dataclass(frozen=True)
class Inner:
    """A collective inside a lowered function; `size_bytes` is a formula, NCCL's accounting.

    One of backward that makes the gradient of one input runs only where that input has one.
    """

    kind: PrimitiveKind
    size_bytes: str
    phase: Literal["forward", "backward"] = "forward"
    gradient_of: int | None = None

    def runs(self, input_grads: Sequence[bool]) -> bool:
        """Does it run where the operator's inputs have gradients so?"""
        if self.phase == "forward":
            return True
        return any(input_grads) if self.gradient_of is None else input_grads[self.gradient_of]


@dataclass(frozen=True)
class Lowering:
    """A function of `runtime.lowered` and what it costs.

    arguments       names of the operator's arguments that it takes, in order; `GROUP` among them
    outputs         placement of each result, None where the notation says it
    inner           its collectives, in the order of execution
    keeps           names of the operator's tensors that autograd keeps
    saved_bytes     what it keeps besides
    forward_bytes, backward_bytes   temporaries
    contiguous      it counts in contiguous shards: only the outermost factor of a dim will do
    wraps           it runs the operator itself on shards: what that keeps and needs is measured,
                    and comes on top
    """

    function: str
    arguments: tuple[str, ...]
    outputs: tuple[str | None, ...] = ()
    inner: tuple[Inner, ...] = ()
    keeps: tuple[str, ...] = ()
    saved_bytes: str = "0"
    forward_bytes: str = "0"
    backward_bytes: str = "0"
    contiguous: bool = True
    wraps: bool = False

    def value(self, formula: str, sizes: Mapping[str, float], itemsize: int, n_ranks: int) -> float:
        """A formula of this lowering; `sizes` are those of one of `n_ranks`."""
        widths = {"item": itemsize, "width": width_bytes(itemsize)}
        return evaluate(formula, {**sizes, **widths, "ranks": n_ranks})

    def values(
        self, formula: str, sizes: Mapping[str, Sizes], itemsize: int, n_ranks: Sizes
    ) -> NDArray[np.float64]:
        """`value` for arrays of sizes, which broadcast; of a formula without `Max`."""
        widths = {"item": itemsize, "width": width_bytes(itemsize)}
        return evaluate_all(formula, {**sizes, **widths, "ranks": n_ranks})


VOCABULARY_EMBEDDING = Lowering(
    "vocab_parallel_embedding",
    ("weight", "indices", GROUP, "padding_idx"),
    saved_bytes="9*lead",  # the localised ids (int64), and which of them are another rank's
    forward_bytes="lead*h*width",  # rows before those of other ranks are masked
    backward_bytes="lead*h*width",  # the masked gradient
)

CAUSAL_ATTENTION = Lowering(
    "causal_attention",
    ("query", "key", "value", GROUP, "scale", "enable_gqa"),
    saved_bytes="c*t*item",  # the mask, as what is added to the scores
    forward_bytes="c*t",  # the mask as flags
    backward_bytes="lead*t*(e + f)*item",  # gradients of the keys and values that are seen
    wraps=True,
)

_PER_ROW = Inner("all_reduce", "n*width")
VOCABULARY_CROSS_ENTROPY = Lowering(
    "vocab_parallel_cross_entropy",
    ("self", "target", GROUP, "ignore_index", "label_smoothing"),
    outputs=("I",),
    inner=(_PER_ROW, _PER_ROW, _PER_ROW),
    keeps=("self",),
    saved_bytes="n*(width + 10)",  # per row: log-sum-exp, the localised label, two flags
    forward_bytes="2*n*v*width",  # shifted logits and their exponentials
)

BATCH_NORM = Lowering(
    "synchronised_batch_norm",
    ("input", "weight", "bias", GROUP, "eps"),
    inner=(
        Inner("all_gather", "2*c*width*ranks"),  # every rank's means and squares
        Inner("all_reduce", "2*c*width", "backward", gradient_of=0),
    ),
    keeps=("input", "weight"),
    saved_bytes="2*c*width",
    forward_bytes="n*c*lead*width",  # deviations, before they are scaled
    backward_bytes="2*n*c*lead*width",  # normalised input, and its product with the gradient
    contiguous=False,
)
BATCH_NORM_WITH_STATISTICS = replace(
    BATCH_NORM,
    function="synchronised_batch_norm_with_statistics",
    arguments=(
        "input", "weight", "bias", "running_mean", "running_var", GROUP, "momentum", "eps",
    ),
    outputs=(None, "R", "R", "R", "R"),
)  # fmt: skip
