"""memory."""

from autopar.cost.memory.liveness import gradients_under_way, kept_bytes, peak_memory
from autopar.cost.memory.state import StaticBytes, optimizer_time_s, static_bytes_per_param

__all__ = [
    "StaticBytes",
    "gradients_under_way",
    "kept_bytes",
    "optimizer_time_s",
    "peak_memory",
    "static_bytes_per_param",
]
