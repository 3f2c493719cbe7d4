"""Code generation: a `StageProgram` printed as one readable Python file."""

from autopar.codegen.source import emit, file_name

__all__ = [
    "emit",
    "file_name",
]
