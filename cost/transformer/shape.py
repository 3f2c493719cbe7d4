"""A transformer in numbers: its dims, as published runs and Hugging Face configurations give them.

Published runs give dims and no class. A feed-forward part of 4h is read as GPT's plain one (GELU,
biases, layer norm, learned positions, tied head). Any other is read as Llama's gated one (SwiGLU,
no biases, RMS norm, rotary positions, a head of its own). Its parameters are those of the items of
its layers and ends (`chunks.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from autopar.errors import NotSupportedError

# Kinds of configurations: GPT-2's plain layers, Llama's gated ones, Mixtral's gated experts.
PLAIN = ("gpt2",)
GATED = ("llama", "mistral", "qwen2", "qwen3")
EXPERTS = ("mixtral", "qwen3_moe")


@dataclass(frozen=True)
class Experts:
    """A mixture of experts: `chosen` of `n_experts` see each token; each has `ffn` features.

    is_grouped    one kernel multiplies the rows of all experts on a rank
    shared_ffn    features of an expert that sees every token
    """

    n_experts: int
    chosen: int
    ffn: int
    is_grouped: bool = False
    shared_ffn: int = 0


@dataclass(frozen=True)
class Latent:
    """Attention whose queries, keys and values are made of two narrow tensors (DeepSeek-V2, arXiv
    2405.04434): their ranks (0: queries are made of the whole one), and the features of a head's
    rotary part and of its values."""

    q_rank: int
    kv_rank: int
    rotary: int
    value: int


@dataclass(frozen=True)
class TransformerShape:
    """A decoder of equal layers. `is_gated`: layers as Llama's, else as GPT's.

    dense_layers: so many of a mixture's layers, the first ones, have no experts.
    ties_head, has_biases, learns_positions: what differs from that; None: as `is_gated` says.
    norms_heads: each head of queries and keys is normalised (Qwen3, arXiv 2505.09388, section 2).
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    seq: int
    vocab: int
    is_gated: bool
    experts: Experts | None = None
    ties_head: bool | None = None
    has_biases: bool | None = None
    learns_positions: bool | None = None
    latent: Latent | None = None
    dense_layers: int = 0
    norms_heads: bool = False

    def __post_init__(self) -> None:
        for name in ("ties_head", "has_biases", "learns_positions"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, not self.is_gated)

    @property
    def dense(self) -> TransformerShape:
        """The same model without experts."""
        return replace(self, experts=None, dense_layers=0)

    @property
    def query_features(self) -> int:
        return self.heads * (self.head_dim + (self.latent.rotary if self.latent else 0))

    @property
    def value_features(self) -> int:
        """Of all heads together, after attention."""
        return self.heads * (self.latent.value if self.latent else self.head_dim)

    @property
    def key_features(self) -> int:
        return self.query_features // self.heads * self.kv_heads


def shape_of(config: Any, seq: int) -> TransformerShape:
    """The dims of a Hugging Face configuration for rows of `seq` tokens.

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
        norms_heads=kind.startswith("qwen3"),
    )
