"""What a decision of a plan was chosen over: the next best options and what they cost.

Its one file is `next_best.py`. May import every other room of `passes`, and what lies below.
Hands on `decisions`.
"""

from autopar.passes.explain.next_best import decisions

__all__ = [
    "decisions",
]
