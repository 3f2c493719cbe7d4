"""Which dim of each value is the batch, also of values that do not depend on an input.

Such a value has rows if its readers need rows. So T5 (position biases from a parameter, masks
from constants) and BERT without token types split into microbatches. A value that one operator
needs by rows and another needs whole cannot be split.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, GPT2ForSequenceClassification, T5ForConditionalGeneration

from autopar.capture import capture
from autopar.errors import NotSupportedError
from autopar.passes.analysis import Analysis
from autopar.passes.intra import (
    Constraints,
    PlacementRequest,
    choose,
    recipe_cost,
)
from tests.helpers.harness import (
    BATCH,
    HEADS,
    SEQUENCE,
    VOCABULARY,
    WIDTH,
    abstract_cost,
    generated_code,
    random_rows,
    random_tokens,
    thread_step,
    tiny_gpt2,
    tiny_llama,
)
from tests.helpers.models.sequence_models import packed, padded, tiny_bert, with_types
from tests.helpers.nightly import one_in, sampled

__all__ = ["generated_code"]

MEGATRON = Constraints(frozenset({"sequence"}), ("data", "tensor"), 0)
DECODER_SEQUENCE = 6  # differs from the encoder's, so that a mix-up shows


def tiny_t5(n_layers: int = 1) -> nn.Module:
    """Later blocks read the position bias of the first."""
    config = AutoConfig.for_model(
        "t5", num_layers=n_layers, d_model=WIDTH, d_kv=WIDTH // HEADS, d_ff=2 * WIDTH,
        num_heads=HEADS, vocab_size=VOCABULARY, relative_attention_num_buckets=8,
        relative_attention_max_distance=16, dropout_rate=0.0,
        decoder_start_token_id=0,
    )  # fmt: skip
    return T5ForConditionalGeneration(config)


def sequences(seed: int) -> dict[str, Tensor]:
    """Inputs of a translation model; rows differ in how many labels are ignored."""
    generator = torch.Generator().manual_seed(seed)
    shape = (BATCH, DECODER_SEQUENCE)
    decoder_ids = torch.randint(0, VOCABULARY, shape, generator=generator)
    labels = decoder_ids.masked_fill(torch.rand(shape, generator=generator) < 0.4, -100)
    ids = random_tokens(seed)["input_ids"]
    return {"input_ids": ids, "decoder_input_ids": decoder_ids, "labels": labels}


def only_labels(seed: int) -> dict[str, Tensor]:
    """T5 makes the decoder's tokens itself: the labels, shifted, with ignored ones replaced."""
    batch = sequences(seed)
    del batch["decoder_input_ids"]
    return batch | {"attention_mask": (batch["input_ids"] < VOCABULARY // 2).long()}


class Made(nn.Module):
    """A linear layer, parameters of several shapes, and whatever `body` adds."""

    def __init__(self, body: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.table = nn.Embedding(3, WIDTH)
        self.rows = nn.Parameter(torch.randn(BATCH, 1, WIDTH))
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, self.linear(x)).pow(2).mean()


def tiny_classifier() -> nn.Module:
    """Reads every sequence at its last token that is not padding."""
    config = AutoConfig.for_model(
        "gpt2", n_layer=1, n_embd=WIDTH, n_head=HEADS, vocab_size=VOCABULARY, n_positions=SEQUENCE,
        resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, num_labels=4, pad_token_id=0, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    return GPT2ForSequenceClassification(config)


def labelled_sequences(seed: int) -> dict[str, Tensor]:
    """Sequences of different lengths, and their classes."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCABULARY, (BATCH, SEQUENCE), generator=generator)
    lengths = torch.randint(1, SEQUENCE + 1, (BATCH, 1), generator=generator)
    labels = torch.randint(0, 4, (BATCH,), generator=generator)
    return {"input_ids": ids.where(torch.arange(SEQUENCE) < lengths, 0), "labels": labels}


def row_ids() -> Tensor:
    """A different number in every row, so that a wrong order of rows shows."""
    return torch.arange(BATCH, dtype=torch.float64)


def looked_up(m: Any, n_distinct: int = 3) -> Tensor:
    rows: Tensor = m.table(row_ids().long() % n_distinct)[:, None]
    return rows


BODIES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "class token": lambda m, x: torch.cat([m.token.expand(BATCH, -1, -1), x], 1),
    "constant rows": lambda m, x: x * row_ids()[:, None, None],
    "chain": lambda m, x: x + torch.tanh(looked_up(m) * 2),
    "chain that ends in a sum": lambda m, x: x + looked_up(m).expand(2, -1, -1, -1).sum(0),
    "two readers": lambda m, x: (x + (rows := looked_up(m))) * torch.cos(rows),
    "two constants, one whole": lambda m, x: (x + looked_up(m)) * looked_up(m, 2).amax(0),
    "tokens of every row": lambda m, x: x[
        torch.arange(BATCH)[:, None], x[..., 0].argsort(1)[:, :2] - SEQUENCE // 2
    ],
    "bias of batch one": lambda m, x: torch.where(row_ids()[:, None, None] > 4, m.token, x),
}


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[int], dict[str, Tensor]]]] = {
    "bert": (tiny_bert, random_tokens),
    "bert, types": (tiny_bert, with_types),
    "gpt2, padded": (tiny_gpt2, padded),
    "llama, packed": (tiny_llama, packed),
    "t5": (lambda: tiny_t5(n_layers=2), sequences),
    "t5-labels": (tiny_t5, only_labels),
    "gpt2-classifier": (tiny_classifier, labelled_sequences),
    **{
        name: (partial(Made, body), lambda seed: random_rows(seed, "x"))
        for name, body in BODIES.items()
    },
}


@cache
def analysis(name: str) -> Analysis:
    torch.manual_seed(0)
    make_model, batch = CASES[name]
    return Analysis.of(capture(make_model(), batch(0), precision="fp64"))


@one_in(3)
@pytest.mark.parametrize("name", CASES)
def test_the_batch_reaches_the_loss(name: str) -> None:
    found = analysis(name)
    assert found.batch.broken_at is None
    assert set(found.program.inputs) <= set(found.batch.cells)
    for value, (dim, factor) in found.batch.cells.items():
        assert found.types.tensors[value].dims[dim][factor] == BATCH


PLANNED = [(name, how) for name in CASES if name not in BODIES for how in ("auto", "megatron")]


@pytest.mark.parametrize(
    ("name", "how"), sampled(PLANNED, [("bert, types", "auto"), ("t5-labels", "megatron")])
)
def test_parity_of_the_best_plan(name: str, how: str) -> None:
    """Megatron's splits rows, sequences and tensors."""
    found, cost = analysis(name), abstract_cost((2, 2))
    request = PlacementRequest(cost, 4, Constraints())
    if how == "megatron":
        request = PlacementRequest(recipe_cost(cost), 4, MEGATRON)
    chosen = choose(found, request, "adamw", None)
    step = thread_step(found, cost, chosen.strategy, CASES[name][1](3), 3)
    assert step.wrong == {}


WHOLE: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "a parameter with rows": lambda m, x: x + m.rows,
    "computed from a parameter with rows": lambda m, x: x + torch.tanh(m.rows),
    "by rows, then whole": lambda m, x: (x + (rows := looked_up(m))) * rows.amax(0),
    "whole, then by rows": lambda m, x: x * (rows := looked_up(m)).amax(0) + rows,
    "by rows and summed": lambda m, x: (x + (rows := looked_up(m))) * rows.sum(0),
}  # fmt: skip


@pytest.mark.parametrize("name", WHOLE)
def test_what_must_stay_whole_breaks_the_batch(name: str) -> None:
    program = capture(Made(WHOLE[name]), random_rows(0, "x"), precision="fp64")
    found = Analysis.of(program)
    assert found.batch.broken_at is not None
    with pytest.raises(NotSupportedError, match="not a sum or mean over rows"):
        found.microbatch_types(2)


def test_rows_of_inputs_that_never_meet_are_dealt_alike() -> None:
    """A rank must hold the same rows of both, although the model groups the rows of only one."""

    class Apart(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            grouped = self.layer(x).view(2, BATCH // 2, WIDTH)
            return grouped.pow(2).mean() + self.layer(y).pow(2).mean()

    program = capture(Apart(), random_rows(0, "x", "y"), precision="fp64")
    tensors = Analysis.of(program).types.tensors
    assert {tensors[name].dims[0] for name in program.inputs} == {(2, BATCH // 2)}
