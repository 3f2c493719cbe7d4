"""Who communicates what, and when: read off the lines of a program, never stored.

Read `gathers.py` (gathers that are one call), `backwards.py` (the two parts of backward),
`regathers.py` (what backward gathers again), `reruns.py` (when lines run again),
`loss_at_end.py` (the loss, when the step ends), `order.py` (what runs when, both ways),
`bucketing.py`, `cross_mesh.py` and `messages.py` (what crosses between stages), `collective.py`
(the collectives of a step).
May import `lines` and what that may. Mainly hands on `forward_order`, `backward_order` and
`step_calls`.
"""

from autopar.program.communication.backwards import MATMULS, Backward
from autopar.program.communication.bucketing import (
    BUCKET_BYTES,
    buckets,
    primitive_bytes,
    sync_bucket_bytes,
)
from autopar.program.communication.collective import (
    Collective,
    ConversionBucket,
    RankCall,
    conversion_buckets,
    rank_collectives,
    return_bucket_bytes,
    return_buckets,
    step_calls,
    summarise,
    used_parameters,
)
from autopar.program.communication.cross_mesh import Slice, local_factors, slices
from autopar.program.communication.gathers import fused_gathers, gathers_at, runs_of
from autopar.program.communication.messages import (
    Messages,
    Piece,
    TieExchange,
    copy_axes,
    crossing_slices,
    message_edges,
    tie_exchanges,
    tied_slices,
)
from autopar.program.communication.order import (
    Forward,
    Gather,
    Reduction,
    Start,
    Wait,
    Work,
    backward_order,
    backward_parts,
    forward_order,
    positions_of,
)
from autopar.program.communication.regathers import kept_gathers
from autopar.program.communication.reruns import Needs, Step, line_needs

__all__ = [
    "BUCKET_BYTES",
    "MATMULS",
    "Backward",
    "Collective",
    "ConversionBucket",
    "Forward",
    "Gather",
    "Messages",
    "Needs",
    "Piece",
    "RankCall",
    "Reduction",
    "Slice",
    "Start",
    "Step",
    "TieExchange",
    "Wait",
    "Work",
    "backward_order",
    "backward_parts",
    "buckets",
    "conversion_buckets",
    "copy_axes",
    "crossing_slices",
    "forward_order",
    "fused_gathers",
    "gathers_at",
    "kept_gathers",
    "line_needs",
    "local_factors",
    "message_edges",
    "positions_of",
    "primitive_bytes",
    "rank_collectives",
    "return_bucket_bytes",
    "return_buckets",
    "runs_of",
    "slices",
    "step_calls",
    "summarise",
    "sync_bucket_bytes",
    "tie_exchanges",
    "tied_slices",
    "used_parameters",
]
