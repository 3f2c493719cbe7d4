"""Optimizer state under parameter names, sharded like the parameters.

`torch.optim` keys state by parameter objects and positions, which mean nothing on another
mesh. Here it is split into

    parts     optimizer.state.<name>.<key>. State that is `Sharded`, or has the shape of a plain
              shard, is stored whole. Everything else is plain.
    record    JSON: the parameter groups by name with their options, and the kind of each key

Plain state beside a `Sharded` parameter (Adafactor's rows and columns) was computed from gathered
tensors, so it is whole. Beside a plain shard it has no meaning, and is refused.

With several stages, every rank's optimizer has its own stage's parameters. `merged_record` makes
one record of theirs, as if one optimizer had all parameters. So any number of stages can read it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.errors import StateError
from autopar.program.lines import StoredParameter
from autopar.runtime.checkpoints.contents import part_of, writes_copy, writes_shard
from autopar.runtime.checkpoints.several import OneOptimizer
from autopar.runtime.state import OPTIMIZER_PREFIX, StageState, owner_name
from autopar.runtime.storage import Part, StoredTensor, whole_part
from autopar.runtime.tensors import Sharded, is_sharded, local_of

_SHARD, _PLAIN = "shard", "plain"


@dataclass(frozen=True)
class OptimizerState:
    """`parts` on disk, by key; `record` for JSON, or for `Optimizer.load_state_dict`."""

    parts: Sequence[tuple[str, Part]]
    record: dict[str, Any]


def split_state(
    place: StageState, locals_: Mapping[str, Tensor], optimizer: OneOptimizer
) -> OptimizerState:
    """What this rank writes of the state, by name; its parts share the optimizer's memory.

    The groups include this rank's mirrors, which `merged_record` checks; the state covers only
    parameters that its stages own.

    Raises `StateError` for parameters that are not in `locals_`, and for state that cannot be
    resharded for another mesh.
    """
    groups = [
        {
            "parameters": names,
            "options": {
                key: _plain_option(key, value)
                for key, value in group.items()
                if key not in ("params", "param_names")
            },
        }
        for group, names in _named_groups(locals_, optimizer)
    ]
    parts: dict[str, Part] = {}
    kinds: dict[str, dict[str, Any]] = {}
    for p in place.owned:
        local = locals_[p.name]
        for key, value in optimizer.state.get(local, {}).items():
            kind = _kind(p, key, value, local)
            kinds.setdefault(p.name, {})[key] = kind
            name = f"{OPTIMIZER_PREFIX}{p.name}.{key}"
            if kind == {"kind": _SHARD} and writes_shard(place, p, name):
                parts[name] = part_of(place, p, value)
            elif kind == {"kind": _PLAIN} and writes_copy(place, name):
                parts[name] = whole_part(value)
    return OptimizerState(list(parts.items()), {"groups": groups, "state": kinds})


def merged_record(
    place: StageState, records: Sequence[Mapping[str, Any] | None]
) -> dict[str, Any] | None:
    """One record from those of the stages; a stage without an optimizer has None.

    Groups at the same position with equal options become one. Mirrors are left out.

    Raises `StateError` for a mirror whose options differ from its owner's: their values would
    drift apart.
    """
    if all(record is None for record in records):
        return None
    groups: list[dict[str, Any]] = []
    state: dict[str, Any] = {}
    options: dict[str, Any] = {}
    for stage, record in enumerate(records):
        own = () if record is None else record["groups"]
        state |= {} if record is None else record["state"]
        found = {name: group["options"] for group in own for name in group["parameters"]}
        for p in place.pipeline.stages[stage].parameters:
            if p.mirror_of is None:
                options[p.name] = found.get(p.name)
            elif found.get(p.name) != options[p.mirror_of]:
                raise _drifts(p)
        owned = {p.name for p in place.owned_by(stage)}
        for position, group in enumerate(own):
            names = [name for name in group["parameters"] if name in owned]
            if position < len(groups) and groups[position]["options"] == group["options"]:
                groups[position]["parameters"] += names
            else:
                groups.append({"parameters": names, "options": group["options"]})
    return {"groups": groups, "state": state}


def _drifts(mirror: StoredParameter) -> StateError:
    return StateError(
        f"`{mirror.name}` is tied to `{mirror.mirror_of}` of an earlier stage, but the optimizers "
        "have other options for it, so the two are no longer equal",
        hint="put both in parameter groups with the same options",
    )


def restore(
    place: StageState,
    locals_: Mapping[str, Tensor],
    optimizer: OneOptimizer,
    record: Mapping[str, Any] | None,
    stored: Mapping[str, StoredTensor],
) -> OptimizerState:
    """Parts to fill, and the `record` that holds their tensors, for `Optimizer.load_state_dict`.

    A mirror gets its owner's state.

    Raises `StateError` if the checkpoint has no optimizer, if the saved options of a group's
    parameters are missing or differ from each other, or if state cannot be sharded for this plan.
    """
    if record is None:
        raise StateError(
            "the checkpoint holds no optimizer state", hint="pass optimizer=None to load without"
        )
    groups, indices = _restored_groups(place, locals_, optimizer, record)
    parts: list[tuple[str, Part]] = []
    state: dict[int, dict[str, Any]] = {}
    for saved_name, kinds in record["state"].items():
        if saved_name not in place.canonical:
            raise StateError(f"the checkpoint has optimizer state of `{saved_name}`, the model not")
        for p in place.held.get(place.canonical[saved_name], ()):
            for key, kind in kinds.items():
                value = kind.get("value")
                if "kind" in kind:
                    file_key = f"{OPTIMIZER_PREFIX}{saved_name}.{key}"
                    entry = stored.get(file_key)
                    if entry is None:
                        raise StateError(
                            f"the checkpoint lacks `{file_key}`, which its record lists"
                        )
                    local = locals_[p.name]
                    value, part = _empty(place, p, local, key, kind["kind"], entry)
                    parts.append((file_key, part))
                state.setdefault(indices[p.name], {})[key] = value
    return OptimizerState(parts, {"state": state, "param_groups": groups})


def _restored_groups(
    place: StageState,
    locals_: Mapping[str, Tensor],
    optimizer: OneOptimizer,
    record: Mapping[str, Any],
) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """(the optimizer's groups with the saved options, parameter -> its position).

    A saved group may be spread over stages. So a group here takes its options from its
    parameters, which must all have been saved with the same ones.
    """
    saved = {
        place.canonical.get(name, name): group["options"]
        for group in record["groups"]
        for name in group["parameters"]
    }
    groups: list[dict[str, Any]] = []
    indices: dict[str, int] = {}
    for group, names in _named_groups(locals_, optimizer):
        had = [saved.get(place.canonical[name]) for name in names]
        if any(options is None or options != had[0] for options in had):
            raise _other_groups(record, names)
        positions = range(len(indices), len(indices) + len(names))
        indices |= dict(zip(names, positions, strict=True))
        now = {k: v for k, v in group.items() if k != "params"}
        then = (had[0] if had else None) or {}
        options = {k: _typed_option(v, now.get(k)) for k, v in then.items()}
        groups.append({**(options or now), "params": list(positions)})
        if "param_names" in group:
            groups[-1]["param_names"] = group["param_names"]
    left = [p.name for p in place.parameters if owner_name(p) in saved and p.name not in indices]
    if left:
        raise _other_groups(record, left)
    return groups, indices


def _other_groups(record: Mapping[str, Any], names: Sequence[str]) -> StateError:
    return StateError(
        "the optimizer's parameter groups are not those of the checkpoint, which has "
        f"{len(record['groups'])}; see {', '.join(names[:4])}"
        + (f" and {len(names) - 4} more" if len(names) > 4 else ""),
        hint="build the optimizer as it was built before the checkpoint was saved",
    )


def _empty(
    place: StageState,
    p: StoredParameter,
    local: Tensor,
    key: str,
    kind: str,
    entry: StoredTensor,
) -> tuple[Tensor, Part]:
    """(a tensor for the optimizer, the part of it to fill)."""
    shape, dtype = entry.shape, entry.dtype
    if kind == _SHARD:
        if shape != tuple(p.shape):
            raise StateError(f"optimizer state `{key}` of `{p.name}` is {shape}, not {p.shape}")
        shard = local_of(local)
        value = torch.zeros(shard.shape, dtype=dtype, device=shard.device)  # zeros in padding, too
        part = part_of(place, p, value)
        return Sharded(value, local.spread) if isinstance(local, Sharded) else value, part
    if math.prod(shape) != 1 and is_sharded(p) and not isinstance(local, Sharded):
        raise _no_shard(p, key, shape)
    value = torch.empty(shape, dtype=dtype)
    return value, whole_part(value)


def _named_groups(
    locals_: Mapping[str, Tensor], optimizer: OneOptimizer
) -> list[tuple[dict[str, Any], list[str]]]:
    names = {id(local): name for name, local in locals_.items()}
    found = []
    for group in optimizer.param_groups:
        unknown = [p for p in group["params"] if id(p) not in names]
        if unknown:
            raise StateError(
                f"the optimizer holds {len(unknown)} tensors that are not parameters of the "
                f"parallel module, one of shape {tuple(unknown[0].shape)}",
                hint="build it from the parallel module's parameters(), not the model's",
            )
        found.append((group, [names[id(p)] for p in group["params"]]))
    return found


def _kind(p: StoredParameter, key: str, value: Any, local: Tensor) -> dict[str, Any]:
    if isinstance(value, Tensor):
        if isinstance(value, Sharded) or (
            not isinstance(local, Sharded) and value.shape == local.shape
        ):
            return {"kind": _SHARD}
        if value.numel() != 1 and is_sharded(p) and not isinstance(local, Sharded):
            raise _no_shard(p, key, tuple(value.shape))
        return {"kind": _PLAIN}
    if value is None or type(value) in (bool, int, float, str):
        return {"value": value}
    raise StateError(
        f"optimizer state `{key}` of `{p.name}` is a {type(value).__name__}",
        hint="state is tensors and numbers; save anything else in extra",
    )


def _no_shard(p: StoredParameter, key: str, shape: tuple[int, ...]) -> StateError:
    return StateError(
        f"optimizer state `{key}` of `{p.name}` has shape {shape}: neither a scalar nor the "
        f"shape of the parameter's shard, {p.stored.shape}",
        hint="use an elementwise optimizer (SGD, Adam, AdamW), or store the parameter unsharded",
    )


def _plain_option(key: str, value: Any) -> Any:
    """An option of a parameter group as JSON; tensors (a learning rate) become numbers."""
    if isinstance(value, Tensor):
        return value.item()
    if isinstance(value, tuple | list):
        return [_plain_option(key, item) for item in value]
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise StateError(
        f"option `{key}` of a parameter group is a {type(value).__name__}, which cannot be saved",
        hint="options are numbers, strings, and lists of them",
    )


def _typed_option(value: Any, current: Any) -> Any:
    """A saved option, in the type of the optimizer's current one."""
    if isinstance(current, Tensor):
        return torch.tensor(value, dtype=current.dtype, device=current.device)
    if isinstance(current, tuple):
        pairs = zip(value, current, strict=True)
        return tuple(_typed_option(v, c) for v, c in pairs)
    return value
