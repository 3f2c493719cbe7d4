"""What a sharded tensor refuses, and what to write instead."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from autopar.errors import NotSupportedError
from autopar.runtime.tensors.spread import Spread


def of_one_stage(what: str) -> NotSupportedError:
    """A value that would be that of one stage alone."""
    return NotSupportedError(
        f"{what}: with pipeline stages, a rank has the parameters of its own stage only",
        hint="pm.clip_grad_norm_(c) clips by the norm over all stages, and returns it",
    )


def needs_whole(func: Any, spread: Spread) -> NotSupportedError:
    """An operator that a shard is not enough for."""
    return NotSupportedError(
        f"`{func}` needs the whole of `{spread.name}`, of which this rank has a shard ({spread})",
        hint=f'optimizer_gather=["{spread.name}"] gathers it for that, as autopar plans; '
        "pm.full_state_dict() has whole tensors, forbid= may keep it unsharded",
    )


def into_whole(func: Any, spread: Spread) -> NotSupportedError:
    """A write to a whole tensor of what is computed from a shard."""
    return NotSupportedError(
        f"`{func}` into a whole tensor beside `{spread.name}`, of which this rank has a shard",
        hint="make it like the parameter: torch.zeros_like(parameter)",
    )


def cut_differently(func: Any, one: Spread, other: Spread) -> NotSupportedError:
    """An elementwise operator on shards that do not match."""
    return NotSupportedError(
        f"`{func}` of `{one.name}` and `{other.name}`, which are cut differently: {one}; {other}",
        hint="combine them as whole tensors: pm.full_state_dict()",
    )


def other_form(held: Any, value: Tensor) -> NotSupportedError:
    """`.data = ...` of another shape or dtype."""
    return NotSupportedError(
        f"`.data = ...` of `{held.spread.name}` from {held.dtype} {tuple(held.shape)} to "
        f"{value.dtype} {tuple(value.shape)}",
        hint="change shapes and dtypes of the model before autopar.parallelize",
    )


def random(func: Any, spread: Spread) -> NotSupportedError:
    """Random numbers that would differ between ranks."""
    return NotSupportedError(
        f"`{func}` of `{spread.name}`: every rank would draw other numbers",
        hint="initialise the model before autopar.parallelize, or draw a whole tensor from a "
        "torch.Generator with one seed on all ranks, and copy_ it",
    )


def collective(func: Any, spread: Spread) -> NotSupportedError:
    """A collective of the user's own."""
    return NotSupportedError(
        f"`{func}` of `{spread.name}`, of which ranks hold other shards or none",
        hint="leave it out: pm.step synchronises gradients, and weights are equal on all ranks",
    )


def saved(spread: Spread) -> NotSupportedError:
    """Pickling a shard."""
    return NotSupportedError(
        f"saving `{spread.name}`, of which this rank has a shard",
        hint="autopar.save(pm, optimizer, path) saves weights and optimizer state; of weights "
        "alone, torch.save(pm.full_state_dict(), path) on rank 0, with every rank calling "
        "full_state_dict()",
    )


def saved_by_number(spread: Spread, name: str) -> NotSupportedError:
    """A checkpoint of optimizer state that several stages would give one name."""
    return NotSupportedError(
        f"saving state of `{spread.name}` as `{name}`: each pipeline stage counts its own "
        "parameters, so stages would save different tensors under one name",
        hint="torch.distributed.checkpoint.state_dict.get_optimizer_state_dict(pm, optimizer) "
        "names state by parameter; so does autopar.save",
    )
