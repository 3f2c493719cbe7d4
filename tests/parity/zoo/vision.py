"""Vision and speech models of transformers: images, sound, and images with text."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import transformers
from torch import nn

from tests.helpers.jobs import Batch
from tests.parity.zoo.entries import (
    CHANNELS,
    FFN,
    HEADS,
    HIDDEN,
    IMAGE,
    N_CLASSES,
    N_LAYERS,
    PATCH,
    ROWS,
    SEQUENCE,
    Entry,
    config,
    draw,
    ids,
    images,
    padded,
    pixels,
    unevenly,
)
from tests.parity.zoo.text import BOTH, COMMON

N_MELS = 8
BATCH_STATISTICS = "batch norm takes its statistics over all rows"

PATCHES: dict[str, Any] = {
    "hidden_size": HIDDEN, "intermediate_size": FFN, "num_hidden_layers": N_LAYERS,
    "num_attention_heads": HEADS, "image_size": IMAGE, "patch_size": PATCH,
}  # fmt: skip


def classifier(kind: str, **values: Any) -> nn.Module:
    found = config(kind, num_channels=CHANNELS, num_labels=N_CLASSES, **values)
    model: nn.Module = transformers.AutoModelForImageClassification.from_config(found)
    return model


def whisper() -> nn.Module:
    sizes = {"max_source_positions": SEQUENCE, "max_target_positions": SEQUENCE}
    found = config("whisper", num_mel_bins=N_MELS, **sizes, **BOTH)
    return transformers.WhisperForConditionalGeneration(found)


def speech(seed: int) -> Batch:
    """Twice as many frames as positions: the second convolution has stride 2."""
    frames = torch.randn(ROWS, N_MELS, 2 * SEQUENCE, generator=draw(seed))
    return {"input_features": frames, "labels": unevenly(ids(seed), seed)}


def clip() -> nn.Module:
    halves = {"text_config": COMMON | {"projection_dim": HIDDEN},
              "vision_config": PATCHES | {"projection_dim": HIDDEN}}  # fmt: skip
    return transformers.CLIPModel(config("clip", projection_dim=HIDDEN, **halves))


def captions(seed: int) -> Batch:
    return padded(seed) | {"pixel_values": pixels(seed), "return_loss": True}


FAMILIES = {
    "vit": Entry(partial(classifier, "vit", **PATCHES), images),
    "resnet": Entry(
        partial(
            classifier, "resnet", embedding_size=8, hidden_sizes=[16, 32], depths=[1, 1],
            layer_type="basic",
        ),
        images, microbatches=1, why=BATCH_STATISTICS,
    ),
    "convnext": Entry(
        partial(
            classifier, "convnext", hidden_sizes=[64, 128], depths=[1, 1], num_stages=2,
            patch_size=PATCH,
        ),
        images,
    ),
    "swin": Entry(
        partial(
            classifier, "swin", image_size=IMAGE, patch_size=PATCH, embed_dim=64, depths=[2, 1],
            num_heads=[4, 4], window_size=2,
        ),
        images,
    ),
    "whisper": Entry(whisper, speech),
    "clip": Entry(
        clip, captions, microbatches=1, why="the contrastive loss compares every pair of rows"
    ),
}  # fmt: skip
