"""Decides the canonical form of each traced operator.

Read: `table.py` (small rewrites, and the table of all), then one file per family: `places.py`,
`slices.py`, `gathers.py`, `bags.py`, `images.py`, `losses.py`, `random.py`, `attention.py` with
`repeated.py` (learned masks) and `fused_shapes.py`, `experts.py`. Last `decompose.py`, for
operators with neither a rewrite nor a rule, and `derivatives.py`, for derivatives in forward.
May import `capture` and what that may import.
Hands on `rewrite_of` and `decomposition` for `capture/normalise.py`, and `RANDOM_REWRITES`, the
operators that draw by position, for `capture/positional.py`.
"""

from autopar.capture.rewrites.decompose import PYTHON_DECOMPOSITIONS, decomposition
from autopar.capture.rewrites.random import RANDOM_REWRITES
from autopar.capture.rewrites.table import rewrite_of

__all__ = ["PYTHON_DECOMPOSITIONS", "RANDOM_REWRITES", "decomposition", "rewrite_of"]
