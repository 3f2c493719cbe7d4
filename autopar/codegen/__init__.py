"""Prints each stage program as one readable Python file, which is the program that runs.

Read `source.py` (a file, with both functions), `header.py` (its imports), `statements.py` (one line
as a statement), `words.py` (types, bytes, lists), `layout.py` (few lines that say the same). Then
equal blocks: `blocks.py` (their pieces), `flow.py` (what these hand on to each other), `fold.py`
(from forward to backward, too), `functions.py` (the function of equal pieces), `calls.py` (calls
and loops). `regions.py` has what a compiler may fuse. Last, `defined.py` (each name has a value
where it is read).
May import `cost`, `runtime` and the layers below them.
Mainly hands on `emit` (the source of one stage) and `file_name`.
"""

from autopar.codegen.regions import count_regions
from autopar.codegen.source import emit, file_name, prints_all

__all__ = ["count_regions", "emit", "file_name", "prints_all"]
