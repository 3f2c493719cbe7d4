"""Gradients on or off, as marks of the nodes of a trace.

Left to itself, `torch.export` makes a graph of its own of every `torch.no_grad()` in forward: it
splits the whole graph and writes its code again, a tenth to a fifth of the time of capture. So
calls that switch gradients stay out of the graph, and nodes carry what held as they were added.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.overrides import TorchFunctionMode

# Meta key: were gradients on where the operator ran? They were if the key is missing.
GRAD_ENABLED = "grad_enabled"


class GradModes(TorchFunctionMode):
    """Holds while forward runs. What holds around it counts as on: an evaluation is mostly traced
    under `torch.no_grad()`."""

    def __enter__(self) -> GradModes:
        self._is_off_around = not torch.is_grad_enabled()
        super().__enter__()
        return self

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        if function is not torch._C._set_grad_enabled:
            return function(*args, **(kwargs or {}))
        self._mark()
        with torch._C.DisableTorchFunction():  # modes of the trace would add a node
            return function(*args, **(kwargs or {}))

    def __exit__(self, *error: Any) -> None:
        self._mark()
        super().__exit__(*error)

    def _mark(self) -> None:
        """Mark the nodes since the last switch; without a trace there are none."""
        if (mode := get_proxy_mode()) is None:
            return
        is_on = torch.is_grad_enabled() or self._is_off_around
        for node in reversed(mode.tracer.graph.nodes):
            if GRAD_ENABLED in node.meta:
                break
            node.meta[GRAD_ENABLED] = is_on
