"""Bytes of temporaries inside the kernels of this room; each is noted where the kernel is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

_WORKSPACES: dict[Any, Callable[[Sequence[Any]], int]] = {}


def add_workspace(operator: Any, of_arguments: Callable[[Sequence[Any]], int]) -> None:
    """Note how many bytes of temporaries a kernel needs."""
    _WORKSPACES[operator] = of_arguments


def workspace_bytes(operator: Any, args: Sequence[Any]) -> int:
    """Bytes of temporaries inside a call of a kernel that is noted; 0 for other operators.

    They are those on a GPU, where blocks are larger: programs are traced on the CPU for any device.
    """
    found = _WORKSPACES.get(operator)
    return 0 if found is None else found(args)
