"""Decides how to compute an operator over a sharded dim when local shards alone would be wrong.

Planning knows these functions by name (`autopar/rules/lowering.py`). Each takes the group of the
ranks that share the dim: to communicate, forward and backward, or only to know its position.

Each is a pair, forward and backward (`lowered.py`), that needs no autograd. Read `vocabulary.py`,
`bags.py`, `normalisation.py`, `experts.py`, `attention.py` and `ring.py`, in any order, then
`tape.py`. This room imports `runtime/groups`, `operators`, `placement` and `precision`, and may not
import `collectives`, its neighbour. It mainly hands on functions such as
`vocab_parallel_cross_entropy`, all of them by name as `LOWERED`, and `taped`.
"""

from autopar.runtime.lowered.attention import causal_attention
from autopar.runtime.lowered.bags import vocab_parallel_bags, vocab_parallel_weighted_bags
from autopar.runtime.lowered.experts import (
    expert_exchange_gated_mlp,
    expert_exchange_linear,
    expert_exchange_mlp,
    expert_parallel_gated_mlp,
    expert_parallel_linear,
    expert_parallel_mlp,
)
from autopar.runtime.lowered.lowered import Lowered
from autopar.runtime.lowered.normalisation import (
    synchronised_batch_norm,
    synchronised_batch_norm_with_statistics,
)
from autopar.runtime.lowered.ring import ring_attention
from autopar.runtime.lowered.tape import taped
from autopar.runtime.lowered.vocabulary import (
    vocab_parallel_cross_entropy,
    vocab_parallel_embedding,
)

LOWERED: dict[str, Lowered] = {
    "causal_attention": causal_attention,
    "expert_exchange_gated_mlp": expert_exchange_gated_mlp,
    "expert_exchange_linear": expert_exchange_linear,
    "expert_exchange_mlp": expert_exchange_mlp,
    "expert_parallel_gated_mlp": expert_parallel_gated_mlp,
    "expert_parallel_linear": expert_parallel_linear,
    "expert_parallel_mlp": expert_parallel_mlp,
    "ring_attention": ring_attention,
    "synchronised_batch_norm": synchronised_batch_norm,
    "synchronised_batch_norm_with_statistics": synchronised_batch_norm_with_statistics,
    "vocab_parallel_bags": vocab_parallel_bags,
    "vocab_parallel_cross_entropy": vocab_parallel_cross_entropy,
    "vocab_parallel_embedding": vocab_parallel_embedding,
    "vocab_parallel_weighted_bags": vocab_parallel_weighted_bags,
}

__all__ = [
    "LOWERED",
    "Lowered",
    "causal_attention",
    "expert_exchange_gated_mlp",
    "expert_exchange_linear",
    "expert_exchange_mlp",
    "expert_parallel_gated_mlp",
    "expert_parallel_linear",
    "expert_parallel_mlp",
    "ring_attention",
    "synchronised_batch_norm",
    "synchronised_batch_norm_with_statistics",
    "taped",
    "vocab_parallel_bags",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_embedding",
    "vocab_parallel_weighted_bags",
]
