"""The shape of a Hugging Face configuration: which of its fields is which dim.

plain     GPT-2's layers: biases, GELU, learned positions, the head usually tied to the embedding
gated     Llama's: SwiGLU, no biases, rotary positions, the head usually not
experts   Mixtral's: gated experts, of which each token sees a few
"""

from __future__ import annotations

from typing import Any

from autopar.cost.transformer.shape import Experts, TransformerShape
from autopar.errors import NotSupportedError

PLAIN = ("gpt2",)
GATED = ("llama", "mistral", "qwen2", "qwen3")
EXPERTS = ("mixtral", "qwen3_moe")


def shape_of(config: Any, seq: int) -> TransformerShape:
    """The dims of a configuration for rows of `seq` tokens.

    Raises `NotSupportedError` for a model of none of the kinds above.
    """
    kind, known = config.model_type, (*PLAIN, *GATED, *EXPERTS)
    if kind not in known:
        raise NotSupportedError(
            f"a {kind} by its dims alone",
            hint=f"the model by dims knows {', '.join(known)}; any model "
            "can be planned and simulated with --mesh, without --scale",
        )
    hidden, heads, is_plain = config.hidden_size, config.num_attention_heads, kind in PLAIN
    ffn = (config.n_inner or 4 * hidden) if is_plain else config.intermediate_size
    experts = None
    if kind in EXPERTS:
        each = getattr(config, "moe_intermediate_size", None) or ffn
        experts = Experts(config.num_local_experts, config.num_experts_per_tok, each)
    return TransformerShape(
        layers=config.num_hidden_layers,
        hidden=hidden,
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or hidden // heads,
        ffn=int(ffn),
        seq=seq,
        vocab=config.vocab_size,
        is_gated=not is_plain,
        experts=experts,
        ties_head=bool(config.tie_word_embeddings),
    )
