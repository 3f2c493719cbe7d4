"""Functions that replace an operator one of whose sharded dims needs more than its own shard.

Planning knows them by name (`autopar.rules.lowering`); each takes the group of the ranks that
share the dim, to communicate inside, forward and backward, or to know its place.
"""

from autopar.runtime.lowered.attention import causal_attention
from autopar.runtime.lowered.experts import expert_exchange_linear, expert_parallel_linear
from autopar.runtime.lowered.normalisation import (
    synchronised_batch_norm,
    synchronised_batch_norm_with_statistics,
)
from autopar.runtime.lowered.vocabulary import (
    vocab_parallel_cross_entropy,
    vocab_parallel_embedding,
)

__all__ = [
    "causal_attention",
    "expert_exchange_linear",
    "expert_parallel_linear",
    "synchronised_batch_norm",
    "synchronised_batch_norm_with_statistics",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_embedding",
]
