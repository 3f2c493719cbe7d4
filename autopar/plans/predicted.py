"""What the cost model predicts of one training step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Predicted:
    """One training step, optimizer included.

    compute_time_s    operators and local parts of reshards, on one rank of the busiest stage
    comm_time_s       collectives and sends of that rank
    exposed_comm_s    its collectives, and its waits for transfers under way
    peak_bytes        the most bytes of tensors on one rank at any time
    bubble            idle time / total time, over all ranks
    mfu               model FLOPs / (ranks x peak rate x step time); recomputed and replicated
                      work does not count
    interval_ratio    80% of published steps lie within this ratio of predicted ones
    samples_per_s, tokens_per_s     None if the batch size is unknown
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
    peak_bytes_per_stage: tuple[float, ...] = ()
    interval_ratio: float | None = None

    @property
    def interval_s(self) -> tuple[float, float] | None:
        """(low, high): the step takes between these seconds, in 80% of cases; None where nothing is
        known of the machine.

        The ratio is that of published runs of the same software and device, each predicted by a
        fit to other papers (`cost/published/fit.py`).
        """
        if self.interval_ratio is None:
            return None
        return self.step_time_s / self.interval_ratio, self.step_time_s * self.interval_ratio
