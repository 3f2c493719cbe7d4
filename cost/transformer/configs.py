"""The shape of a Hugging Face configuration: which of its fields is which dim.

plain     GPT-2's layers: biases, GELU, learned positions, a head tied to the embedding
gated     Llama's: SwiGLU, no biases, rotary positions, a head of its own
experts   Mixtral's: gated experts, of which each token sees a few
"""

from __future__ import annotations

from typing import Any

from autopar.cost.transformer.shape import Experts, TransformerShape
from autopar.errors import NotSupportedError

PLAIN = ("gpt2",)
GATED = ("llama", "mistral", "qwen2", "qwen3")
EXPERTS = ("mixtral", "qwen3_moe")


def shape_of(config: Any, seq: int) -> tuple[TransformerShape, tuple[str, ...]]:
    """The dims of a configuration for rows of `seq` tokens, and notes on what they ignore.

    Raises `NotSupportedError` for a model of none of the kinds above.
    """
    kind = config.model_type
    if kind not in (*PLAIN, *GATED, *EXPERTS):
        raise NotSupportedError(
            f"a {kind} by its dims alone",
            hint=f"the model by dims knows {', '.join((*PLAIN, *GATED, *EXPERTS))}; any model "
            "can be planned and simulated with --mesh, without --scale",
        )
    hidden, heads = config.hidden_size, config.num_attention_heads
    shape = TransformerShape(
        layers=config.num_hidden_layers,
        hidden=hidden,
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or hidden // heads,
        ffn=_ffn(config),
        seq=seq,
        vocab=config.vocab_size,
        is_gated=kind not in PLAIN,
        experts=_experts(config) if kind in EXPERTS else None,
    )
    left_out = []
    if shape.is_tied != bool(config.tie_word_embeddings):
        left_out.append(
            f"the head counts as {'tied to' if shape.is_tied else 'apart from'} the embedding, "
            "and the configuration says otherwise"
        )
    return shape, tuple(left_out)


def _ffn(config: Any) -> int:
    if config.model_type in PLAIN:
        return int(config.n_inner or 4 * config.hidden_size)
    return int(config.intermediate_size)


def _experts(config: Any) -> Experts:
    each = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    return Experts(config.num_local_experts, config.num_experts_per_tok, each)
