"""Machine code for the loops that planning spends its time in: `numba`, as one decorator.

What is compiled are functions of numbers and arrays, whose results do not depend on being
compiled: no arithmetic is reordered. The machine code is kept beside the sources, or in the user's
cache, so a function is compiled once per installation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import numba

F = TypeVar("F", bound=Callable[..., object])


def compiled(function: F) -> F:
    """A function of numbers and numpy arrays as machine code, for the types it is called with.

    It may call others of its own file that are compiled (what is kept is made again when that file
    changes, not when others do), and must neither raise nor make Python objects.
    """
    try:
        found = numba.njit(cache=True, error_model="numpy")(function)
    except RuntimeError:  # nowhere to keep it: neither beside the sources nor in the user's cache
        found = numba.njit(error_model="numpy")(function)
    return cast(F, found)
