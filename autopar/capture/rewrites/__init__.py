"""Decides the canonical form of each traced operator.

Read: `table.py` (small rewrites, and the table of all), then one file per family: `places.py`,
`gathers.py`, `images.py`, `losses.py`, `random.py`, `attention.py`, `experts.py`. Last
`decompose.py`, for operators with neither a rewrite nor a rule.
May import `capture` and what that may import.
Hands on `rewrite_of` and `decomposition`, both for `capture/normalise.py`.
"""

from autopar.capture.rewrites.decompose import decomposition
from autopar.capture.rewrites.table import rewrite_of

__all__ = [
    "decomposition",
    "rewrite_of",
]
