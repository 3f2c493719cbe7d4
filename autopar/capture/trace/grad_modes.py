"""Gradients on or off, as marks of the nodes of a trace.

Left to itself, `torch.export` makes a graph of its own of every `torch.no_grad()` in forward: it
splits the whole graph and writes its code again, a third of the time of capture. So calls that
switch gradients stay out of the graph, and nodes carry what held as they were added.
"""

from __future__ import annotations

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode

# Meta key: were gradients on where the operator ran? They were if the key is missing.
GRAD_ENABLED = "grad_enabled"


def switch_gradients(enabled: bool) -> None:
    """`torch._C._set_grad_enabled` in forward."""
    mark_nodes()
    with torch._C.DisableTorchFunction():  # modes of the trace would add a node
        torch._C._set_grad_enabled(enabled)


def mark_nodes() -> None:
    """Mark the nodes since the last switch; without a trace there are none."""
    if (mode := get_proxy_mode()) is None:
        return
    for node in reversed(mode.tracer.graph.nodes):
        if GRAD_ENABLED in node.meta:
            break
        node.meta[GRAD_ENABLED] = torch.is_grad_enabled()
