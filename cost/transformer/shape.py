"""A transformer in numbers: its dims, and the parameters that they make.

    attention   h (a d + 2 kv d) + a d h       a query heads and kv key heads of d features each
    mlp         2 h f, or 3 h f if gated; per expert with the expert's f
    embedding   V h; once more for a head that is not tied; s h for learned positions

Published runs give dims and no class. A feed-forward part of 4h is read as GPT's plain one (GELU,
biases, layer norm, learned positions, tied head). Any other is read as Llama's gated one (SwiGLU,
no biases, RMS norm, rotary positions, a head of its own).
"""

from __future__ import annotations

from dataclasses import dataclass, replace


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
    ties_head, has_biases, learns_positions: what differs from that; None as `is_gated` says
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

    @property
    def is_tied(self) -> bool:
        return not self.is_gated if self.ties_head is None else self.ties_head

    @property
    def is_biased(self) -> bool:
        return not self.is_gated if self.has_biases is None else self.has_biases

    @property
    def position_parameters(self) -> int:
        learns = not self.is_gated if self.learns_positions is None else self.learns_positions
        return learns * self.seq * self.hidden

    @property
    def attention_parameters(self) -> int:
        h, biases = self.hidden, self.is_biased
        qkv, out = self.query_features + 2 * self.key_features, self.value_features * h
        if (narrow := self.latent) is not None:
            keys = self.heads * (self.head_dim + narrow.value)
            down = h * (narrow.q_rank + narrow.kv_rank + narrow.rotary)
            queries = (narrow.q_rank or h) * self.query_features
            return down + queries + narrow.kv_rank * keys + out
        return h * qkv + out + biases * (qkv + h)

    @property
    def mlp_parameters(self) -> int:
        """Feed-forward parameters of a dense layer, or of one expert."""
        ffn = self.experts.ffn if self.experts else self.ffn
        n_products = 3 if self.is_gated else 2
        return n_products * self.hidden * ffn + self.is_biased * (ffn + self.hidden)

    @property
    def shared_parameters(self) -> int:
        """Feed-forward parameters of the expert that sees every token."""
        return 3 * self.hidden * self.experts.shared_ffn if self.experts else 0

    @property
    def norm_parameters(self) -> int:
        return 2 * self.hidden * (1 if self.is_gated else 2)

    @property
    def router_parameters(self) -> int:
        return self.hidden * self.experts.n_experts if self.experts else 0

    @property
    def layer_parameters(self) -> int:
        n_experts = self.experts.n_experts if self.experts else 1
        return (
            self.attention_parameters
            + n_experts * self.mlp_parameters
            + self.norm_parameters
            + self.router_parameters
            + self.shared_parameters
        )

    @property
    def embedding_parameters(self) -> int:
        return self.vocab * self.hidden

    @property
    def n_parameters(self) -> int:
        embeddings = self.embedding_parameters * (1 if self.is_tied else 2)
        last_norm = self.norm_parameters // 2
        each, dense = self.layer_parameters, self.dense.layer_parameters
        layers = (self.layers - self.dense_layers) * each + self.dense_layers * dense
        return layers + embeddings + self.position_parameters + last_norm

    @property
    def model_flops_per_token(self) -> float:
        """FLOPs of forward and backward without recompute; a causal mask skips nothing:

        6 x (parameters of matmuls that see a token) + 6 s (query and value features) per layer,
        and 6 x the embedding's parameters for the logits.
        """
        chosen = self.experts.chosen if self.experts else 1
        products = self.attention_parameters + chosen * self.mlp_parameters
        products += self.router_parameters + self.shared_parameters
        per_layer = 6 * products + 6 * self.seq * (self.query_features + self.value_features)
        flops = float(self.layers * per_layer + 6 * self.embedding_parameters)
        if self.dense_layers:
            dense = self.dense_layers / self.layers
            flops = (1 - dense) * flops + dense * self.dense.model_flops_per_token
        return flops
