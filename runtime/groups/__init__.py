"""Decides how one rank takes part in a collective, and how each call is recorded.

Read `calls.py` (records and phases), `group.py` (primitives of a `Group`), then `distributed.py`
(groups over `torch.distributed`). This is the lowest room of the runtime: it imports no other
room of it, only `placement`, `mesh` and `errors`.

Hands on `Group`, `make_groups` and `phase`.
"""

from autopar.runtime.groups.calls import (
    CollectiveCall,
    RankContext,
    current_context,
    phase,
    set_thread_context,
)
from autopar.runtime.groups.distributed import DistGroup, axis_subsets, make_groups, world_group
from autopar.runtime.groups.group import WORLD_AXIS, Group, ReduceOp, cut, join

__all__ = [
    "WORLD_AXIS",
    "CollectiveCall",
    "DistGroup",
    "Group",
    "RankContext",
    "ReduceOp",
    "axis_subsets",
    "current_context",
    "cut",
    "join",
    "make_groups",
    "phase",
    "set_thread_context",
    "world_group",
]
