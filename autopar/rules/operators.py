"""Finds operators by name in torch's registry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autopar.errors import OptionError


def find_operator(op: str | Callable[..., Any]) -> torch._ops.OpOverload:
    """The overload of a name, `"ns::name"` or `"ns::name.overload"`, or of an operator.

    Without an overload name it is `default`, or the only one. Raises `OptionError` if torch has no
    such operator, or several overloads without a `default`.
    """
    if isinstance(op, torch._ops.OpOverload):
        return op
    if isinstance(op, torch._ops.OpOverloadPacket):
        return _only_overload(op)
    name = op if isinstance(op, str) else _name_of(op)
    found = lookup(name)
    packet = None if found else _packet(name)
    if packet is not None:
        return _only_overload(packet)
    if found is None:
        raise OptionError(
            f"no operator {name!r} is registered with torch",
            hint='write "namespace::name", and define it with torch.library first',
        )
    return found


def _name_of(op: Callable[..., Any]) -> str:
    """The name of a `torch.library.custom_op`; else a function's name, for the error message."""
    return getattr(op, "_qualname", None) or getattr(op, "__name__", None) or repr(op)


def _only_overload(packet: torch._ops.OpOverloadPacket) -> torch._ops.OpOverload:
    names = packet.overloads()
    if "default" not in names and len(names) > 1:
        public = str(packet).replace(".", "::", 1)
        raise OptionError(
            f"{public} has several overloads: {', '.join(names)}",
            hint=f'write "{public}.{names[0]}"',
        )
    overload = getattr(packet, "default" if "default" in names else names[0])
    assert isinstance(overload, torch._ops.OpOverload)
    return overload


def _packet(name: str) -> torch._ops.OpOverloadPacket | None:
    """All overloads of `"namespace::name"`; None if the name is unknown or has an overload."""
    namespace, _, rest = name.replace("::", ".", 1).partition(".")
    if not namespace.isidentifier() or not rest.isidentifier():
        return None
    found = getattr(getattr(torch.ops, namespace), rest, None)
    return found if isinstance(found, torch._ops.OpOverloadPacket) else None


def lookup(name: str) -> torch._ops.OpOverload | None:
    """The overload of that name, by default `default`; None if torch has no such operator."""
    namespace, _, rest = name.replace("::", ".", 1).partition(".")
    packet, _, overload = rest.partition(".")
    found = getattr(torch.ops, namespace, None) if namespace.isidentifier() else None
    for part in (packet, overload or "default"):
        found = getattr(found, part, None) if part.isidentifier() else None
    return found if isinstance(found, torch._ops.OpOverload) else None
