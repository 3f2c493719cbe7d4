"""Live bytes of tensors, counted by storage, with their peak.

While `LiveBytes` is entered, it sees the result of every operator that PyTorch dispatches on the
same thread, in forward and in backward. A storage counts once, however many tensors view it, until
the last of them is gone. Buffers inside a kernel are not seen. They count only for kernels of our
own that say how large they are (`workspace_bytes`). It works on real and on fake tensors, on every
device.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.operators import workspace_bytes


class LiveBytes(TorchDispatchMode):
    """Counts live storages; `known` are tensors that are already alive.

    `live_bytes` is the count, `peak_bytes` its maximum since the start or `reset_peak`, `peak_at`
    the operator that reached the maximum.
    """

    def __init__(self, known: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.live_bytes = 0
        self.peak_bytes = 0
        self.peak_at = ""
        # Keyed by the id of the storage object, which lives as long as the storage.
        self._seen: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        for tensor in known:
            self._add(tensor)
        self.reset_peak()

    def reset_peak(self) -> None:
        """Forget the peak so far."""
        self.peak_bytes, self.peak_at = self.live_bytes, ""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._add(leaf)
        needed_bytes = self.live_bytes + workspace_bytes(func, args)
        if needed_bytes > self.peak_bytes:
            self.peak_bytes, self.peak_at = needed_bytes, str(func)
        return result

    def _add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._seen:
            return
        size_bytes = storage.nbytes()
        self._seen[key] = weakref.ref(storage, self._forget(key, size_bytes))
        self.live_bytes += size_bytes

    def _forget(self, key: int, size_bytes: int) -> Callable[[Any], None]:
        def gone(_: Any) -> None:
            self.live_bytes -= size_bytes
            del self._seen[key]

        return gone
