"""Masks and positions as inputs, as users of transformers pass them with their tokens.

transformers gathers from them at constant indices. Capture turns these gathers into views, so
that the batch stays sharded and splits into microbatches.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, BertForMaskedLM

from autopar.capture import capture, reference_step
from autopar.capture.rewrites import gathers
from autopar.passes.analysis import Analysis
from autopar.passes.intra import Constraints, PlacementRequest, choose, recipe_cost
from autopar.program import Program
from autopar.rules import has_rule
from tests.helpers.capture_harness import assert_same, eager, run
from tests.helpers.harness import (
    BATCH,
    HEADS,
    SEQUENCE,
    VOCABULARY,
    WIDTH,
    abstract_cost,
    generated_code,
    random_tokens,
    thread_step,
    tiny_gpt2,
    tiny_llama,
)

__all__ = ["generated_code"]

aten = torch.ops.aten
MEGATRON = Constraints(frozenset({"sequence"}), ("data", "tensor"), 0)
N_MICROBATCHES = 2


def tiny_bert() -> nn.Module:
    """Bidirectional attention, so that the padding mask matters to every query."""
    return BertForMaskedLM(
        AutoConfig.for_model(
            "bert", num_hidden_layers=1, hidden_size=WIDTH, intermediate_size=2 * WIDTH,
            num_attention_heads=HEADS, vocab_size=VOCABULARY, max_position_embeddings=SEQUENCE,
            hidden_dropout_prob=0, attention_probs_dropout_prob=0,
        )
    )  # fmt: skip


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": tiny_gpt2,
    "llama": tiny_llama,
    "bert": tiny_bert,
}


def padded(seed: int) -> dict[str, Tensor]:
    """Rows of 1 to SEQUENCE tokens, padded on the right; labels of padding are ignored."""
    generator = torch.Generator().manual_seed(seed)
    batch = random_tokens(seed)
    lengths = torch.randint(1, SEQUENCE + 1, (BATCH, 1), generator=generator)
    mask = (torch.arange(SEQUENCE) < lengths).long()
    labels = batch["labels"].masked_fill(mask == 0, -100)
    return {"input_ids": batch["input_ids"], "labels": labels, "attention_mask": mask}


def all_ones(seed: int) -> dict[str, Tensor]:
    batch = random_tokens(seed)
    return batch | {"attention_mask": torch.ones_like(batch["input_ids"])}


def with_positions(seed: int) -> dict[str, Tensor]:
    batch = padded(seed)
    return batch | {"position_ids": (batch["attention_mask"].cumsum(-1) - 1).clamp(min=0)}


def with_types(seed: int) -> dict[str, Tensor]:
    batch = padded(seed)
    return batch | {"token_type_ids": (batch["input_ids"] > VOCABULARY // 2).long()}


def packed(seed: int) -> dict[str, Tensor]:
    """Two sequences per row: positions restart in the middle, and there is no mask."""
    positions = (torch.arange(SEQUENCE) % (SEQUENCE // 2)).repeat(BATCH, 1)
    return random_tokens(seed) | {"position_ids": positions}


BATCHES: dict[str, Callable[[int], dict[str, Tensor]]] = {
    "all ones": all_ones,
    "padded": padded,
    "positions": with_positions,
    "types": with_types,
    "packed": packed,
}
CASES = [
    (model, inputs)
    for model in MODELS
    for inputs in BATCHES
    if (model, inputs) != ("llama", "types")  # Llama has no token types
]
# BERT is given token types; without them it makes them itself, once for all rows.
PLANNED = [("gpt2", "padded"), ("llama", "padded"), ("bert", "types")]


@pytest.mark.parametrize(("model", "inputs"), CASES)
def test_captured_equals_eager_and_every_operator_has_a_rule(model: str, inputs: str) -> None:
    torch.manual_seed(0)
    module, batch = MODELS[model](), BATCHES[inputs](0)
    program = capture(module, batch)
    assert [str(n.target) for n in program.operators if not has_rule(str(n.target))] == []
    loss, outputs, gradients = run(program, module, batch)
    want_loss, want_outputs, want_gradients = eager(without_cache(module), batch)
    assert_same((loss, gradients), (want_loss, want_gradients), 1e-6)
    torch.testing.assert_close(outputs["logits"], want_outputs["logits"], rtol=0, atol=1e-6)


def without_cache(module: nn.Module) -> nn.Module:
    """As in capture: with a cache, transformers does not look for packed sequences."""
    config: Any = module.config
    config.use_cache = False
    return module


@cache
def analysis(model: str, inputs: str) -> Analysis:
    torch.manual_seed(0)
    return Analysis.of(capture(MODELS[model](), BATCHES[inputs](0), precision="fp64"))


def check_plan(model: str, inputs: str, constraints: Constraints) -> None:
    """Check that a plan on 2 x 2 ranks splits every input by rows and is right to 1e-10."""
    found, cost = analysis(model, inputs), abstract_cost((2, 2))
    assert found.batch.broken_at is None
    assert set(found.program.inputs) <= set(found.batch.cells)
    pricing = recipe_cost(cost) if constraints.roles else cost
    strategy = choose(
        found, PlacementRequest(pricing, N_MICROBATCHES, constraints), "adamw", None
    ).strategy
    step = thread_step(found, cost, strategy, BATCHES[inputs](3), 3)
    assert step.wrong == {}


@pytest.mark.parametrize("constraints", [Constraints(), MEGATRON], ids=["auto", "megatron"])
@pytest.mark.parametrize(("model", "inputs"), PLANNED)
def test_padded_parity(model: str, inputs: str, constraints: Constraints) -> None:
    check_plan(model, inputs, constraints)


@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_packed_parity(model: str) -> None:
    check_plan(model, "packed", MEGATRON)


class Gather(nn.Module):
    """A weighted sum of what `gather` takes from the input [4, 3, 5]."""

    def __init__(self, gather: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
        self.register_buffer("rows", torch.arange(4))
        self.gather = gather

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        taken = self.gather(x * self.weight)
        places = torch.arange(taken.numel(), dtype=torch.float64).view(taken.shape)
        return (taken * places).sum(), taken


def captured(gather: Callable[[Tensor], Tensor]) -> list[Any]:
    """Check the captured gather against eager; returns its operators that move elements."""
    module, x = Gather(gather), torch.randn(4, 3, 5, dtype=torch.float64)
    program = capture(module, (x,))
    want_loss, want = module(x)
    loss, (_, taken) = reference_step(program, dict(module.named_parameters()), {"0": x})
    assert loss is not None
    assert torch.equal(taken, want)
    (gradient,) = torch.autograd.grad(loss, module.weight)
    (want_gradient,) = torch.autograd.grad(want_loss, module.weight)
    torch.testing.assert_close(gradient, want_gradient, rtol=1e-12, atol=0)
    return moving(program)


def moving(program: Program) -> list[Any]:
    kinds = (aten.index.Tensor, aten.permute.default, aten.reshape.default)
    return [n.target for n in program.operators if n.target in kinds]


def rows(*shape: int) -> Tensor:
    return torch.arange(4).view(shape)


def columns(*shape: int) -> Tensor:
    return torch.arange(3).view(shape)


def layers(*shape: int) -> Tensor:
    return torch.arange(5).view(shape)


INDEX, PERMUTE, RESHAPE = aten.index.Tensor, aten.permute.default, aten.reshape.default
VIEWS: dict[str, tuple[Callable[[Tensor], Tensor], list[Any]]] = {
    "one dim": (lambda x: x[rows(4)], []),
    "in order": (lambda x: x[rows(4, 1), columns(1, 3)], []),
    "a dim between": (lambda x: x[rows(4, 1, 1), columns(1, 1, 3)], [RESHAPE]),
    "unit dims in front": (lambda x: x[rows(1, 4, 1), columns(3)], [RESHAPE]),
    "transposed": (lambda x: x[rows(4), columns(3, 1)], [PERMUTE]),
    "all dims": (lambda x: x[rows(4), columns(3, 1), layers(5, 1, 1)], [PERMUTE]),
    "later dims": (lambda x: x[:, columns(3), layers(5, 1)], [PERMUTE]),
    "a later dim alone": (lambda x: x[:, :, layers(1, 5, 1)], [RESHAPE]),
    "apart, so in front": (lambda x: x[rows(4, 1), :, layers(5)], [PERMUTE]),
    "of size 1": (lambda x: x[:, :1][:, torch.zeros(1, dtype=torch.int64)], []),
    "of size 1, both": (
        lambda x: x[:1, :1][torch.zeros(1, dtype=torch.int64), torch.zeros(2, 1).long()[:1]],
        [],
    ),
}


@pytest.mark.parametrize("case", VIEWS)
def test_a_gather_that_only_moves_dims_is_a_view(case: str) -> None:
    gather, expected = VIEWS[case]
    assert captured(gather) == expected


def order(x: Tensor) -> Tensor:
    return x[..., 0].argsort(1)


GATHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "reversed": lambda x: x[3 - rows(4)],
    "a part": lambda x: x[torch.arange(3)],
    "repeated": lambda x: x[rows(4, 1).expand(4, 2)],
    "negative": lambda x: x[rows(4) - 4],
    "rows in another order": lambda x: x[3 - rows(4), order(x)[:, 0]],
    "rows along another dim": lambda x: x[rows(4), order(x)[:, :1]],
    "a part of the rows": lambda x: x[columns(3), order(x)[:3, 0]],
    "of every row, and later": lambda x: x[rows(4), order(x)[:, 0], order(x)[:, 1]],
    "from the data": lambda x: x[x[:, 0, 0].argsort()],
}


@pytest.mark.parametrize("case", GATHERS)
def test_a_gather_that_does_more_stays(case: str) -> None:
    assert INDEX in captured(GATHERS[case])


OF_EVERY_ROW: dict[str, Callable[[Tensor], Tensor]] = {
    "one place": lambda x: x[rows(4), order(x)[:, 0]],
    "counted from the end": lambda x: x[rows(4), order(x)[:, 0] - 2],
    "in 32 bits": lambda x: x[rows(4).int(), order(x)[:, 0].int()],
    "some places": lambda x: x[rows(4, 1), order(x)[:, :2]],
    "a place twice": lambda x: x[rows(4, 1), order(x)[:, :1].expand(4, 2)],
    "a block of places": lambda x: x[rows(4, 1, 1), order(x).view(4, 1, 3) - 1],
    "the same in all rows": lambda x: x[rows(4, 1), order(x)[0, :2]],
    "of numbers": lambda x: x[..., 0][rows(4), order(x)[:, 0]],
    "a diagonal": lambda x: x[:3][columns(3), columns(3)],
}


@pytest.mark.parametrize("case", OF_EVERY_ROW)
def test_a_gather_of_every_row_at_its_own_places_keeps_the_rows_apart(case: str) -> None:
    assert INDEX not in captured(OF_EVERY_ROW[case])


def test_a_gather_at_a_buffers_places_stays() -> None:
    """A buffer may have other values when the program runs."""
    module = Gather(lambda x: x[module.get_buffer("rows")])
    x = torch.randn(4, 3, 5, dtype=torch.float64)
    assert moving(capture(module, (x,))) == [INDEX]


def test_a_large_gather_is_not_looked_into(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathers, "MAX_ELEMENTS", 7)
    assert captured(lambda x: x[:, columns(3), layers(5, 1)]) == [INDEX]
    monkeypatch.setattr(gathers, "MAX_ELEMENTS", 8)
    assert captured(lambda x: x[:, columns(3), layers(5, 1)]) == [PERMUTE]
