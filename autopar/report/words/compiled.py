"""What compiling regions buys a plan, and what it takes, in a line.

compiled: 98.6 ms a step, eager 113 ms, 4 regions a rank, compiling takes about 25.6 s, which
          1.74 k steps save
"""

from __future__ import annotations

import math

from autopar.plans import Predicted
from autopar.report.words.assumptions import Remark
from autopar.units import format_bytes, format_count, format_seconds

# `make bench-compile` on CPUs: 5 regions of a Llama in 31 to 33 s (docs/measured.md).
REGION_S = 6.4
# A difference below is not worth a number.
_AS_MANY = 0.02


def compiling(compiled: Predicted, eager: Predicted, n_regions: int, is_gpu: bool) -> Remark:
    """The same plan, compiled and not; a rank compiles so many regions.

    On GPUs nobody has measured what compiling takes.
    """
    saved_s = eager.step_time_s - compiled.step_time_s
    words = [
        f"{format_seconds(compiled.step_time_s)} a step",
        f"eager {format_seconds(eager.step_time_s)}",
    ]
    if abs(compiled.peak_bytes - eager.peak_bytes) > _AS_MANY * eager.peak_bytes:
        peaks = format_bytes(compiled.peak_bytes), format_bytes(eager.peak_bytes)
        words.append("peak {}, eager {}".format(*peaks))
    words.append(f"{n_regions} region{'' if n_regions == 1 else 's'} a rank")
    if not is_gpu and n_regions and saved_s > 0:
        compile_s = n_regions * REGION_S
        n_steps = format_count(math.ceil(compile_s / saved_s))
        words.append(
            f"compiling takes about {format_seconds(compile_s)}, which {n_steps} steps save"
        )
    return Remark("compiled", ", ".join(words), advises=True)
