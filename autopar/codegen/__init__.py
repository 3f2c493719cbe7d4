"""Prints each stage program as one readable Python file, which is the program that runs.

Read: `source.py`, the only file.
May import `cost`, `runtime` and the layers below them.
Hands on `emit` (the source of one stage) and `file_name`.
"""

from autopar.codegen.source import emit, file_name

__all__ = [
    "emit",
    "file_name",
]
