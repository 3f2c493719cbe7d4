"""One sequence shared by ranks: whole models, with attention round a ring or by rows."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

import autopar
from autopar import Manual, Mesh
from autopar.capture import capture
from autopar.passes.analysis import Analysis
from autopar.passes.intra import Constraints, PlacementRequest, choose
from autopar.passes.lowering import fold_alike, lower
from autopar.program.lines import Boundary, FactorKind
from tests.helpers.harness import abstract_cost, generated_code, thread_step
from tests.helpers.nightly import nightly, sampled
from tests.helpers.plans import bound_of

__all__ = ["generated_code"]

Kinds = tuple[tuple[FactorKind, ...], ...]
N_TOKENS, VOCABULARY, WIDTH = 32, 64, 24


def gpt2(n_tokens: int = N_TOKENS) -> PreTrainedModel:
    """Three heads, which two ranks cannot share, and a table of learned positions."""
    dropout = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
    shape = {"n_layer": 2, "n_head": 3, "n_embd": WIDTH, "n_positions": n_tokens}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, **shape, **dropout, **ends))


def llama(n_tokens: int = N_TOKENS) -> PreTrainedModel:
    """Three heads share one key head, fewer than ranks; rotary positions."""
    shape = {"num_hidden_layers": 2, "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH}
    heads = {"num_attention_heads": 3, "num_key_value_heads": 1}
    ends = {"bos_token_id": 0, "eos_token_id": 0, "max_position_embeddings": n_tokens}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **shape, **heads, **ends))


MODELS = {"gpt2": gpt2, "llama": llama}
CASES = [
    (m, sizes, f) for m in MODELS for sizes in ((2,), (4,), (2, 2)) for f in ("ring", "causal")
]


@pytest.mark.parametrize(
    ("model", "sizes", "function"),
    sampled(CASES, [("gpt2", (4,), "ring"), ("llama", (2,), "causal")]),
)
def test_a_step_on_one_sequence(model: str, sizes: tuple[int, ...], function: str) -> None:
    """Labels are shifted by the model, some are ignored; over one axis shards are head and tail."""
    torch.manual_seed(0)
    ids = torch.randint(0, VOCABULARY, (1, N_TOKENS))
    batch = {"input_ids": ids, "labels": ids.clone()}
    batch["labels"][0, 3] = -100
    program = capture(MODELS[model](), batch, precision="fp64")
    # Where compute hides no messages, keys are gathered: that is as many bytes in fewer calls.
    cost = replace(abstract_cost(sizes), hides=function == "ring")
    analysis = Analysis.of(program)
    request = PlacementRequest(cost, 1, Constraints())
    strategy = choose(analysis, request, "adamw", None).strategy
    lowered = {of.lowered.function for of in strategy.operators.values() if of.lowered is not None}
    assert f"{function}_attention" in lowered
    variables = lower(analysis, strategy, cost).variables.values()
    assert any(local.folded is not None for local in variables) == (len(sizes) == 1)
    assert thread_step(analysis, cost, strategy, batch, 0).wrong == {}


@nightly
def test_stages_of_a_rank_agree_on_an_order() -> None:
    """To one stage a router's experts are a dim of its weight, to another they may be a sequence;
    what stays on a rank is not sent, so both must have it in one order."""
    ids = torch.zeros(1, N_TOKENS, dtype=torch.int64)
    analysis = Analysis.of(capture(llama(), {"input_ids": ids, "labels": ids}, precision="fp64"))
    cost = replace(abstract_cost((2,)), hides=True)
    strategy = choose(analysis, PlacementRequest(cost, 1, Constraints()), "adamw", None).strategy
    program = lower(analysis, strategy, cost)
    folded = next(local for local in program.variables.values() if local.folded is not None)
    kinds = cast(Kinds, tuple(("tensor",) * len(dim) for dim in folded.factor_kinds))
    in_order = replace(folded, folded=None, factor_kinds=kinds)
    takes = replace(program, received=(Boundary(folded, "scores", "scores"),))
    for sent, is_one in ((folded, True), (in_order, False)):
        gives = replace(program, sent=(Boundary(sent, "scores", "scores"),))
        assert (fold_alike([gives, takes], [cost.mesh] * 2) is not None) == is_one


@nightly
def test_the_search_prices_the_order_that_runs() -> None:
    """A stage with one block for equal ones is in head-tail order as the whole stage is, where
    state is in shards over the ranks of a sequence."""
    with torch.device("meta"):
        shape = {"num_hidden_layers": 8, "hidden_size": 64, "intermediate_size": 128}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        config = LlamaConfig(vocab_size=VOCABULARY, **shape, **heads)
        model = LlamaForCausalLM(config).to(torch.bfloat16)
        ids = torch.zeros(8, 2 * N_TOKENS, dtype=torch.int64)
    plan = autopar.plan(
        model, Mesh((1, 8), hardware="h100-sxm"), {"input_ids": ids, "labels": ids},
        manual=Manual(dp=4, cp=2, zero=1, microbatch_size=1), master_weights=True,
    )  # fmt: skip
    assert any(program.folded is not None for program in bound_of(plan).pipeline.stages)
    assert plan.predicted.step_time_s == pytest.approx(plan.simulate().step_time_s, rel=1e-9)
