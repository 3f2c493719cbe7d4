"""What forward calls of torch, to see cheaply whether a second run of it is the same."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary


class Calls(TorchFunctionMode):
    """A line per call: its function, its arguments, and the tensors among its results; tensors by
    number, since equal calls of equal tensors give equal ones. What else a call returns may be
    something of the trace."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[object] = []
        self._numbers = WeakIdKeyDictionary()
        self._counter = itertools.count()  # not the length: tensors that are gone leave it

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        leaves, spec = pytree.tree_flatten((args, kwargs))
        given = [*map(self._word, leaves)]  # before it changes its arguments
        out = function(*args, **(kwargs or {}))
        results = (out,) if isinstance(out, Tensor) else pytree.tree_leaves(out)
        made = [self._word(value) for value in results if isinstance(value, Tensor)]
        self.lines.append((function, given, spec, made))
        return out

    def _word(self, value: Any) -> object:
        if not isinstance(value, Tensor):
            return repr(value)
        if value not in self._numbers:
            self._numbers[value] = next(self._counter)
        return self._numbers[value]
