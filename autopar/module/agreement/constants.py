"""Tensors that are neither parameters nor inputs: constant buffers, tensor attributes, tables.

Every rank takes them from its own copy of the model. Where copies differ (a buffer that was drawn
at random), each rank would train another model. So they are compared by hash. With weights="rank0"
all ranks then take the values of rank 0, as they do for parameters; otherwise it is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.errors import DivergenceError
from autopar.module.agreement.hashes import content_hash
from autopar.module.agreement.meeting import compared, has_others
from autopar.module.agreement.settings import different
from autopar.program.graph import Program
from autopar.units import format_ranks


def agreed_program(program: Program, weights: str, device: torch.device) -> Program:
    """The program with constants that are equal on all ranks; every rank must call it.

    Raises `DivergenceError` on every rank if graphs differ, or if constants do and `weights` is not
    "rank0".
    """
    if not has_others():
        return program
    graphs = compared("graph", program.hash(), device)
    if graphs is not None:
        others = [rank for rank, found in graphs.items() if found != graphs[0]]
        raise DivergenceError(
            f"{format_ranks(others)} captured another graph than rank 0: the model, its options or "
            "a Python value that its code reads is another there",
            hint="build the model alike on every rank",
        )
    values = {name: make() for name, make in program.constants.items()}
    taken = _taken("program", values, weights, device)
    if not taken:
        return program
    own: dict[str, Callable[[], Tensor]] = {n: partial(_value, t) for n, t in taken.items()}
    return replace(program, constants={**program.constants, **own})


def agreed_values(
    values: Mapping[str, Tensor], weights: str, device: torch.device
) -> dict[str, Tensor]:
    """Constant buffers by name, equal on all ranks; every rank must call it.

    Raises `DivergenceError` on every rank if they differ, unless `weights` is "rank0".
    """
    if not has_others():
        return dict(values)
    return {**values, **_taken("buffers", values, weights, device)}


def _taken(
    kind: str, values: Mapping[str, Tensor], weights: str, device: torch.device
) -> dict[str, Tensor]:
    """What this rank takes over from rank 0, because some rank has another value."""
    hashes = {
        f"`{name}`": f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)} "
        f"{content_hash(value):016x}"
        for name, value in values.items()
    }
    every = compared(kind, hashes, device)
    if every is None:
        return {}
    same_forms = all(
        {name: text.rsplit(" ", 1)[0] for name, text in of_rank.items()}
        == {name: text.rsplit(" ", 1)[0] for name, text in every[0].items()}
        for of_rank in every.values()
    )
    if weights != "rank0" or not same_forms:
        raise DivergenceError(
            "constants of the model differ between ranks (hashes of their values):\n  "
            + "\n  ".join(different(every)),
            hint="build the model alike on every rank (one seed, one file), or register a value "
            'that is drawn as a buffer and take weights="rank0"',
        )
    taken = {}
    for name, value in values.items():
        key = f"`{name}`"
        if any(of_rank[key] != every[0][key] for of_rank in every.values()):
            sent = value.detach().to(device).contiguous().clone()
            dist.broadcast(sent, src=0)
            taken[name] = sent.to(value.device)
    return taken


def _value(tensor: Tensor) -> Tensor:
    return tensor
