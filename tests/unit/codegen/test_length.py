"""The file of a stage is short enough to be read, whatever is sharded, gathered and recomputed."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import autopar
from autopar import Manual, Mesh
from tests.helpers.nightly import nightly

MOST_LINES = 600
LAYOUTS = {
    "tensor": Manual(dp=2, tp=8, sp=True),
    "tensor, recompute": Manual(dp=2, tp=8, sp=True, recompute="full"),
    "ZeRO-3 over dp": Manual(dp=2, tp=8, sp=True, zero=3),
    "ZeRO-3 over all": Manual(dp=16, zero=3),
    "ZeRO-3 over all, recompute": Manual(dp=16, zero=3, recompute="full"),
}


def llama_70b(n_layers: int) -> nn.Module:
    """Llama 3 70B (Grattafiori et al., "The Llama 3 Herd of Models", 2024, table 3)."""
    config = AutoConfig.for_model(
        "llama", num_hidden_layers=n_layers, hidden_size=8192, intermediate_size=28672,
        num_attention_heads=64, num_key_value_heads=8, vocab_size=128256,
        max_position_embeddings=4096,
    )  # fmt: skip
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(config)
    return model.to(torch.bfloat16)


def n_lines(layout: str, n_layers: int) -> int:
    ids = torch.empty(16, 4096, dtype=torch.int64, device="meta")
    plan = autopar.plan(
        llama_70b(n_layers), Mesh((2, 8), hardware="h100-sxm"),
        {"input_ids": ids, "labels": ids}, manual=LAYOUTS[layout], memory_limit=1e15,
    )  # fmt: skip
    (text,) = plan.code().values()
    return text.count("\n")


@nightly
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_stage_is_short(layout: str) -> None:
    for n_layers in (5, 80):
        assert n_lines(layout, n_layers) <= MOST_LINES
