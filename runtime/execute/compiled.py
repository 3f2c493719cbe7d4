"""Compiles regions of generated files, which are functions of tensors alone, by `torch.compile`.

Kernels are kept on disk by torch (`TORCHINDUCTOR_CACHE_DIR`), so ranks of a host share them, and a
run that starts again finds them. With `TORCHDYNAMO_DISABLE=1` regions run as they are written.
"""

from __future__ import annotations

import functools
import os
import shutil
import threading
import time
import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from autopar.errors import NotSupportedError

Region = Callable[..., tuple[Tensor, ...]]

# One compiles at a time: ranks may be threads.
_LOCK = threading.RLock()


class CompiledRegion:
    """A region that is compiled when it is first called, for the shapes that it then has.

    compile_s   seconds of its first call; None before
    """

    def __init__(self, function: Region) -> None:
        functools.update_wrapper(self, function)
        self.file = function.__code__.co_filename
        self.compile_s: float | None = None
        self._run: Region = torch.compile(function, fullgraph=True, dynamic=False)

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
    key = function.__code__.co_filename, function.__name__
    with _LOCK:
        region = _REGIONS.get(key)
        if region is None:
            region = _REGIONS[key] = CompiledRegion(function)
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


def require_compiler(device: torch.device) -> None:
    """Raises `NotSupportedError` if `torch.compile` lacks what it needs for a device."""
    if device.type == "cpu":
        wanted = os.environ.get("CXX", "g++")
        if shutil.which(wanted) is None:
            raise NotSupportedError(
                f'compile="regions" needs a C++ compiler, and there is no {wanted}',
                hint="apt-get install g++, or set CXX to another compiler, or leave compile= out",
            )
    elif not torch.utils._triton.has_triton():
        raise NotSupportedError(
            f'compile="regions" needs triton for {device.type}, which is not installed',
            hint="pip install triton, or leave compile= out",
        )
