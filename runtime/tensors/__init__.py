"""Decides how a whole tensor is spread over ranks, and what users see of it on one of them.

Read `sharding.py` (shards and boxes of a stored parameter), `spread.py` (the same, seen from one
rank), `operators.py` (what an operator needs of a shard), `sharded.py` (the tensors that
`pm.parameters()` are), `of_parameter.py` (values computed from one), `memory.py` (their `data`,
`numpy()` and pickles), `boxed.py` (checkpoint files). It may import `execute` and `groups`.

Mainly hands on `Sharded`, `Spread` and `local_shard`.
"""

from autopar.runtime.tensors.boxed import Boxed, Chunks
from autopar.runtime.tensors.of_parameter import OfParameter
from autopar.runtime.tensors.sharded import Sharded, local_of, stored_parameter
from autopar.runtime.tensors.sharding import (
    Box,
    Groups,
    axis_groups,
    boxes,
    extended,
    gather_whole,
    is_sharded,
    local_shard,
    padding,
    without_padding,
)
from autopar.runtime.tensors.spread import Spread

__all__ = [
    "Box",
    "Boxed",
    "Chunks",
    "Groups",
    "OfParameter",
    "Sharded",
    "Spread",
    "axis_groups",
    "boxes",
    "extended",
    "gather_whole",
    "is_sharded",
    "local_of",
    "local_shard",
    "padding",
    "stored_parameter",
    "without_padding",
]
