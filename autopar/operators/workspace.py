"""Bytes of temporaries inside the kernels of this room."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autopar.operators import attention, experts


def workspace_bytes(operator: Any, args: Sequence[Any]) -> int:
    """Bytes of temporaries inside a call of a kernel; 0 for operators of others."""
    of_rooms = (attention.workspace_bytes, experts.workspace_bytes)
    return sum(of(operator, args) for of in of_rooms)
