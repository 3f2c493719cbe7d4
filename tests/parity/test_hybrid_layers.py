"""Layers of a gated delta rule beside attention, with experts: plain PyTorch, captured as it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

import autopar
from autopar import Manual
from tests.helpers.nightly import nightly

N_TOKENS, VOCABULARY = 64, 64
SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2,
    "vocab_size": VOCABULARY, "max_position_embeddings": N_TOKENS, "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {
    "tp": {"manual": Manual(tp=2)},
    "zero-3": {"manual": Manual(dp=2, zero=3)},
    "ep": {"manual": Manual(dp=2, ep=2)},
    "rows whole": {"forbid": {"data"}},
}


@nightly
@pytest.mark.parametrize("name", OPTIONS)
def test_a_step_is_that_of_one_process(name: str) -> None:
    torch.manual_seed(0)
    model = Qwen3NextForCausalLM(Qwen3NextConfig(use_cache=False, **SIZES))
    ids = torch.randint(0, VOCABULARY, (4, N_TOKENS))
    batch = {"input_ids": ids, "labels": ids}
    report = autopar.verify(model, (1, 2), batch, precision="fp64", **OPTIONS[name])
    assert report.ok, report.text()
