"""Decides how one rank takes part in a collective, and how each call is recorded.

Read `group.py` (primitives of a `Group`; records of its calls), `pending.py` (a call under way),
`distributed.py` (groups over `torch.distributed`), then `rendezvous.py` (calls that all ranks must
make). Of the runtime it imports `runtime/flight` alone, where each call is noted.

Mainly hands on `Group`, `make_groups`, `new_group`, `phase` and `together_in`.
"""

from autopar.runtime.groups.distributed import (
    DistGroup,
    axis_subsets,
    make_edges,
    make_groups,
    new_group,
    world_group,
)
from autopar.runtime.groups.group import (
    WORLD_AXIS,
    CollectiveCall,
    Group,
    RankContext,
    Recorder,
    ReduceOp,
    current_context,
    cut,
    join,
    phase,
    set_thread_context,
)
from autopar.runtime.groups.pending import Pending
from autopar.runtime.groups.rendezvous import together_in

__all__ = [
    "WORLD_AXIS",
    "CollectiveCall",
    "DistGroup",
    "Group",
    "Pending",
    "RankContext",
    "Recorder",
    "ReduceOp",
    "axis_subsets",
    "current_context",
    "cut",
    "join",
    "make_edges",
    "make_groups",
    "new_group",
    "phase",
    "set_thread_context",
    "together_in",
    "world_group",
]
