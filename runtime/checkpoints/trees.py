"""States of other objects (a scheduler, a loader, generators) as JSON and tensors, without pickle.

`encoded` turns what `state_dict()` returns into a tree that JSON holds, and a list of tensors, to
which the tree refers by number. What JSON lacks is tagged: {"~": kind, "of": ...}.

    None bool int float str, lists    as they are
    dictionaries with str keys        as they are, unless a key begins with "~"
    other dictionaries, Counter       "dict", "counter": pairs of key and value
    tuple set frozenset               "tuple", "set", "frozenset": a list
    Tensor ndarray bytes              "tensor", "ndarray", "bytes": the number of a tensor
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.errors import OptionError, StateError

_TAG, _OF = "~", "of"
_LISTS: dict[type, str] = {tuple: "tuple", set: "set", frozenset: "frozenset"}
_MADE: dict[str, Callable[[list[Any]], Any]] = {
    "tuple": tuple, "set": set, "frozenset": frozenset,
    "dict": dict, "counter": lambda pairs: Counter(dict(pairs)),
}  # fmt: skip


def encoded(value: Any, where: str, tensors: list[Tensor]) -> Any:
    """The tree of a value; its tensors, which share memory with it, are appended to `tensors`.

    Raises `OptionError` that names the place of what can be saved only by pickle.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, DTensor):
        raise OptionError(f"{where} is a DTensor; save state that is whole on every rank")
    if isinstance(value, Tensor | np.ndarray | bytes):
        tensors.append(_as_tensor(value))
        kind = "bytes" if isinstance(value, bytes) else "ndarray"
        return {_TAG: "tensor" if isinstance(value, Tensor) else kind, _OF: len(tensors) - 1}
    if isinstance(value, Mapping):
        return _encoded_mapping(value, where, tensors)
    if type(value) is list or type(value) in _LISTS:
        items = [encoded(item, f"{where}[{i}]", tensors) for i, item in enumerate(value)]
        return items if type(value) is list else {_TAG: _LISTS[type(value)], _OF: items}
    raise OptionError(
        f"{where} is a {type(value).__name__}, which only a pickle could hold",
        hint="states are None, bool, int, float, str, bytes, tensors, arrays, and lists, tuples, "
        "sets and dicts of them",
    )


def decoded(tree: Any, tensor: Callable[[int], Tensor]) -> Any:
    """The value of a tree; `tensor` gives the tensor of a number.

    Raises `StateError` for a tree that `encoded` did not make.
    """
    if isinstance(tree, list):
        return [decoded(item, tensor) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if _TAG not in tree:
        return {key: decoded(item, tensor) for key, item in tree.items()}
    kind, of = tree[_TAG], tree[_OF]
    if kind == "tensor":
        return tensor(of)
    if kind in ("ndarray", "bytes"):
        array = tensor(of).numpy()
        return array if kind == "ndarray" else array.tobytes()
    if kind not in _MADE:
        raise StateError(f"the checkpoint has a state of an unknown kind, {kind!r}")
    return _MADE[kind](decoded(of, tensor))


def _encoded_mapping(value: Mapping[Any, Any], where: str, tensors: list[Tensor]) -> Any:
    is_counter = isinstance(value, Counter)
    if not is_counter and all(type(k) is str and not k.startswith(_TAG) for k in value):
        return {k: encoded(item, f"{where}[{k!r}]", tensors) for k, item in value.items()}
    pairs: Sequence[Any] = [
        {_TAG: "tuple", _OF: [
            encoded(k, f"a key of {where}", tensors), encoded(item, f"{where}[{k!r}]", tensors),
        ]}
        for k, item in value.items()
    ]  # fmt: skip
    return {_TAG: "counter" if is_counter else "dict", _OF: pairs}


def _as_tensor(value: Tensor | np.ndarray[Any, Any] | bytes) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, bytes):
        return torch.tensor(list(value), dtype=torch.uint8)
    return torch.from_numpy(np.ascontiguousarray(value).reshape(value.shape))
