"""Decides how tensors change placement, and how stages exchange tensors.

Read `moves.py` (one function per move), `fused.py` (one call for many tensors), `p2p.py`
(non-blocking messages), `crossings.py` (tensors between stages), then `ties.py` (gradients of
shared parameters).
It imports `runtime/groups`, and may not import `lowered`, its neighbour.

Mainly hands on the moves (`p_to_s`, ...), `Messenger` and `Crossings`.
"""

from autopar.runtime.collectives.crossings import Crossings
from autopar.runtime.collectives.fused import start_fused
from autopar.runtime.collectives.moves import (
    apply_primitive,
    i_to_p,
    i_to_r,
    i_to_s,
    p_to_i,
    p_to_r,
    p_to_s,
    r_to_i,
    r_to_p,
    r_to_s,
    s_to_i,
    s_to_p,
    s_to_r,
    s_to_s,
)
from autopar.runtime.collectives.p2p import DistMessenger, Messenger, Posted, Receive, Send
from autopar.runtime.collectives.ties import TiedGradients

__all__ = [
    "Crossings",
    "DistMessenger",
    "Messenger",
    "Posted",
    "Receive",
    "Send",
    "TiedGradients",
    "apply_primitive",
    "i_to_p",
    "i_to_r",
    "i_to_s",
    "p_to_i",
    "p_to_r",
    "p_to_s",
    "r_to_i",
    "r_to_p",
    "r_to_s",
    "s_to_i",
    "s_to_p",
    "s_to_r",
    "s_to_s",
    "start_fused",
]
