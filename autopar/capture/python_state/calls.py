"""What forward calls of torch, as text, to see cheaply whether a second run of it is the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary


class Calls(TorchFunctionMode):
    """A line per call: its function, its arguments, and the tensors among its results; tensors by
    number. What else a call returns may be something of the trace."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self._numbers = WeakIdKeyDictionary()

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        given = self._text((args, kwargs))  # before it changes its arguments
        out = function(*args, **(kwargs or {}))
        made = [self._word(value) for value in pytree.tree_leaves(out) if isinstance(value, Tensor)]
        self.lines.append(f"{made} = {resolve_name(function) or function} {given}")
        return out

    def _text(self, values: Any) -> str:
        leaves, spec = pytree.tree_flatten(values)
        return f"{', '.join(map(self._word, leaves))} in {spec}"

    def _word(self, value: Any) -> str:
        if not isinstance(value, Tensor):
            return repr(value)
        number = self._numbers.setdefault(value, len(self._numbers))
        return f"{number}: {value.dtype} {tuple(value.shape)}"
