"""Marks what forward draws after it has set the state of torch's generator (`torch.manual_seed`).

Random numbers of a program are of the seed and the positions of a step (`operators/random.py`), so
a state that forward sets would be of no effect. What is drawn after it is refused, by its mark.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.overrides import TorchFunctionMode

# Meta key: was the state of torch's generator set before, in forward? It was if the key is there.
SEEDED = "seeded"
_START = 0x5EED_0F_7ACE  # no seed that a user would set


class Seeds(TorchFunctionMode):
    """Holds while forward runs. The generator has its state again afterwards."""

    def __enter__(self) -> Seeds:
        self._before = torch.get_rng_state()
        torch.default_generator.manual_seed(_START)
        super().__enter__()
        return self

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        mode = get_proxy_mode()
        if mode is None or torch.default_generator.initial_seed() == _START:
            return function(*args, **(kwargs or {}))
        n_before = len(mode.tracer.graph.nodes)
        result = function(*args, **(kwargs or {}))
        nodes = reversed(mode.tracer.graph.nodes)
        for _ in range(len(mode.tracer.graph.nodes) - n_before):
            next(nodes).meta[SEEDED] = True
        return result

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.set_rng_state(self._before)
