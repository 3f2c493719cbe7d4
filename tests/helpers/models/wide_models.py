"""Language models as wide as those trained, on meta: they are planned and never run."""

from __future__ import annotations

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM


def wide_gpt2(n_layers: int, width: int, length: int, n_words: int = 50304) -> nn.Module:
    config = AutoConfig.for_model(
        "gpt2", n_layer=n_layers, n_embd=width, n_head=width // 64, vocab_size=n_words,
        n_positions=length, bos_token_id=0, eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0,
    )  # fmt: skip
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(config).bfloat16()
    return model


def wide_llama(n_layers: int = 4, n_words: int = 32000) -> nn.Module:
    """Blocks of Llama 3 8B."""
    config = AutoConfig.for_model(
        "llama", hidden_size=4096, intermediate_size=14336, num_hidden_layers=n_layers,
        num_attention_heads=32, num_key_value_heads=8, vocab_size=n_words,
        max_position_embeddings=4096, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model


def meta_tokens(n_rows: int, length: int) -> dict[str, torch.Tensor]:
    ids = torch.zeros(n_rows, length, dtype=torch.long, device="meta")
    return {"input_ids": ids, "labels": ids}
