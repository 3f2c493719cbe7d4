"""What the system reports and no timing measures: names, cores, memory."""

from __future__ import annotations

import os
import platform
import resource
import sys
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class LocalMachine:
    """`n_slots`: ranks that compute at full speed, one per core or GPU.

    `memory_bytes` is the memory of one GPU, or of the whole machine if ranks run on its CPU.
    `held_bytes` is what a rank holds before it has any tensor.
    """

    device: str
    is_cuda: bool
    n_slots: int
    memory_bytes: int
    held_bytes: int


def count_slots() -> int:
    """The number of GPUs, or else of cores that this process may use; takes no GPU memory."""
    if torch.cuda.is_available():
        return torch.cuda.device_count()
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def this_machine() -> LocalMachine:
    """The machine of this process, which is a rank; on a GPU this starts a context."""
    if torch.cuda.is_available():
        free_bytes, memory_bytes = torch.cuda.mem_get_info()
        name = torch.cuda.get_device_name()
        return LocalMachine(name, True, count_slots(), memory_bytes, memory_bytes - free_bytes)
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    # Linux counts in KiB, macOS in bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    held_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return LocalMachine(_cpu_name(), False, count_slots(), memory_bytes, held_bytes)


def _cpu_name() -> str:
    listed = Path("/proc/cpuinfo")
    if listed.is_file():
        for line in listed.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
