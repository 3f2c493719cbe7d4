"""Lowerings: functions that replace an operator whose result does not follow from shards alone.

For example, a cross-entropy with sharded classes needs sums over ranks. A `Lowering` names the
function of `autopar.runtime.lowered` that computes it. It also says what planning must know of that
function: placements of its results, its collectives, what it saves for backward, its temporaries.

Formulas (`formulas.py`) are over the names of the notation, with the sizes of one rank. Besides
these names they may use `item`, the bytes of one element of the first tensor; `width`, the bytes of
one element inside the function, which computes half precision in float32; `ranks`, the number of
ranks that share the name; and `parts` of a `Lowering`.

A rule lowers a name, "v", or a pair, "n e": tensors with n and tensors with e are sharded on the
same axis, and no tensor has both. The function computes offsets from the shards of the last name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import sympy
from numpy.typing import NDArray

from autopar.placement import PrimitiveKind
from autopar.rules.formulas import Sizes, evaluate, evaluate_all

# The argument that is the group of ranks over which the name is sharded.
GROUP = "group"
# The argument that says whether the sequence is in head-tail order (`placement/head_tail.py`).
FOLDED = "folded"


def width_bytes(itemsize: int) -> int:
    """Bytes of one element inside a lowered function, for tensors of `itemsize`."""
    return 4 if itemsize == 2 else itemsize


@dataclass(frozen=True)
class Inner:
    """A collective inside a lowered function; `size_bytes` is a formula, by NCCL's accounting.

    count         a formula: it runs so many times
    gradient_of   in backward, it runs only if that input has a gradient
    """

    kind: PrimitiveKind
    size_bytes: str
    phase: Literal["forward", "backward"] = "forward"
    gradient_of: int | None = None
    count: str = "1"

    def runs(self, input_grads: Sequence[bool]) -> bool:
        """Does it run? `input_grads[i]`: input i of the operator has a gradient."""
        if self.phase == "forward":
            return True
        return any(input_grads) if self.gradient_of is None else input_grads[self.gradient_of]


@dataclass(frozen=True)
class Lowering:
    """A function of `runtime.lowered` and its costs.

    arguments       the operator's arguments that it takes, in order, `GROUP` and `FOLDED`
    outputs         placement of each result; None (or nothing): by the notation
    inner           its collectives, in order of execution
    parts           a formula: how many parts they are in, one beside the compute of another
    beside          a formula: the share of its compute, forward or backward, beside which these run
    hidden          a formula: the share of their seconds that may run beside compute
    keeps           the operator's tensors that autograd saves
    saved_bytes     what autograd saves besides
    forward_bytes, backward_bytes   temporaries
    contiguous      the names whose shards must be contiguous, because it computes offsets from
                    them: only the outermost factor of a dim may be sharded. "last": the last of
                    those lowered
    wraps           it runs the operator itself on shards; what that saves and needs is measured and
                    added
    uneven          ranks compute unequal numbers of rows: its seconds, with those of its
                    collectives, are `imbalance` times those of equal numbers
    """

    function: str
    arguments: tuple[str, ...]
    outputs: tuple[str | None, ...] = ()
    inner: tuple[Inner, ...] = ()
    parts: str = "1"
    beside: str = "0"
    hidden: str = "1"
    keeps: tuple[str, ...] = ()
    saved_bytes: str = "0"
    forward_bytes: str = "0"
    backward_bytes: str = "0"
    contiguous: Literal["none", "last", "all"] = "last"
    wraps: bool = False
    uneven: bool = False

    @property
    def n_calls(self) -> Mapping[tuple[PrimitiveKind, str], str]:
        """How often it runs each kind of collective in each phase: formulas of `ranks`."""
        found: dict[tuple[PrimitiveKind, str], sympy.Expr] = {}
        for inner in self.inner:
            key = inner.kind, inner.phase
            found[key] = found.get(key, 0) + sympy.sympify(inner.count)
        return {key: str(n) for key, n in found.items()}

    def value(
        self, formula: str, sizes: Mapping[str, float], itemsize: int, n_ranks: int,
        imbalance: float = 1.0,
    ) -> float:  # fmt: skip
        """The value of a formula of this lowering; `sizes` are those of one of `n_ranks` ranks."""
        known = {"item": itemsize, "width": width_bytes(itemsize), "imbalance": imbalance}
        named: dict[str, Any] = {**sizes, **known, "ranks": n_ranks}
        named["parts"] = evaluate(self.parts, named)
        return evaluate(formula, named)

    def values(
        self, formula: str, sizes: Mapping[str, Sizes], itemsize: int, n_ranks: Sizes,
        imbalance: float = 1.0,
    ) -> NDArray[np.float64]:  # fmt: skip
        """`value` for arrays of sizes, which broadcast."""
        known = {"item": itemsize, "width": width_bytes(itemsize), "imbalance": imbalance}
        named: dict[str, Any] = {**known, **sizes, "ranks": n_ranks}
        named["parts"] = evaluate_all(self.parts, named)
        return evaluate_all(formula, named)


VOCABULARY_EMBEDDING = Lowering(
    "vocab_parallel_embedding",
    ("weight", "indices", GROUP, "padding_idx"),
    saved_bytes="9*lead",  # local ids (int64), and flags of those that belong to other ranks
    forward_bytes="lead*h*width",  # rows, before those of other ranks are masked
    backward_bytes="lead*h*width",  # the masked gradient
)

VOCABULARY_BAGS = Lowering(
    "vocab_parallel_bags",
    ("weight", "ids", GROUP, "starts", "ends", "factors", "padding_idx"),
    saved_bytes="(8 + item)*b*l + 16*b",  # local ids (int64), their factors, starts and ends
    forward_bytes="10*b*l",  # flags of ids of other ranks, and ids bag by bag
    backward_bytes="8*b*l",
)
# Factors that learn need the table for their gradients.
VOCABULARY_WEIGHTED_BAGS = replace(
    VOCABULARY_BAGS, function="vocab_parallel_weighted_bags", keeps=("weight",)
)

CAUSAL_ATTENTION = Lowering(
    "causal_attention",
    ("query", "key", "value", GROUP, "scale", "enable_gqa", FOLDED),
    saved_bytes="c*t*item",  # the mask, as a summand of the scores
    forward_bytes="c*t",  # the mask as flags
    backward_bytes="lead*t*(e + f)*item",  # gradients of the keys and values in use
    wraps=True,
)

# Keys and values of one rank, in a message; their gradients are added in float32 at least.
_KEYS, _GRADIENTS = "lead*t*(e + f)*item", "lead*t*(e + f)*width"
RING_ATTENTION = Lowering(
    "ring_attention",
    ("query", "key", "value", GROUP, "is_causal", "scale", "enable_gqa", FOLDED),
    inner=(
        Inner("send_recv", _KEYS, count="ranks - 1"),
        Inner("send_recv", _KEYS, "backward", count="ranks - 1"),
        Inner("send_recv", _GRADIENTS, "backward", count="ranks - 1"),
    ),
    beside="(ranks - 1)/ranks",
    # Besides messages: the results of a step, before they are added; gradients of rows.
    forward_bytes=f"2*{_KEYS} + lead*g*s*c*f*(3*width - 2*item)",
    backward_bytes=f"2*{_KEYS} + 2*{_GRADIENTS} + lead*g*s*c*e*width",
    contiguous="all",
    wraps=True,
)

_PER_ROW = Inner("all_reduce", "n*width")
VOCABULARY_CROSS_ENTROPY = Lowering(
    "vocab_parallel_cross_entropy",
    ("self", "target", GROUP, "ignore_index", "label_smoothing"),
    outputs=("I",),
    inner=(_PER_ROW, _PER_ROW, _PER_ROW),
    keeps=("self",),
    saved_bytes="n*(width + 10)",  # per row: log-sum-exp, local label, two flags
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
    backward_bytes="2*n*c*lead*width",  # normalised input, and that times the gradient
    contiguous="none",
)
BATCH_NORM_WITH_STATISTICS = replace(
    BATCH_NORM,
    function="synchronised_batch_norm_with_statistics",
    arguments=(
        "input", "weight", "bias", "running_mean", "running_var", GROUP, "momentum", "eps",
    ),
    outputs=(None, "R", "R", "R", "R"),
)  # fmt: skip
