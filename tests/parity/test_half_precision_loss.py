"""A bfloat16 model's loss on one process: eager's bit by bit, and the sum of parts in float32."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.capture import capture, reference_step
from tests.helpers.jobs import gpt2, llama
from tests.helpers.nightly import one_in, sampled

VOCABULARY, WIDTH, SEQUENCE = 320, 64, 16


class Biased(nn.Module):
    """A language model by hand: linear layers with biases, and a loss of bfloat16 logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(input_ids)
        x = x + self.down(F.gelu(self.up(x)))
        logits = 8 * self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


def _by_rows(outputs: Any, batch: Mapping[str, Any]) -> Tensor:
    return F.cross_entropy(outputs.logits.flatten(0, 1), batch["labels"].flatten())


N_SEEDS = 3


def _batch(seed: int, vocabulary: int, length: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocabulary, (16, length), generator=generator)
    labels = ids.roll(-1, 1).masked_fill(torch.rand(ids.shape, generator=generator) < 0.2, -100)
    return {"input_ids": ids, "labels": labels}


MODELS = {
    "by hand": (Biased, None, VOCABULARY, SEQUENCE),
    "gpt2": (lambda: gpt2(2), None, 32, 8),
    "gpt2, bfloat16 logits": (lambda: gpt2(2), _by_rows, 32, 8),
    "llama, bfloat16 logits": (lambda: llama(2), _by_rows, 32, 8),
}


def _made(name: str, seed: int) -> tuple[nn.Module, Any, dict[str, Any], Tensor]:
    make, loss_fn, vocabulary, length = MODELS[name]
    torch.manual_seed(seed)
    model, batch = make().bfloat16(), _batch(seed, vocabulary, length)
    if loss_fn is not None:
        return model, loss_fn, batch, loss_fn(model(input_ids=batch["input_ids"]), batch)
    outputs = model(**batch)
    return model, None, batch, outputs[0] if isinstance(outputs, tuple) else outputs.loss


@one_in(4)
@pytest.mark.parametrize(
    ("name", "seed"),
    sampled([(n, s) for n in MODELS for s in range(N_SEEDS)], [(n, 0) for n in MODELS]),
)
def test_the_captured_program_and_a_step_give_eagers_bits(name: str, seed: int) -> None:
    model, loss_fn, batch, eager = _made(name, seed)
    program = capture(model, batch, loss_fn=loss_fn)
    captured, outputs = reference_step(program, dict(model.named_parameters()), batch)
    module = autopar.parallelize(model, (1, 1), batch, loss_fn=loss_fn, microbatches=1)
    loss = module.step(**batch)
    assert captured is not None and captured.dtype == loss.dtype == eager.dtype
    assert torch.equal(captured, eager) and torch.equal(loss, eager)
    if loss_fn is None and isinstance(outputs, tuple):
        assert torch.equal(outputs[1], model(**batch)[1])


@pytest.mark.parametrize(
    ("name", "n"),
    sampled(
        [(name, n) for name in ("by hand", "gpt2, bfloat16 logits") for n in (4, 16)],
        [("by hand", 16), ("gpt2, bfloat16 logits", 4)],
    ),
)
def test_microbatches_add_up_in_float32(name: str, n: int) -> None:
    """The sum of the parts' losses, each as torch rounds it, rounds once."""
    model, loss_fn, batch, _ = _made(name, 0)
    module = autopar.parallelize(model, (1, 1), batch, loss_fn=loss_fn, microbatches=n)
    count = (batch["labels"] != -100).sum().to(torch.bfloat16)
    parts = []
    for i in range(n):
        rows = {k: v.chunk(n)[i] for k, v in batch.items()}
        out = model(**rows) if loss_fn is None else model(input_ids=rows["input_ids"])
        logits = out[1] if loss_fn is None else out.logits
        total = F.cross_entropy(logits.flatten(0, 1), rows["labels"].flatten(), reduction="sum")
        parts.append((total / count).float())
    loss = module.step(**batch)
    assert loss.dtype == torch.bfloat16
    assert torch.equal(loss, torch.stack(parts).sum().to(torch.bfloat16))
