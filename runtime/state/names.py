"""Names and errors: which given value a stored tensor takes, and errors that reach every rank.

State arrives under the user's names: from a file, a checkpoint or a state dict. A tied parameter
may come under any of its names. One error lists everything that does not fit. If ranks read
different things, all of them raise the error (`together`): a rank that stops alone would leave the
others waiting in a collective.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.errors import AutoparError, StateError
from autopar.program.lines import ChangedBuffer, StoredParameter
from autopar.runtime.flight import explained
from autopar.runtime.groups import current_context

_SHOWN = 8
Shape = tuple[int, ...]


def world_size() -> int:
    """The number of ranks; 1 if `torch.distributed` is not initialised."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def own_rank() -> int:
    return dist.get_rank() if world_size() > 1 else 0


def gathered(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """The values of all ranks, in rank order; a collective of the group, or the whole world."""
    if world_size() == 1:
        return [value]
    every: list[Any] = [None] * world_size()
    beside = nullcontext() if group else current_context().flight.together("gathering from ranks")
    with explained(beside):
        dist.all_gather_object(every, value, group)
    return every


@contextmanager
def together(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Raise on every rank what any rank raises inside; a collective of the whole world.

    A rank that failed raises its own error, the others that of the first one; a `StateError` names
    the rank. `group`: all ranks, in a group of their own.
    """
    error: AutoparError | OSError | None = None
    try:
        yield
    except (AutoparError, OSError) as raised:
        error = raised
    messages = gathered(None if error is None else str(error), group)
    if error is not None and (world_size() == 1 or not isinstance(error, StateError)):
        raise error
    failed = [rank for rank, message in enumerate(messages) if message is not None]
    if failed:
        rank = failed[0] if error is None else own_rank()
        raise StateError(f"rank {rank} failed: {messages[rank]}") from error


def all_names(value: StoredParameter | ChangedBuffer) -> tuple[str, ...]:
    """Every name of the value in the user's model."""
    return (value.name, *value.aliases)


def match_names(
    wanted: Sequence[StoredParameter | ChangedBuffer],
    given: Mapping[str, Shape],
    constants: Collection[str],
    source: str,
    strict: bool = True,
) -> tuple[dict[str, str], list[str], list[str]]:
    """(wanted name -> the name its value is given under, missing names, unexpected names).

    `constants` are buffers that may also be given. Raises `StateError` listing every whole shape
    that differs and, if `strict`, the missing and unexpected names.
    """
    found: dict[str, str] = {}
    missing, wrong = [], []
    for value in wanted:
        names = [name for name in all_names(value) if name in given]
        if not names:
            missing.append(value.name)
            continue
        found[value.name] = names[0]
        wrong += [
            f"{name}: {given[name]}, the model has {value.shape}"
            for name in names
            if tuple(given[name]) != tuple(value.shape)
        ]
    known = {name for value in wanted for name in all_names(value)} | set(constants)
    unexpected = sorted(set(given) - known)
    lines = _listed("with another shape", wrong)
    if strict:
        lines = _listed("missing", missing) + _listed("unexpected", unexpected) + lines
    if lines:
        raise StateError(
            "\n".join([f"{source} does not fit the model:", *lines]),
            hint="names are those of the model's own state_dict()",
        )
    return found, missing, unexpected


def _listed(what: str, names: Sequence[str]) -> list[str]:
    if not names:
        return []
    more = [f"    ... and {len(names) - _SHOWN} more"] if len(names) > _SHOWN else []
    return [f"  {len(names)} {what}:", *(f"    {name}" for name in names[:_SHOWN]), *more]


def constant_buffers(
    buffers: Mapping[str, Tensor] | None, changed: Sequence[ChangedBuffer]
) -> dict[str, Tensor]:
    """A rank's buffers that no step changes."""
    live = {name for buffer in changed for name in all_names(buffer)}
    return {name: value for name, value in (buffers or {}).items() if name not in live}


def check_buffer(name: str, value: Tensor, buffers: Mapping[str, Tensor], source: str) -> None:
    """Raise `StateError` unless `value` equals the model's buffer.

    Programs hold buffers that no step changes as constants. Another value would be loaded and
    never used.
    """
    own = buffers[name]
    if value.shape != own.shape or not torch.equal(value.cpu().to(own.dtype), own.cpu()):
        raise StateError(
            f"buffer `{name}` of {source} differs from the model's",
            hint="load it into the model before autopar.parallelize: plans hold buffers that no "
            "step changes as constants",
        )
