"""Operators by name, as torch has registered them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autopar.errors import OptionError


def find_operator(op: str | Callable[..., Any]) -> torch._ops.OpOverload:
    """The overload meant by a name, `"ns::name"` or `"ns::name.overload"`, or by the operator.

    Raises `OptionError` when torch knows no such operator.
    """
    if isinstance(op, torch._ops.OpOverload):
        return op
    if isinstance(op, torch._ops.OpOverloadPacket):
        return op.default
    name = op if isinstance(op, str) else getattr(op, "_qualname", None) or str(op.__name__)
    found = lookup(name)
    if found is None:
        raise OptionError(
            f"no operator {name!r} is registered with torch",
            hint='write "namespace::name", and define it with torch.library first',
        )
    return found


def lookup(name: str) -> torch._ops.OpOverload | None:
    """The overload of that name; None when torch knows no such operator."""
    namespace, _, rest = name.replace("::", ".", 1).partition(".")
    packet, _, overload = rest.partition(".")
    found = getattr(torch.ops, namespace, None) if namespace.isidentifier() else None
    for part in (packet, overload or "default"):
        found = getattr(found, part, None) if part.isidentifier() else None
    return found if isinstance(found, torch._ops.OpOverload) else None
