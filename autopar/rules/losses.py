"""Rules of losses that torch computes in one operator.

An elementwise loss is pointwise. Its sum is Partial on every axis that shards a dim. Means do not
occur: capture writes them as a sum divided by the number of elements, or of labels that count
(`capture/rewrites/losses.py`).
"""

from __future__ import annotations

import torch

from autopar import operators
from autopar.placement import Notation
from autopar.rules.families import broadcast_term, named_term, names, pointwise, whole
from autopar.rules.rule import LinearSets, OpCall, OpRule

MEAN = torch.nn._reduction.get_enum("mean")


def elementwise(call: OpCall) -> Notation:
    """An elementwise loss of inputs that broadcast, per element or summed."""
    if not call.args["reduction"]:
        return pointwise(call)
    shape = tuple(torch.broadcast_shapes(*call.inputs))
    labels = names(len(shape))
    return Notation(tuple(broadcast_term(s, shape, labels) for s in call.inputs), ((),))


def refuse_mean(call: OpCall) -> str | None:
    """Capture rewrites means, so none should be left."""
    mean = call.args["reduction"] == MEAN
    return "a mean that capture did not write as sum / count" if mean else None


def negative_log_likelihood(call: OpCall) -> Notation:
    """Scores [n, v] or [n, v, ...] against class indices; classes stay whole.

    The weights, if any, are one per class.
    """
    scores, labels = call.inputs[:2]
    rest = names(len(scores) - 2)
    rows = ("n",) if len(scores) > 1 else ()
    target = named_term(labels, (*rows, *rest))
    weights = tuple(named_term(s, ("v",)) for s in call.inputs[2:])
    out = target if call.outputs[0] else ()
    return Notation(
        (named_term(scores, (*rows, "v", *rest)), target, *weights), (out,), frozenset({"v"})
    )


def _ctc(call: OpCall) -> Notation:
    """Rows are free: `t! n c!, n s!, n, n -> n`, or with targets in a list `s!`, and starts."""
    is_listed = call.args["starts"] is not None
    targets = ("s",) if is_listed else ("n", "s")
    terms = [("t", "n", "c"), targets, *[("n",)] * (len(call.inputs) - 2)]
    return Notation(
        tuple(named_term(s, t) for s, t in zip(call.inputs, terms, strict=True)),
        (named_term(call.outputs[0], ("n",)),),
        frozenset({"t", "c", "s"}),
    )


def _margins(call: OpCall) -> Notation:
    """Rows are free: `n c!, n -> n` (or `n c!, n c! -> n, n c`), or summed. A scalar is a score."""
    scores, labels, *weights = call.inputs
    if not scores:
        return whole(call)
    rows = ("n",) if len(scores) == 2 else ()
    target = named_term(labels, (*rows, "c")[: len(labels)] if rows else names(len(labels), "c"))
    term = named_term(scores, (*rows, "c"))
    out = named_term(call.outputs[0], rows) if call.outputs[0] else ()
    more = (target,) if len(call.outputs) == 2 else ()
    others = tuple(named_term(s, ("c",)) for s in weights)
    return Notation((term, target, *others), (out, *more), frozenset({"c", "c0"}))


LINEAR: LinearSets = ((0,),)
LOSSES = (
    OpRule("aten.multi_margin_loss.default", _margins, check=refuse_mean),
    OpRule("aten.multilabel_margin_loss_forward.default", _margins, check=refuse_mean),
    OpRule(str(operators.ctc.ctc_loss._opoverload), _ctc),
    *(
        OpRule(f"aten.{name}.default", elementwise, check=refuse_mean)
        for name in (
            "smooth_l1_loss", "huber_loss", "soft_margin_loss", "binary_cross_entropy",
            "binary_cross_entropy_with_logits", "kl_div",
        )
    ),
    *(
        OpRule(f"aten.{name}.default", negative_log_likelihood, linear=LINEAR, check=refuse_mean)
        for name in ("nll_loss", "nll_loss_nd")
    ),
)  # fmt: skip
