"""module."""

from autopar.module.parallel_module import ParallelModule

__all__ = [
    "ParallelModule",
]
