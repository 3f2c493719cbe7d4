"""Operations on the state of a running module: whole values in and out, and the global norm.

Every rank keeps its shards; what crosses ranks goes parameter by parameter, so no rank ever
holds more than one whole parameter. With N(p) the ranks that hold copies of p's shard, the
norm over the whole, undivided gradient is

    (sum over ranks, over p of sum |g|^q / N(p))^(1/q)  =  (sum over p's distinct shards ...)^(1/q)

where copies are left out by counting a shard only on the ranks that stand first on every
axis that does not split it. For q = inf copies do no harm. Tied parameters are one parameter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.errors import OptionError
from autopar.runtime.names import (
    StateError,
    all_names,
    check_buffer,
    match_names,
    own_rank,
    together,
    world_size,
)
from autopar.runtime.sharding import Groups, gather_whole, local_shard
from autopar.stage_program import StoredParameter


class IncompatibleKeys(NamedTuple):
    """What a state dict lacked, and what it had beyond the model."""

    missing_keys: list[str]
    unexpected_keys: list[str]


def full_state_dict(
    parameters: Sequence[StoredParameter],
    locals_: Mapping[str, Tensor],
    sizes: Sequence[int],
    coordinate: Sequence[int],
    groups: Groups,
    buffers: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Whole CPU tensors under every name on rank 0, {} on the others; all must call it."""
    is_first = not any(coordinate)
    out: dict[str, Tensor] = {}
    for parameter in parameters:
        whole = gather_whole(locals_[parameter.name], parameter, sizes, groups)
        if is_first:
            held = whole.to("cpu", copy=whole.data_ptr() == locals_[parameter.name].data_ptr())
            out |= dict.fromkeys(all_names(parameter), held)
    if is_first:
        held_buffers = (buffers or {}).items()
        out |= {name: value.detach().to("cpu", copy=True) for name, value in held_buffers}
    return out


def load_state_dict(
    parameters: Sequence[StoredParameter],
    locals_: Mapping[str, Tensor],
    values: Mapping[str, Any],
    sizes: Sequence[int],
    coordinate: Sequence[int],
    buffers: Mapping[str, Tensor] | None = None,
    strict: bool = True,
) -> IncompatibleKeys:
    """Load whole tensors or DTensors into the shards, in place.

    Every rank must call it, with the same state dict, or with rank 0's whole tensors there
    and {} elsewhere (what `full_state_dict` returned): then they are broadcast one by one.

    Raises `StateError` listing names and shapes that do not fit; without `strict` missing and
    unexpected names are returned instead.
    """
    from_rank0 = _only_rank0_has(values)
    found: dict[str, str] = {}
    missing: list[str] = []
    unexpected: list[str] = []
    with together():
        if own_rank() == 0 or not from_rank0:
            shapes = {n: tuple(v.shape) for n, v in values.items() if isinstance(v, Tensor)}
            found, missing, unexpected = match_names(
                parameters, shapes, buffers or {}, "the state dict", strict
            )
            for name in sorted((buffers or {}).keys() & shapes.keys()):
                check_buffer(name, _whole(values[name]), buffers or {}, "the state dict")
    if from_rank0:
        held = [(found, missing, unexpected)]
        dist.broadcast_object_list(held, src=0)
        found, missing, unexpected = held[0]
    with torch.no_grad():
        for parameter in parameters:
            if parameter.name not in found:
                continue
            local = locals_[parameter.name]
            value = values.get(found[parameter.name])
            whole = _broadcast(value, parameter, local) if from_rank0 else _whole(value)
            local.copy_(local_shard(whole, parameter, sizes, coordinate))
    return IncompatibleKeys(missing, unexpected)


def _only_rank0_has(values: Mapping[str, Any]) -> bool:
    if world_size() == 1:
        return False
    counts: list[int] = [0] * world_size()
    dist.all_gather_object(counts, len(values))
    return counts[0] > 0 and not any(counts[1:])


def _whole(value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        raise StateError(f"a state dict holds tensors, not {type(value).__name__}")
    detached = value.detach()
    return detached.full_tensor() if isinstance(detached, DTensor) else detached


def _broadcast(value: Tensor | None, parameter: StoredParameter, local: Tensor) -> Tensor:
    if value is None:
        whole = torch.empty(parameter.shape, dtype=local.dtype, device=local.device)
    else:
        whole = value.detach().to(local.device, local.dtype).contiguous()
    dist.broadcast(whole, src=0)
    return whole


def clip_grad_norm_(
    parameters: Sequence[StoredParameter],
    locals_: Mapping[str, Tensor],
    max_norm: float,
    coordinate: Sequence[int],
    groups: Groups,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale all gradients so that their global norm is at most `max_norm`; that norm, before.

    As `torch.nn.utils.clip_grad_norm_` in one process: 0-d, the same on every rank, all of
    which must call it. `groups` are the stage's; the one over all its axes is used.

    Raises `OptionError` for a norm that is not positive, and `RuntimeError` as torch does for
    one that is not finite if `error_if_nonfinite`.
    """
    order = float(norm_type)
    if not order > 0:
        raise OptionError(f"norm_type must be positive or inf, not {norm_type}")
    norm = _global_norm(parameters, locals_, order, coordinate, groups)
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise RuntimeError(
            f"the total norm of order {order} of the gradients is {norm.item()}, which "
            "cannot be clipped; pass error_if_nonfinite=False to scale by it anyway"
        )
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for parameter in parameters:
        gradient = locals_[parameter.name].grad
        if gradient is not None:
            gradient.detach().mul_(scale.to(gradient.device, gradient.dtype))
    return norm


def _global_norm(
    parameters: Sequence[StoredParameter],
    locals_: Mapping[str, Tensor],
    order: float,
    coordinate: Sequence[int],
    groups: Groups,
) -> Tensor:
    """The norm over the stage, summed in float64: powers of a large norm overflow float32."""
    first = next(iter(locals_.values()), None)
    device = torch.device("cpu") if first is None else first.device
    total = torch.zeros((), dtype=torch.float64, device=device)
    result = torch.float32
    for parameter in parameters:
        gradient = locals_[parameter.name].grad
        if gradient is None:
            continue
        result = torch.promote_types(result, gradient.dtype)
        if not _counts_here(parameter, coordinate) or not gradient.numel():
            continue
        wide = torch.promote_types(gradient.dtype, torch.float32)
        norm = torch.linalg.vector_norm(gradient.detach(), order, dtype=wide).double()
        total = torch.maximum(total, norm) if math.isinf(order) else total + norm.pow(order)
    axes = max(groups, key=len, default=())
    if not math.isinf(order):
        return (groups[axes].all_reduce(total) if axes else total).pow(1.0 / order).to(result)
    if axes:
        # A carrier's maximum may drop a NaN, so it is told apart.
        seen = torch.stack([total.nan_to_num(0.0, math.inf), total.isnan().to(total.dtype)])
        total, is_nan = groups[axes].all_reduce(seen, "max")
        total = torch.where(is_nan > 0, math.nan, total)
    return total.to(result)


def _counts_here(parameter: StoredParameter, coordinate: Sequence[int]) -> bool:
    """Whether this rank is the one of its copies that counts."""
    placements = parameter.stored.spec.placements
    return all(p.is_shard or c == 0 for p, c in zip(placements, coordinate, strict=True))
