"""What attention reads: masks that are flags or ranges of keys, and heads that are repeated.

Read: `flags.py` (masks that `is_causal` or nothing replaces), with `piecewise.py` (masks of any
length); `ranges.py` (one range of keys per row); `groups.py` (heads that queries share).
May import the builder of `capture`, and what that may import.
Mainly hands on `replace_masks`, `range_masks` and `group_queries` for `capture/pipeline.py`.
"""

from autopar.capture.attention import ranges
from autopar.capture.attention.flags import is_elementwise, replace_masks
from autopar.capture.attention.groups import group_queries
from autopar.capture.attention.piecewise import PiecewiseMask
from autopar.capture.attention.ranges import range_masks

__all__ = [
    "PiecewiseMask",
    "group_queries",
    "is_elementwise",
    "range_masks",
    "ranges",
    "replace_masks",
]
