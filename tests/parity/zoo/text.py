"""Language models of transformers: decoders, encoders, encoder-decoders, and recurrent ones."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
)

from tests.parity.zoo.entries import (
    EXPERTS,
    FFN,
    HEADS,
    HIDDEN,
    KV_HEADS,
    N_CLASSES,
    N_LAYERS,
    SEQUENCE,
    VOCABULARY,
    Entry,
    config,
    masked,
    sentences,
    tokens,
)

SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
# The names that most families use for their sizes.
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": FFN,
    "num_hidden_layers": N_LAYERS, "num_attention_heads": HEADS,
    "max_position_embeddings": SEQUENCE, **SPECIAL,
}  # fmt: skip
GROUPED = COMMON | {"num_key_value_heads": KV_HEADS}
EXPERTS_OF_TWO = GROUPED | {"num_experts_per_tok": 2, "moe_intermediate_size": FFN // 2}
GPT2: dict[str, Any] = {
    "vocab_size": VOCABULARY, "n_embd": HIDDEN, "n_layer": N_LAYERS, "n_head": HEADS,
    "n_positions": SEQUENCE, **SPECIAL,
}  # fmt: skip
# Encoder-decoders.
BOTH: dict[str, Any] = {
    "vocab_size": VOCABULARY, "d_model": HIDDEN, "encoder_layers": N_LAYERS,
    "decoder_layers": N_LAYERS, "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS, "encoder_ffn_dim": FFN, "decoder_ffn_dim": FFN,
    "max_position_embeddings": SEQUENCE, "decoder_start_token_id": 2,
    "forced_eos_token_id": 2, **SPECIAL,
}  # fmt: skip


def causal(kind: str, **values: Any) -> Entry:
    return Entry(partial(causal_model, kind, **values), tokens)


def causal_model(kind: str, **values: Any) -> nn.Module:
    model: nn.Module = AutoModelForCausalLM.from_config(config(kind, **values))
    return model


def translator(kind: str, **values: Any) -> nn.Module:
    model: nn.Module = AutoModelForSeq2SeqLM.from_config(config(kind, **values))
    return model


def masked_model(kind: str, **values: Any) -> nn.Module:
    model: nn.Module = AutoModelForMaskedLM.from_config(config(kind, **values))
    return model


def classifier(kind: str, **values: Any) -> nn.Module:
    model: nn.Module = AutoModelForSequenceClassification.from_config(
        config(kind, num_labels=N_CLASSES, **values)
    )
    return model


def gpt2_with_dropout() -> nn.Module:
    model: nn.Module = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **GPT2))
    return model


def bert_with_dropout() -> nn.Module:
    model: nn.Module = AutoModelForMaskedLM.from_config(AutoConfig.for_model("bert", **COMMON))
    return model


DECODERS = {
    "gpt2": causal("gpt2", **GPT2),
    "gpt2-dropout": Entry(gpt2_with_dropout, tokens),
    "llama": causal("llama", **GROUPED),
    "qwen2": causal("qwen2", **GROUPED),
    "opt": causal(
        "opt", vocab_size=VOCABULARY, hidden_size=HIDDEN, ffn_dim=FFN, num_hidden_layers=N_LAYERS,
        num_attention_heads=HEADS, max_position_embeddings=SEQUENCE, word_embed_proj_dim=HIDDEN,
        **SPECIAL,
    ),
    "bloom": causal(
        "bloom", vocab_size=VOCABULARY, hidden_size=HIDDEN, n_layer=N_LAYERS, n_head=HEADS,
        **SPECIAL,
    ),
    "gpt-neox": causal("gpt_neox", **COMMON),
    "phi": causal("phi", **GROUPED),
    "gemma2": causal("gemma2", head_dim=HIDDEN // HEADS, sliding_window=4, **GROUPED),
    "falcon": causal(
        "falcon", vocab_size=VOCABULARY, hidden_size=HIDDEN, num_hidden_layers=N_LAYERS,
        num_attention_heads=HEADS, **SPECIAL,
    ),
    "mamba": causal(
        "mamba", vocab_size=VOCABULARY, hidden_size=HIDDEN, num_hidden_layers=N_LAYERS,
        state_size=4, **SPECIAL,
    ),
}  # fmt: skip

MIXTURES = {
    "mixtral": causal("mixtral", num_local_experts=EXPERTS, **EXPERTS_OF_TWO),
    "qwen2-moe": causal(
        "qwen2_moe", num_experts=EXPERTS, shared_expert_intermediate_size=HIDDEN,
        decoder_sparse_step=1, **EXPERTS_OF_TWO,
    ),
    "deepseek-v3": causal(
        "deepseek_v3", **EXPERTS_OF_TWO | {
            "num_key_value_heads": HEADS, "n_routed_experts": EXPERTS, "n_shared_experts": 1,
            "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8,
            "v_head_dim": 8, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
        },
    ),
}  # fmt: skip

DISTILBERT: dict[str, Any] = {
    "vocab_size": VOCABULARY, "dim": HIDDEN, "n_layers": N_LAYERS, "n_heads": HEADS,
    "hidden_dim": FFN, "max_position_embeddings": SEQUENCE, "pad_token_id": 0,
}  # fmt: skip
ENCODERS = {
    "bert": Entry(partial(masked_model, "bert", **COMMON), masked),
    "bert-dropout": Entry(bert_with_dropout, masked),
    "bert-classifier": Entry(partial(classifier, "bert", **COMMON), sentences),
    "distilbert": Entry(partial(masked_model, "distilbert", **DISTILBERT), masked),
}

TRANSLATORS = {
    "t5": Entry(
        partial(
            translator, "t5", vocab_size=VOCABULARY, d_model=HIDDEN, d_kv=HIDDEN // HEADS,
            d_ff=FFN, num_layers=N_LAYERS, num_heads=HEADS, relative_attention_num_buckets=8,
            relative_attention_max_distance=16, decoder_start_token_id=0,
        ),
        tokens,
    ),
    "bart": Entry(partial(translator, "bart", **BOTH), tokens),
}  # fmt: skip

FAMILIES = DECODERS | MIXTURES | ENCODERS | TRANSLATORS
