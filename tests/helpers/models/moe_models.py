"""Small mixtures of experts of one layer, whose sizes divide over four ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from tests.helpers.harness import HEADS, SEQUENCE, VOCABULARY, WIDTH

N_EXPERTS = 4
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 8,
    "moe_intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS // 2, "max_position_embeddings": SEQUENCE,
    "num_experts_per_tok": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
# Low-rank queries, keys and values; sigmoids choose the experts, of groups of them.
LATENT: dict[str, Any] = {
    "num_key_value_heads": HEADS, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4, "v_head_dim": 4, "n_group": 2, "topk_group": 1,
    "first_k_dense_replace": 0, "n_routed_experts": N_EXPERTS, "n_shared_experts": 1,
}  # fmt: skip
FAMILIES: Mapping[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": N_EXPERTS},
    "qwen2_moe": {"num_experts": N_EXPERTS, "shared_expert_intermediate_size": 8},
    "qwen3_moe": {"num_experts": N_EXPERTS, "head_dim": 4, "norm_topk_prob": True},
    "olmoe": {"num_experts": N_EXPERTS},
    "deepseek_v3": LATENT,
    "gpt_oss": {
        "num_local_experts": N_EXPERTS, "head_dim": 4, "layer_types": ["full_attention"],
        "rope_scaling": None,
    },
}  # fmt: skip


def moe_model(family: str, **changes: Any) -> nn.Module:
    config = AutoConfig.for_model(family, **{**COMMON, **FAMILIES[family], **changes})
    model: nn.Module = AutoModelForCausalLM.from_config(config)
    return model
