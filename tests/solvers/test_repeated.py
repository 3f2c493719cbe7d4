"""Programs with repeated blocks, planned by three of them: the optimum of the whole program."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from autopar.passes.analysis.analysis import Analysis
from autopar.passes.analysis.folding import Folded, find_runs, fold
from autopar.passes.intra.chooser import Chooser, PlacementRequest, choose
from autopar.passes.intra.constraints import Constraints
from autopar.passes.intra.intra_op import intra_op_problems
from autopar.passes.intra.repeated import Repeated, placed_once, repeated_problems
from tests.helpers.captures import captured
from tests.helpers.harness import (
    WIDTH,
    abstract_cost,
    random_rows,
    random_tokens,
    thread_step,
    tiny_gpt2,
    tiny_llama,
)
from tests.unit.analysis.test_layers import Block, Chain, TwoStacks
from tests.unit.analysis.test_layers import Repeated as SharedBlock

REL = 1e-6
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


@cache
def folded(name: str) -> Folded:
    torch.manual_seed(0)
    rows = {
        "chain": lambda: Chain([Block(WIDTH) for _ in range(N_BLOCKS)]),
        "two stacks": TwoStacks,
        "shared": SharedBlock,
    }
    tokens = {"gpt2": tiny_gpt2, "llama": tiny_llama, "mixtral": tiny_mixtral, "t5": tiny_t5}
    if name in rows:
        program = captured(rows[name](), random_rows(0, "x"), precision="fp64")
    else:
        program = captured(tokens[name](N_BLOCKS), random_tokens(0), precision="fp64")
    analysis = Analysis.of(program)
    return fold(analysis, find_runs(analysis))


def repeated(name: str, sizes: tuple[int, ...], limits: Constraints) -> Repeated | None:
    found = folded(name)
    once, cost = placed_once(found, 1), abstract_cost(sizes)
    problems = intra_op_problems(found.analysis, [(cost, 1)], limits, "adamw", once)
    return repeated_problems(found, problems)


CASES = [
    *((name, (2, 2), "") for name in ("chain", "two stacks", "gpt2", "llama", "mixtral")),
    *((name, (4,), "") for name in ("two stacks", "llama", "t5")),
    ("gpt2", (2, 2), "zero1 zero2 zero3"),
    ("llama", (4,), "data"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "sizes", "forbid"), CASES)
def test_the_optimum_is_that_of_the_whole_program(
    name: str, sizes: tuple[int, ...], forbid: str
) -> None:
    found, cost, limits = folded(name), abstract_cost(sizes), Constraints(frozenset(forbid.split()))
    assert repeated(name, sizes, limits) is not None
    whole = choose(found.whole, PlacementRequest(cost, 1, limits), "adamw", None)
    chosen = Chooser(found, "adamw").choose(PlacementRequest(cost, 1, limits), None)
    assert chosen.objective_s == pytest.approx(whole.objective_s, rel=REL)
    assert chosen.size_bytes == pytest.approx(whole.size_bytes, rel=REL)
    assert chosen.n_variables < whole.n_variables
    assert chosen.strategy.operators.keys() == whole.strategy.operators.keys()
    assert chosen.strategy.storage.keys() == whole.strategy.storage.keys()


@pytest.mark.parametrize("share", [0.9, 0.75])
def test_within_a_budget(share: float) -> None:
    """Blocks that store or keep unlike things, where that is what fits."""
    found, cost, limits = folded("gpt2"), abstract_cost((2, 2)), Constraints()
    free = Chooser(found, "adamw").choose(PlacementRequest(cost, 1, limits), None)
    budget_bytes = share * free.size_bytes
    chosen = Chooser(found, "adamw").choose(
        PlacementRequest(cost, 1, limits), budget_bytes, time_limit_s=2.0
    )
    assert chosen.size_bytes <= budget_bytes * (1 + REL)
    assert chosen.objective_s >= free.objective_s
    step = thread_step(found.whole, cost, chosen.strategy, random_tokens(1), 1)
    assert step.wrong == {}


def test_blocks_that_share_weights_are_not_copies() -> None:
    assert folded("shared").runs
    assert repeated("shared", (4,), Constraints()) is None
    ask = PlacementRequest(abstract_cost((4,)), 1, Constraints())
    whole = choose(folded("shared").whole, ask, "adamw", None)
    chosen = Chooser(folded("shared"), "adamw").choose(ask, None)
    assert chosen.strategy == whole.strategy


@pytest.mark.parametrize("name", ["two stacks", "llama", "mixtral"])
def test_a_step_of_the_whole_program(name: str) -> None:
    found, cost = folded(name), abstract_cost((2, 2))
    chosen = Chooser(found, "adamw").choose(PlacementRequest(cost, 1, Constraints()), None)
    batch = random_rows(1, "x") if name == "two stacks" else random_tokens(1)
    step = thread_step(found.whole, cost, chosen.strategy, batch, 1)
    assert step.wrong == {}
