"""Small models of several families, each with repeated blocks."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForSeq2SeqLM,
)

from autopar.passes.analysis import Analysis, Folded, find_runs, fold
from tests.helpers.captures import captured
from tests.helpers.harness import random_tokens, tiny_gpt2, tiny_llama

N_BLOCKS = 5


def tiny_mixtral(n_layers: int) -> nn.Module:
    """With the load-balancing loss, which reads every block's router."""
    config = AutoConfig.for_model(
        "mixtral", num_hidden_layers=n_layers, hidden_size=32, intermediate_size=64,
        num_attention_heads=4, num_key_value_heads=2, vocab_size=32, num_local_experts=4,
        output_router_logits=True,
    )  # fmt: skip
    model: nn.Module = AutoModelForCausalLM.from_config(config)
    return model


def tiny_t5(n_layers: int) -> nn.Module:
    """Every block masks the same tensors, in a group that begins outside all blocks."""
    config = AutoConfig.for_model(
        "t5", num_layers=n_layers, num_decoder_layers=n_layers, d_model=32, d_ff=64, d_kv=8,
        num_heads=4, vocab_size=32, dropout_rate=0.0, decoder_start_token_id=0,
    )  # fmt: skip
    model: nn.Module = AutoModelForSeq2SeqLM.from_config(config)
    return model


def tiny_resnet() -> nn.Module:
    config = AutoConfig.for_model(
        "resnet", embedding_size=16, hidden_sizes=[16], depths=[N_BLOCKS], layer_type="basic",
        num_labels=4,
    )  # fmt: skip
    model: nn.Module = AutoModelForImageClassification.from_config(config)
    return model


FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "gpt2": lambda: tiny_gpt2(N_BLOCKS),
    "llama": lambda: tiny_llama(N_BLOCKS),
    "t5": lambda: tiny_t5(N_BLOCKS),
    "resnet": tiny_resnet,
    "frozen resnet": lambda: tiny_resnet().eval(),
    "mixtral": lambda: tiny_mixtral(N_BLOCKS),
}


def batch_of(family: str) -> dict[str, Tensor]:
    if "resnet" not in family:
        return random_tokens(0)
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(16, 3, 8, 8, dtype=torch.float64, generator=generator)
    return {"pixel_values": images, "labels": torch.arange(16) % 4}


@cache
def folded(family: str) -> Folded:
    torch.manual_seed(0)
    program = captured(FAMILIES[family](), batch_of(family), precision="fp64")
    analysis = Analysis.of(program)
    return fold(analysis, find_runs(analysis))
