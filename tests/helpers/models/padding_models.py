"""Small models whose vocabulary the ranks do not divide, and batches of theirs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

from autopar.runtime.launch import WorkerPool
from tests.helpers.harness import generated_code  # noqa: F401

VOCABULARY, WIDTH, LENGTH, N_ROWS = 61, 16, 4, 8

TOLERANCE = 1e-10
Pool = Callable[[int], WorkerPool]
Model = Callable[[], nn.Module]


def gpt2() -> nn.Module:
    """The head is tied to the embedding."""
    probabilities = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = AutoConfig.for_model(
        "gpt2", n_layer=1, n_embd=WIDTH, n_head=4, vocab_size=VOCABULARY, n_positions=LENGTH,
        bos_token_id=0, eos_token_id=0, **probabilities,
    )  # fmt: skip
    return seeded(AutoModelForCausalLM, config)


def llama() -> nn.Module:
    """The head is a table of its own."""
    config = AutoConfig.for_model(
        "llama", num_hidden_layers=1, hidden_size=WIDTH, intermediate_size=2 * WIDTH,
        num_attention_heads=4, num_key_value_heads=2, vocab_size=VOCABULARY,
        max_position_embeddings=LENGTH,
    )  # fmt: skip
    return seeded(AutoModelForCausalLM, config)


def bert() -> nn.Module:
    """The tied head has a bias of the vocabulary's size."""
    config = AutoConfig.for_model(
        "bert", num_hidden_layers=1, hidden_size=WIDTH, num_attention_heads=4,
        intermediate_size=2 * WIDTH, vocab_size=VOCABULARY, max_position_embeddings=LENGTH,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return seeded(AutoModelForMaskedLM, config)


class Smoothed(nn.Module):
    """Capped logits with a constant bias, smoothed labels, and another label that is ignored."""

    bias: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH, padding_idx=3)
        self.register_buffer("bias", torch.linspace(-1, 1, VOCABULARY))

    def logits(self, ids: Tensor) -> Tensor:
        scores = torch.einsum("bsh,vh->bsv", self.embed(ids), self.embed.weight)
        return 3 * torch.tanh(scores / 3) + self.bias

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.logits(input_ids)
        rows = logits.view(-1, VOCABULARY), labels.view(-1)
        loss = F.cross_entropy(*rows, ignore_index=5, label_smoothing=0.1)
        return {"loss": loss, "logits": logits}


class Softmax(Smoothed):
    """Reads the probabilities of all classes, in training too."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        found = super().forward(input_ids, labels)
        entropy = found["logits"].softmax(-1).square().sum()
        return {**found, "loss": found["loss"] + 0.1 * entropy}


class SoftmaxWhenEvaluated(Smoothed):
    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        found = super().forward(input_ids, labels)
        return found if self.training else {**found, "logits": found["logits"].softmax(-1)}


def seeded(kind: Any, config: Any) -> nn.Module:
    """The same weights on every process, large enough that logits differ."""
    torch.manual_seed(0)
    model: nn.Module = kind.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape))
    return model


def batch(make: Model, seed: int = 0) -> dict[str, Any]:
    """The last id is among ids and labels; labels are ignored unevenly."""
    ignored = 5 if make in (Smoothed, Softmax, SoftmaxWhenEvaluated) else -100
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCABULARY, (N_ROWS, LENGTH), generator=generator)
    labels = ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.4, ignored)
    ids[0, 0], labels[1], labels[2] = VOCABULARY - 1, ignored, VOCABULARY - 1
    return {"input_ids": ids, "labels": labels}


EMBEDDING = "transformer.wte.weight"
PADDED: dict[Model, dict[str, tuple[int, ...]]] = {
    gpt2: {EMBEDDING: (64, WIDTH)},
    llama: {"model.embed_tokens.weight": (64, WIDTH), "lm_head.weight": (64, WIDTH)},
    bert: {
        "bert.embeddings.word_embeddings.weight": (64, WIDTH),
        "cls.predictions.bias": (64,),
    },
    Smoothed: {"embed.weight": (64, WIDTH)},
}
