"""What is live when the first backward begins, beside all that a microbatch saves.

It begins with the loss. That needs temporaries, and makes gradients of its inputs: of a language
model both are as large as the logits. So a peak is at least

    parameters + state + saved for backward + needed at once + gradients of parameters

From the second microbatch on, the gradients of those before are there. In a step of one microbatch
there are none yet. Its peak may then also be at its end, with all gradients and nothing saved. A
sum over choices cannot say which is higher. So if the loss surely needs more than all gradients, it
counts, and they do not; else they count, and the loss does not.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.caching import once
from autopar.passes.analysis import Analysis, Neediest
from autopar.passes.intra.cases import Cases


@dataclass(frozen=True)
class AtLoss:
    """What counts in several cases.

    neediest    the operator that needs most; None: it is in a later stage, or may be in one whose
                microbatches in flight would multiply what it needs
    needs       [cases]: does what it needs count?
    gradients   [cases]: do gradients of parameters count?
    """

    neediest: Neediest | None
    needs: tuple[bool, ...]
    gradients: tuple[bool, ...]

    @staticmethod
    def of(analysis: Analysis, cases: Cases) -> AtLoss:
        if _is_elsewhere(analysis):
            return AtLoss(None, (False,) * len(cases), (True,) * len(cases))
        n_ranks = cases.costs[0].mesh.n_ranks
        is_most = analysis.neediest.total_bytes / n_ranks >= _gradient_bytes(analysis)
        needs = tuple(m > 1 or is_most for m in cases.counts)
        gradients = tuple(m > 1 or not is_most for m in cases.counts)
        return AtLoss(analysis.neediest, needs, gradients)


def least_at_loss_bytes(analysis: Analysis, n_microbatches: int, n_ranks: int) -> float:
    """What one of `n_ranks` ranks needs at least beside gradients and all that is saved."""
    if _is_elsewhere(analysis):
        return 0.0
    n_splits = analysis.batch.n_splits(n_microbatches)
    least_bytes = analysis.neediest.least_bytes / n_splits / n_ranks
    if n_microbatches > 1:
        return least_bytes
    return max(0.0, least_bytes - _gradient_bytes(analysis))


def _is_elsewhere(analysis: Analysis) -> bool:
    """Does what it needs not count? Problems of any stage ("least") do not know which has it."""
    program, is_any_stage = analysis.program, analysis.gathers == "least"
    return bool(program.sent) or is_any_stage or analysis.all_in_flight or not program.training


@once
def _gradient_bytes(analysis: Analysis) -> float:
    """Bytes of the gradients of all parameters, unsharded."""
    names = analysis.parameter_names or analysis.program.parameters
    trained = (t for n in names if (t := analysis.types.tensors[n]).has_grad)
    return sum(max(t.size_bytes, t.gradient_bytes(t.size_bytes)) for t in trained)
