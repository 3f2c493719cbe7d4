"""Where the time of a step goes: in kernels, and between them.

A kernel is an ATen operator without the operators that it calls (`torch.profiler`). Between them
lie Python, autograd's own work, and waiting: for collectives, messages and slower ranks. If two
sides run the same kernels, the time between them is all that either can gain.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from torch.profiler import ProfilerActivity, profile

from autopar.units import format_seconds

_MATMULS = frozenset(f"aten::{name}" for name in ("mm", "addmm", "bmm", "baddbmm"))


@dataclass(frozen=True)
class Parts:
    """Mean seconds of a step under the profiler, which makes short kernels longer."""

    matmuls_s: float
    other_kernels_s: float
    between_s: float

    def texts(self) -> list[str]:
        """Each part with its share of the step."""
        parts = self.matmuls_s, self.other_kernels_s, self.between_s
        return [f"{format_seconds(s)} ({s / sum(parts):.1%})" for s in parts]


def parts_of(step: Callable[[], object], n_steps: int = 5) -> Parts:
    """The parts of `step`, which runs `n_steps` times."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        begin_s = time.perf_counter()
        for _ in range(n_steps):
            step()
        whole_s = time.perf_counter() - begin_s
    own_s = {e.key: 1e-6 * e.self_cpu_time_total for e in profiled.key_averages()}
    kernels_s = sum(s for name, s in own_s.items() if name.startswith("aten::"))
    matmuls_s = sum(s for name, s in own_s.items() if name in _MATMULS)
    each = matmuls_s, kernels_s - matmuls_s, whole_s - kernels_s
    return Parts(*(s / n_steps for s in each))
