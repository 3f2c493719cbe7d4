"""Functions that replace an operator one of whose sharded dims needs more than its own shard.

Planning knows them by name (`autopar.rules.lowering`); each takes the group of the ranks that
share the dim, and communicates inside, forward and backward.
"""

from autopar.runtime.lowered.vocabulary import (
    vocab_parallel_cross_entropy,
    vocab_parallel_embedding,
)

__all__ = ["vocab_parallel_cross_entropy", "vocab_parallel_embedding"]
