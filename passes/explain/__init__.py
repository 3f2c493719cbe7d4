"""explain."""

from autopar.passes.explain.next_best import decisions

__all__ = [
    "decisions",
]
