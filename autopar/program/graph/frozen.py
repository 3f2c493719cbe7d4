"""Python values and buffers that a graph holds as constants.

reads    (module path, attribute) that the trace read, in order; the root module's path is ""
buffers  names of the model's buffers that are constants of the graph
values   name of a value -> the value. Of a container also its length, of a tensor which one it is
         and how often it was written to
modes    module path -> was the module in training mode; empty if the trace set the mode itself

`autopar.capture.Watch` compares them with what they are now.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

AttributeReads = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Frozen:
    """What the graph of one capture holds of the user's Python state."""

    reads: AttributeReads = ()
    buffers: tuple[str, ...] = ()
    values: Mapping[str, object] = field(default_factory=dict)
    modes: Mapping[str, bool] = field(default_factory=dict)
