"""Operations on the state of a running module: whole values out and in, and the gradient norm.

Every rank keeps its shards. Whole values cross ranks one parameter at a time, so a rank
holds at most one on its device. On the way out, a stage gathers inside its mesh, and its
first rank sends to rank 0.

The norm is that of the whole gradient, so every distinct shard counts once. Let N(p) be the number
of ranks with a copy of p's shard, including mirrors of p on other stages:

    (sum over ranks, over p of sum |g|^q / N(p))^(1/q)  =  (sum over p's distinct shards ...)^(1/q)

`_counts_here` picks the copy that counts: on the stage that owns p, the rank that is first on every
axis that does not shard p. For q = inf copies do no harm.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.errors import OptionError, StateError
from autopar.program.lines import ChangedBuffer, StoredParameter
from autopar.runtime.groups import Group
from autopar.runtime.state.names import (
    Shape,
    all_names,
    check_buffer,
    constant_buffers,
    match_names,
    own_rank,
    together,
    world_size,
)
from autopar.runtime.state.stage_state import StageState
from autopar.runtime.tensors import gather_whole, local_shard


class IncompatibleKeys(NamedTuple):
    """The names that a state dict lacked, and those that the model lacks."""

    missing_keys: list[str]
    unexpected_keys: list[str]


def full_state_dict(
    place: StageState, locals_: Mapping[str, Tensor], buffers: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Whole CPU tensors under every name on rank 0, {} on the others; all must call it."""
    return _by_name(values_on_rank_0(place, locals_, buffers, place.changed_anywhere))


def all_values(
    place: StageState, locals_: Mapping[str, Tensor], buffers: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """As `full_state_dict`, with the buffers that steps change and state dicts leave out."""
    return _by_name(values_on_rank_0(place, locals_, buffers, place.all_changed))


def _by_name(values: Iterable[tuple[tuple[str, ...], Tensor]]) -> dict[str, Tensor]:
    return {name: value for names, value in values for name in names}


def values_on_rank_0(
    place: StageState,
    locals_: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor] | None,
    changed: Sequence[ChangedBuffer],
) -> Iterator[tuple[tuple[str, ...], Tensor]]:
    """(all names, whole CPU tensor) of a model's values, one by one; nothing elsewhere.

    `changed` are the buffers that steps change. All ranks must go through all of it.
    """
    for parameter, whole in _on_rank_0(place, locals_, place.owners):
        yield all_names(parameter), whole
    if place.rank == 0:
        constants = constant_buffers(buffers, changed).items()
        for name, value in constants:
            yield (name,), value.detach().to("cpu", copy=True)
    for buffer in changed:
        held = _from_its_stage(place, buffer, buffers or {})
        if held is not None:
            yield all_names(buffer), held


def _from_its_stage(
    place: StageState, buffer: ChangedBuffer, buffers: Mapping[str, Tensor]
) -> Tensor | None:
    """The value of a changed buffer, as a CPU copy on rank 0; None elsewhere."""
    source = place.first_rank_that_changes(buffer)
    if source == 0:
        own = buffers[buffer.name].detach() if place.rank == 0 else None
        return None if own is None else own.to("cpu", copy=True)
    if place.rank not in (0, source):
        return None
    assert place.messenger is not None, "stages without messages"
    if place.rank == source:
        place.messenger.post([(buffers[buffer.name].contiguous(), 0)], []).wait_sent()
        return None
    receive = buffer.shape, buffer.local.dtype, source
    return place.messenger.post([], [receive]).wait_received()[0].to("cpu")


def full_gradients(place: StageState, locals_: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Whole gradients on the CPU of rank 0, {} elsewhere; all must call it.

    A tied parameter appears once. A parameter that took no part in the loss has zeros.
    """
    gradients = {
        name: torch.zeros_like(value) if value.grad is None else value.grad
        for name, value in locals_.items()
    }
    trained = [p for p in place.owners if p.requires_grad]
    return {p.name: whole for p, whole in _on_rank_0(place, gradients, trained)}


def _on_rank_0(
    place: StageState, locals_: Mapping[str, Tensor], wanted: Sequence[StoredParameter]
) -> Iterator[tuple[StoredParameter, Tensor]]:
    """(parameter, whole tensor as a CPU copy) for each of `wanted` on rank 0; nothing elsewhere."""
    own = {p.name for p in place.parameters if p.mirror_of is None}
    for owned in wanted:
        if owned.name in own:
            local = locals_[owned.name]
            whole = gather_whole(local, owned, place.sizes, place.groups)
            if place.rank == 0:
                yield owned, whole.to("cpu", copy=whole.data_ptr() == local.data_ptr())
            elif place.is_first:
                assert place.messenger is not None, "stages without messages"
                place.messenger.post([(whole.contiguous(), 0)], []).wait_sent()
        elif place.rank == 0:
            assert place.messenger is not None, "stages without messages"
            source = place.first_rank_of(owned)
            receive = owned.shape, owned.stored.dtype, source
            yield owned, place.messenger.post([], [receive]).wait_received()[0].to("cpu")


def load_state_dict(
    place: StageState,
    locals_: Mapping[str, Tensor],
    values: Mapping[str, Any],
    buffers: Mapping[str, Tensor] | None = None,
    strict: bool = True,
) -> IncompatibleKeys:
    """Load whole tensors or DTensors into shards and buffers, in place; every rank must call it.

    `values` are one of

        the same whole tensors on every rank
        whole tensors on rank 0, {} elsewhere (as `full_state_dict` returns): broadcast one by one
        DTensors; a rank needs those that it keeps a part of

    Names are checked over all ranks together. A tied parameter and its mirrors take the first of
    their names that is given. Of `buffers`, those that steps change take the given value; for any
    other, the given value must equal the model's.

    Raises `StateError` listing names and shapes that do not fit. Without `strict`, missing and
    unexpected names are returned instead.
    """
    tensors = {name: v for name, v in values.items() if isinstance(v, Tensor)}
    given = _given_on_ranks(tensors)
    from_rank0 = len(given) > 1 and bool(given[0]) and not any(given[1:])
    everywhere = {name: it for held in reversed(given) for name, it in held.items()}
    shapes = {name: shape for name, (shape, _) in everywhere.items()}
    with together():
        own = {name: tuple(v.shape) for name, v in tensors.items()}
        constants = constant_buffers(buffers, place.changed_anywhere)
        found, missing, unexpected = match_names(
            place.entries, shapes | own, constants, "the state dict", strict
        )
        for name in sorted(constants.keys() & own.keys()):
            check_buffer(name, _whole(tensors[name]), constants, "the state dict")
        if not from_rank0:
            _check_within_reach(place, tensors, found)
    _refuse_one_ranks_shards(tensors)
    with torch.no_grad():
        for owned in place.entries:
            if owned.name not in found:
                continue
            if from_rank0:
                name = found[owned.name]
                whole = _broadcast(tensors.get(name), *everywhere[name], place.device)
            else:
                # All ranks of a DTensor's mesh gather it, even those that keep no part of it.
                name = next((n for n in all_names(owned) if n in tensors), "")
                if not name:
                    continue
                whole = _whole(tensors[name])
            for kept in place.held.get(owned.name, ()):
                part = local_shard(whole, kept, place.sizes, place.coordinate)
                locals_[kept.name].copy_(part)
            if owned in place.changed:
                assert buffers is not None
                buffers[owned.name].copy_(whole)
    return IncompatibleKeys(missing, unexpected)


def _given_on_ranks(values: Mapping[str, Tensor]) -> list[dict[str, tuple[Shape, torch.dtype]]]:
    """Per rank, name -> (whole shape, dtype) of what it was given."""
    own = {name: (tuple(v.shape), v.dtype) for name, v in values.items()}
    if world_size() == 1:
        return [own]
    every: list[Any] = [None] * world_size()
    dist.all_gather_object(every, own)
    return every


def _refuse_one_ranks_shards(values: Mapping[str, Tensor]) -> None:
    """Raise `StateError` on every rank if all were given the DTensors of one of them.

    A file that one rank saved has its shards only, and a DTensor does not know whose. Then the
    shards of every sharded tensor are equal on all ranks; those of trained or random weights never
    are. Constant tensors (zeros, ones) are no evidence, and do no harm.
    """
    own: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, DTensor) and any(p.is_shard() for p in value.placements):
            local = value.to_local().detach().cpu().contiguous()
            if local.numel() and bool((local != local.view(-1)[0]).any()):
                own[name] = sha256(local.view(torch.uint8).numpy().tobytes()).hexdigest()
    every: list[dict[str, str]] = [own]
    if world_size() > 1:
        every = [{}] * world_size()
        dist.all_gather_object(every, own)
    first, *others = every
    if first and others and all(other == first for other in others):
        raise StateError(
            f"every rank was given the same shard of `{next(iter(first))}` and of "
            f"{len(first) - 1} more tensors: the file has the shards of one rank",
            hint="save on every rank to a file of its own, or torch.save(pm.full_state_dict(), "
            "path) on rank 0; every rank calls full_state_dict()",
        )


def _check_within_reach(
    place: StageState, values: Mapping[str, Tensor], found: Mapping[str, str]
) -> None:
    """Raise `StateError` for an entry that this rank keeps but only other ranks were given."""
    for owned in place.entries:
        is_held = owned.name in place.held or owned in place.changed
        if is_held and owned.name in found and not any(name in values for name in all_names(owned)):
            raise StateError(
                f"the state dict of rank {own_rank()} lacks `{found[owned.name]}`, which other "
                "ranks have",
                hint="give the whole state dict to every rank or to rank 0 only, or give each rank "
                "the DTensors of its stage",
            )


def _whole(value: Tensor) -> Tensor:
    detached = value.detach()
    return detached.full_tensor() if isinstance(detached, DTensor) else detached


def _broadcast(
    value: Tensor | None, shape: Shape, dtype: torch.dtype, device: torch.device
) -> Tensor:
    if value is None:
        whole = torch.empty(shape, dtype=dtype, device=device)
    else:
        whole = value.detach().to(device).contiguous()
    dist.broadcast(whole, src=0)
    return whole


def clip_grad_norm_(
    place: StageState,
    locals_: Mapping[str, Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    overflow: Tensor | None = None,
) -> Tensor:
    """Scale all gradients so that their global norm is at most `max_norm`; returns the norm before.

    Like `torch.nn.utils.clip_grad_norm_` in one process. The norm is 0-d and the same on every
    rank; all ranks must call it. `overflow` is what this rank adds to it besides: 0, or inf for a
    gradient of its own that is not finite, since the norm counts replicas on one rank only.

    Raises `OptionError` for a `norm_type` that is not positive, and, with `error_if_nonfinite`,
    `RuntimeError` for a norm that is not finite, as torch does.
    """
    order = float(norm_type)
    if not order > 0:
        raise OptionError(f"norm_type must be positive or inf, not {norm_type}")
    norm = _global_norm(place, locals_, order, overflow)
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise RuntimeError(
            f"the total norm of order {order} of the gradients is {norm.item()}, which "
            "cannot be clipped; pass error_if_nonfinite=False to scale by it anyway"
        )
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for parameter in place.parameters:
        gradient = locals_[parameter.name].grad
        if gradient is not None:
            gradient.detach().mul_(scale.to(gradient.device, gradient.dtype))
    return norm


def _global_norm(
    place: StageState, locals_: Mapping[str, Tensor], order: float, overflow: Tensor | None
) -> Tensor:
    """The norm over all stages, summed in float64: powers of a large norm overflow float32."""
    total = torch.zeros((), dtype=torch.float64, device=place.device)
    if overflow is not None:
        total += overflow
    for parameter in place.parameters:
        gradient = locals_[parameter.name].grad
        if gradient is None or not gradient.numel() or not _counts_here(place, parameter):
            continue
        wide = torch.promote_types(gradient.dtype, torch.float32)
        norm = torch.linalg.vector_norm(gradient.detach(), order, dtype=wide).double()
        total = torch.maximum(total, norm) if math.isinf(order) else total + norm.pow(order)
    result = torch.float32
    for parameter in place.owners:  # so that all stages return one dtype
        if parameter.requires_grad:
            result = torch.promote_types(result, parameter.stored.dtype.to_real())
    group = everyone(place)
    if not math.isinf(order):
        return (group.all_reduce(total) if group else total).pow(1.0 / order).to(result)
    if group:
        # A backend's maximum may drop a NaN, so NaNs are flagged separately.
        seen = torch.stack([total.nan_to_num(0.0, math.inf), total.isnan().to(total.dtype)])
        total, is_nan = group.all_reduce(seen, "max")
        total = torch.where(is_nan > 0, math.nan, total)
    return total.to(result)


def everyone(place: StageState) -> Group | None:
    """The group of all ranks of all stages; None for a single rank."""
    if place.pipeline.n_stages > 1:
        assert place.world is not None, "stages without a group of all ranks"
        return place.world
    return stage_group(place)


def stage_group(place: StageState) -> Group | None:
    """The group of all ranks of this rank's mesh; None for a single rank."""
    axes = max(place.groups, key=len, default=())
    return place.groups[axes] if axes else None


def _counts_here(place: StageState, parameter: StoredParameter) -> bool:
    """Whether this rank's copy of a parameter's shard is the one that counts."""
    placed = zip(parameter.stored.spec.placements, place.coordinate, strict=True)
    return parameter.mirror_of is None and all(p.is_shard or c == 0 for p, c in placed)
