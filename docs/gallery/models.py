"""The models of the gallery: sizes of their authors, on `meta`, and a machine for each.

Sizes of the larger ones are those of `examples/bench_plan.py`, with their sources. GPT-2 XL:
Radford et al., "Language Models are Unsupervised Multitask Learners", 2019, table 2. ResNet-50: He
et al., CVPR 2016, table 1. T5-3B: Raffel et al., JMLR 2020, section 3.7. ViT-L/16: Dosovitskiy et
al., ICLR 2021, table 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
    ResNetForImageClassification,
    ViTForImageClassification,
)

from examples.bench_plan import (
    LLAMA_3_70B,
    Captured,
    causal,
    llama,
    mixtral,
    of_tokens,
)
from examples.joint_plan import LLAMA_3_8B


@dataclass(frozen=True)
class Piece:
    """A model of the gallery, the machine that it is planned for, and the options."""

    title: str
    about: str
    make: Callable[[], Captured]
    mesh: tuple[int, int]
    hardware: str
    options: Mapping[str, Any] = field(default_factory=dict)


def gpt2_xl() -> Captured:
    return causal(
        "gpt2", 64, 1024, torch.float32, n_layer=48, n_embd=1600, n_head=25, n_positions=1024
    )


def t5_3b() -> Captured:
    config = AutoConfig.for_model(
        "t5", d_model=1024, d_ff=16384, num_layers=24, num_decoder_layers=24, num_heads=32,
        d_kv=128, vocab_size=32128, use_cache=False, decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    model = AutoModelForSeq2SeqLM.from_config(config, dtype=torch.bfloat16)
    return model, of_tokens(128, 512), None


def vit_large() -> Captured:
    config = AutoConfig.for_model(
        "vit", hidden_size=1024, intermediate_size=4096, num_hidden_layers=24,
        num_attention_heads=16, image_size=224, patch_size=16, num_labels=1000,
    )  # fmt: skip
    return ViTForImageClassification(config), of_images(1024), None


def of_images(batch: int) -> dict[str, Any]:
    images = torch.empty(batch, 3, 224, 224, device="meta")
    return {"pixel_values": images, "labels": torch.empty(batch, dtype=torch.int64, device="meta")}


def resnet_50() -> Captured:
    model = ResNetForImageClassification(AutoConfig.for_model("resnet", num_labels=1000))
    return model, of_images(1024), None


PIECES = {
    "gpt2": Piece(
        "GPT-2 XL", "1.5 billion parameters, 64 sequences of 1,024 tokens, in bf16-mixed",
        gpt2_xl, (1, 8), "a100-40gb", {"precision": "bf16-mixed"},
    ),
    "llama-3-8b": Piece(
        "Llama-3-8B", "128 sequences of 4,096 tokens, a bfloat16 model",
        lambda: llama(LLAMA_3_8B, 128), (2, 8), "h100-sxm",
    ),
    "llama-3-70b": Piece(
        "Llama-3-70B", "512 sequences of 4,096 tokens, a bfloat16 model",
        lambda: llama(LLAMA_3_70B, 512), (16, 8), "a100-80gb",
    ),
    "mixtral": Piece(
        "Mixtral 8x7B", "256 sequences of 4,096 tokens, a bfloat16 model of 8 experts a layer",
        mixtral, (8, 8), "a100-80gb",
    ),
    "t5": Piece(
        "T5-3B", "128 pairs of 512 tokens, a bfloat16 encoder and decoder",
        t5_3b, (1, 8), "a100-40gb",
    ),
    "vit": Piece(
        "ViT-L/16", "1,024 images of 224 x 224, in bf16-mixed",
        vit_large, (1, 8), "a100-40gb", {"precision": "bf16-mixed"},
    ),
    "resnet": Piece(
        "ResNet-50", "a convolution net in float32, 1,024 images of 224 x 224, batch norm over the "
        "whole batch", resnet_50, (1, 8), "v100-32gb",
    ),
}  # fmt: skip
