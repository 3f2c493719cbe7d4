"""Decides how to compute an operator over a sharded dim when local shards alone would be wrong.

Planning knows these functions by name (`autopar/rules/lowering.py`). Each takes the group of the
ranks that share the dim: to communicate, forward and backward, or only to know its position.

Read `attention.py`, `vocabulary.py`, `normalisation.py`, `experts.py`, in any order. This room
imports `runtime/groups`, `operators`, `placement` and `precision`, and may not import
`collectives`, its neighbour. It hands on functions such as `vocab_parallel_cross_entropy` and
`expert_exchange_linear`.
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
