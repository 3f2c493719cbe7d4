"""Canonical forms: what operators become before there is a program.

`table.py` has the small ones and the table of all; a family of operators has a file of its own.
What has neither a rewrite nor a rule is decomposed (`decompose.py`).
"""

from autopar.capture.rewrites.decompose import decomposition
from autopar.capture.rewrites.table import rewrite_of

__all__ = [
    "decomposition",
    "rewrite_of",
]
