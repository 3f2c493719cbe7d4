"""What a decision of a plan was chosen over: the next best options and what they cost.

Read `next_best.py` (one decision, with all that an option changes), then `all_options.py` (the
prices of all decisions at once). May import every other room of `passes`, and what lies below.
Mainly hands on `decisions` and `runners_up`.
"""

from autopar.passes.explain.all_options import runners_up
from autopar.passes.explain.next_best import decisions

__all__ = [
    "decisions",
    "runners_up",
]
