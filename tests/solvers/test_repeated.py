"""Programs with repeated blocks: three blocks give the optimum of the whole program."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from autopar.passes.analysis import Analysis, Folded, find_runs, fold
from autopar.passes.intra import (
    Chooser,
    Constraints,
    PlacementRequest,
    Repeated,
    choose,
    intra_op_problems,
    placed_once,
    repeated_problems,
)
from tests.helpers.captures import captured
from tests.helpers.harness import (
    WIDTH,
    abstract_cost,
    random_rows,
    random_tokens,
    thread_step,
)
from tests.helpers.models import families
from tests.helpers.models.blocks import Block, Chain, SharedBlock, TwoStacks
from tests.helpers.models.families import FAMILIES, N_BLOCKS

REL = 1e-6


@cache
def folded(name: str) -> Folded:
    if name in FAMILIES:
        return families.folded(name)
    blocks = {
        "chain": lambda: Chain([Block(WIDTH) for _ in range(N_BLOCKS)]),
        "two stacks": TwoStacks,
        "shared": SharedBlock,
    }
    torch.manual_seed(0)
    program = captured(blocks[name](), random_rows(0, "x"), precision="fp64")
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


@pytest.mark.usefixtures("nothing_hidden")
@pytest.mark.parametrize("share", [0.9, 0.75])
def test_within_a_budget(share: float) -> None:
    """Equal blocks may store and keep different things to fit."""
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
