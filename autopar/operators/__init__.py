"""Operators of autopar's own, registered with torch when this package is imported.

Capture writes them in place of ATen operators that say less than what is meant.
"""

from autopar.operators import experts, random

__all__ = ["experts", "random"]
