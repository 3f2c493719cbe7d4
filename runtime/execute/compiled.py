"""Compiles regions of generated files, which are functions of tensors alone, by `torch.compile`.

Kernels are kept on disk by torch (`TORCHINDUCTOR_CACHE_DIR`), so ranks of a host share them, and a
run that starts again finds them. With `TORCHDYNAMO_DISABLE=1` regions run as they are written.

With `compile="regions+graphs"` each call of a region in a step is also recorded as a CUDA graph, by
inductor's graph trees: the first step warms up, the second records, later ones replay. Results of
graphs are valid until the next step begins (`cudagraph_mark_step_begin`), however many microbatches
are in flight; what lives longer is copied (`Executor`). Steps are counted by process, so ranks that
are threads cannot record.
"""

from __future__ import annotations

import functools
import os
import shutil
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from autopar.errors import NotSupportedError

Region = Callable[..., tuple[Tensor, ...]]

# Record every region as a CUDA graph, and raise if that cannot be.
_GRAPHS: dict[str, str | int | bool | Callable[..., Any]] = {
    "triton.cudagraphs": True,
    "triton.cudagraph_or_error": True,
}
# One compiles at a time: ranks may be threads.
_LOCK = threading.RLock()


class CompiledRegion:
    """A region that is compiled when it is first called, for the shapes that it then has.

    compile_s   seconds of its first call; None before
    """

    def __init__(self, function: Region, has_graphs: bool = False) -> None:
        functools.update_wrapper(self, function)
        self.file = function.__code__.co_filename
        self.compile_s: float | None = None
        options = _GRAPHS if has_graphs else None
        self._run: Region = torch.compile(function, fullgraph=True, dynamic=False, options=options)

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        if self.compile_s is not None:
            return self._run(*tensors)
        with _LOCK:
            began_s = time.perf_counter()
            try:
                results = self._run(*tensors)
            except Exception as error:
                name = getattr(self, "__name__", "a region")
                error.add_note(f'{name} of {self.file} did not compile; compile="none" runs it')
                raise
            if self.compile_s is None:
                self.compile_s = time.perf_counter() - began_s
                _tell_if_complete(self.file)
            return results


# (file, name) -> its region, which ranks that are threads of a process share.
_REGIONS: weakref.WeakValueDictionary[tuple[str, str], CompiledRegion] = (
    weakref.WeakValueDictionary()
)
# File -> whom to tell when all its regions are compiled.
_LISTENERS: dict[str, Callable[[int, float], None]] = {}


def compiled(function: Region) -> CompiledRegion:
    """The decorator of regions in generated files."""
    return _shared(function, False)


def graphed(function: Region) -> CompiledRegion:
    """The same, where regions are CUDA graphs."""
    return _shared(function, True)


def _shared(function: Region, has_graphs: bool) -> CompiledRegion:
    key = function.__code__.co_filename, function.__name__
    with _LOCK:
        region = _REGIONS.get(key)
        if region is None:
            region = _REGIONS[key] = CompiledRegion(function, has_graphs)
        return region


def tell_when_compiled(file: str, tell: Callable[[int, float], None]) -> int:
    """Call `tell(number of regions, their seconds)` once those of a file are compiled.

    Returns how many are not compiled yet; with none, nothing is told.
    """
    with _LOCK:
        n_left = sum(region.compile_s is None for region in _regions_of(file))
        if n_left:
            _LISTENERS[file] = tell
        return n_left


def _regions_of(file: str) -> list[CompiledRegion]:
    return [region for region in list(_REGIONS.values()) if region.file == file]


def _tell_if_complete(file: str) -> None:
    times_s = [region.compile_s for region in _regions_of(file)]
    if file in _LISTENERS and None not in times_s:
        _LISTENERS.pop(file)(len(times_s), sum(time_s or 0.0 for time_s in times_s))


def require_compiler(device: torch.device, wanted: str = "regions") -> None:
    """Raises `NotSupportedError` if `compile=wanted` lacks something on a device."""
    if (lack := lacking(device, wanted)) is not None:
        raise NotSupportedError(f"compile={wanted!r} needs {lack[0]}", hint=lack[1])


def lacking(device: torch.device, wanted: str) -> tuple[str, str] | None:
    """What `compile=wanted` needs and does not find on a device, and what to do about it."""
    if wanted == "regions+graphs" and device.type != "cuda":
        return f"a GPU, and this rank runs on the {device.type}", 'compile="regions" runs there'
    if device.type == "cpu":
        compiler = os.environ.get("CXX", "g++")
        if shutil.which(compiler) is None:
            return (
                f"a C++ compiler, and there is no {compiler}",
                "apt-get install g++, or set CXX to another compiler, or leave compile= out",
            )
    elif not torch.utils._triton.has_triton():
        return (
            f"triton for {device.type}, which is not installed",
            "pip install triton, or leave compile= out",
        )
    return None
