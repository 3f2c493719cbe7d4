"""Machine code for the loops in which planning spends its time: numba as one decorator.

Compiled functions take numbers and arrays. Compiling reorders no arithmetic, so results do not
depend on it. The machine code is cached beside the sources or in the user's cache, so a function is
compiled once per installation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import numba
from numba.core import event

F = TypeVar("F", bound=Callable[..., object])

_COMPILING = event.TimingListener()
event.register("numba:compile", _COMPILING)


def compile_s() -> float:
    """Seconds in which this process compiled; none where all machine code is on disk."""
    return _COMPILING.duration if _COMPILING.done else 0.0


def compiled(function: F) -> F:
    """A function of numbers and numpy arrays as machine code, for the types it is called with.

    It may call other compiled functions of its own file only: the cache is renewed when that file
    changes, not when another does. It must neither raise nor make Python objects.
    """
    try:
        found = numba.njit(cache=True, error_model="numpy")(function)
    except RuntimeError:  # neither cache directory can be written
        found = numba.njit(error_model="numpy")(function)
    return cast(F, found)
