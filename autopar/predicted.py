"""What the cost model predicts of one training step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Predicted:
    """One training step, optimizer included.

    compute_time_s    operators and local parts of reshards, on one rank
    comm_time_s       all collectives; `exposed_comm_s` what is not hidden behind compute
    peak_bytes        most bytes of tensors on one rank at any time
    bubble            idle time / total
    mfu               model flops / (ranks x peak rate x step time); recomputed and replicated
                      work does not count
    samples_per_s, tokens_per_s     None when the batch is not known
    """

    step_time_s: float
    peak_bytes: float
    compute_time_s: float
    comm_time_s: float
    exposed_comm_s: float
    optimizer_time_s: float
    bubble: float
    samples_per_s: float | None
    tokens_per_s: float | None
    mfu: float
