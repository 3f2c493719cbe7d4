"""Batches as users of transformers pass them, with masks, positions and types; BERT reads all."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import AutoConfig, BertForMaskedLM

from tests.helpers.harness import BATCH, HEADS, SEQUENCE, VOCABULARY, WIDTH, random_tokens


def tiny_bert() -> nn.Module:
    """Bidirectional attention, so that the padding mask matters to every query."""
    config = AutoConfig.for_model(
        "bert", num_hidden_layers=1, hidden_size=WIDTH, intermediate_size=2 * WIDTH,
        num_attention_heads=HEADS, vocab_size=VOCABULARY, max_position_embeddings=SEQUENCE,
        hidden_dropout_prob=0, attention_probs_dropout_prob=0,
    )  # fmt: skip
    return BertForMaskedLM(config)


def padded(seed: int) -> dict[str, Tensor]:
    """Rows of 1 to SEQUENCE tokens, padded on the right; labels of padding are ignored."""
    generator = torch.Generator().manual_seed(seed)
    batch = random_tokens(seed)
    lengths = torch.randint(1, SEQUENCE + 1, (BATCH, 1), generator=generator)
    mask = (torch.arange(SEQUENCE) < lengths).long()
    labels = batch["labels"].masked_fill(mask == 0, -100)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    return batch | {"labels": labels, "attention_mask": mask, "position_ids": positions}


def with_types(seed: int) -> dict[str, Tensor]:
    """Without token types BERT makes them itself, once for all rows."""
    batch = padded(seed)
    return batch | {"token_type_ids": (batch["input_ids"] > VOCABULARY // 2).long()}


def packed(seed: int) -> dict[str, Tensor]:
    """Two sequences per row: positions restart in the middle, and there is no mask."""
    positions = (torch.arange(SEQUENCE) % (SEQUENCE // 2)).repeat(BATCH, 1)
    return random_tokens(seed) | {"position_ids": positions}
