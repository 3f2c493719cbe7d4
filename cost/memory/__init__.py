"""How many bytes a rank of a stage needs: state between steps, and the peak within a step.

Read `state.py` (bytes and update time per parameter), `workspace.py` (what libraries hold) and
`allocator.py` (allocated, reserved, margin). Then `ledger.py` (a count of live bytes), `buffers.py`
(buffers of collectives) and `regions.py` (compiled regions). Then `live_microbatch.py` (live bytes
of one microbatch, moment by moment), `microbatch.py` (played on a ledger) and `liveness.py` (the
peak over a whole step). Last `actions.py` (the same by action, for devices with several stages) and
`course.py` (all its moments, for reports).

The room may import `hardware` and what lies below `cost`; not `laws` or `simulate`, which are its
neighbours. It mainly hands on `peak_memory`, `kept_bytes` and `static_bytes_per_param`.
"""

from autopar.cost.memory.actions import RowPeak, StageMemory, peak_of_row, stage_memory
from autopar.cost.memory.allocator import (
    EXPANDABLE,
    Footprint,
    Setting,
    footprint,
    footprint_of_plan,
    least_margin,
)
from autopar.cost.memory.course import LiveBytes, MemoryCourse, Phase, memory_course
from autopar.cost.memory.liveness import PeakMemory, gradients_under_way, kept_bytes, peak_memory
from autopar.cost.memory.state import (
    StaticBytes,
    optimizer_time_s,
    static_bytes_per_param,
    update_time_s,
)
from autopar.cost.memory.workspace import workspace_bytes

__all__ = [
    "EXPANDABLE",
    "Footprint",
    "LiveBytes",
    "MemoryCourse",
    "PeakMemory",
    "Phase",
    "RowPeak",
    "Setting",
    "StageMemory",
    "StaticBytes",
    "footprint",
    "footprint_of_plan",
    "gradients_under_way",
    "kept_bytes",
    "least_margin",
    "memory_course",
    "optimizer_time_s",
    "peak_memory",
    "peak_of_row",
    "stage_memory",
    "static_bytes_per_param",
    "update_time_s",
    "workspace_bytes",
]
