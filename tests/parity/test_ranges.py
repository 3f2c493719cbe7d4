"""Windows and packed documents: whole models whose masks become ranges of keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM, MistralConfig, MistralForCausalLM

from autopar.capture import capture
from autopar.capture.attention import ranges
from autopar.operators import ATTENTION_RANGES
from autopar.passes.analysis import Analysis
from autopar.passes.intra import Constraints, PlacementRequest, choose
from tests.helpers.harness import abstract_cost, generated_code, thread_step
from tests.helpers.nightly import sampled

__all__ = ["generated_code"]

N_TOKENS, VOCABULARY = 64, 64
SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": N_TOKENS,
    "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip


def a_window(n_rows: int) -> tuple[Any, dict[str, Tensor]]:
    """A row sees four keys."""
    return MistralForCausalLM(MistralConfig(sliding_window=4, **SIZES)), {}


def documents(n_rows: int) -> tuple[Any, dict[str, Tensor]]:
    """Three in a row, begun anew by their positions."""
    lengths = [[20, 1, 43], [7, 30, 27]]
    rows = [torch.cat([torch.arange(n) for n in lengths[i % 2]]) for i in range(n_rows)]
    config = LlamaForCausalLM.config_class(**SIZES)
    return LlamaForCausalLM(config), {"position_ids": torch.stack(rows)}


MODELS = {"a window": a_window, "documents": documents}
CASES = [
    (name, sizes, n, limits)
    for name in MODELS
    for sizes in ((2,), (2, 2))
    for n in (1, 4)
    for limits in ((), ("tensor",))
]


@pytest.mark.parametrize(
    ("name", "sizes", "n_rows", "forbid"),
    sampled(CASES, [("documents", (2,), 1, ("tensor",))]),
)
def test_a_step_is_that_of_one_process(
    name: str, sizes: tuple[int, ...], n_rows: int, forbid: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """One sequence is sharded by heads or rows, several by sequences, too."""
    monkeypatch.setattr(ranges, "_LARGE_BYTES", N_TOKENS**2)
    torch.manual_seed(0)
    model, given = MODELS[name](n_rows)
    ids = torch.randint(0, VOCABULARY, (n_rows, N_TOKENS))
    batch = {"input_ids": ids, "labels": ids.clone(), **given}
    program = capture(model, batch, precision="fp64")
    found = [n for n in program.graph.nodes if n.target is ATTENTION_RANGES]
    assert [n.args[7] for n in found] == [True, True]
    keys = [program.keys[n.name] for n in found]
    assert [f"layers.{i}." in key for i, key in enumerate(keys)] == [True, True], keys
    cost, analysis = abstract_cost(sizes), Analysis.of(program)
    request = PlacementRequest(cost, 1, Constraints(frozenset(forbid)))
    strategy = choose(analysis, request, "adamw", None).strategy
    assert thread_step(analysis, cost, strategy, batch, 0).wrong == {}
