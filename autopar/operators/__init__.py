"""Operators of autopar's own, registered with torch when this package is imported.

Capture writes them in place of groups of ATen operators that say less than what is meant.
"""

from autopar.operators import experts

__all__ = ["experts"]
