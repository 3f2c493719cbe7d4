"""Gradients of earlier steps, put aside while a step makes its own."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor


class Aside:
    """The gradients that leaves had before a step."""

    def __init__(self) -> None:
        self._earlier: dict[str, Tensor] = {}

    def put(self, leaves: Mapping[str, Tensor]) -> None:
        """Take the gradients of all leaves away."""
        self._earlier = {n: leaf.grad for n, leaf in leaves.items() if leaf.grad is not None}
        for leaf in leaves.values():
            leaf.grad = None

    def give_back(self, leaves: Mapping[str, Tensor], with_new: bool = True) -> None:
        """Add those of the step to the earlier ones; or drop them."""
        for name, leaf in leaves.items():
            earlier, new = self._earlier.get(name), leaf.grad if with_new else None
            leaf.grad = new if earlier is None else earlier if new is None else earlier.add_(new)
        self._earlier = {}
