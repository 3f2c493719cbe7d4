"""Stages that are equal up to names: how they are detected, and reuse of one stage's results."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache

import torch

from autopar.cost.memory import peak_memory
from autopar.cost.price import stage_times
from autopar.passes.analysis import (
    Analysis,
    Numbered,
    cut,
    find_runs,
    rename_lowered,
    rename_strategy,
)
from autopar.passes.intra import Constraints, PlacementRequest, choose
from autopar.passes.lowering import lower
from autopar.program.lines import Pipeline, Strategy
from autopar.schedule import one_f_one_b
from tests.helpers.captures import captured
from tests.helpers.harness import random_tokens, tiny_gpt2
from tests.helpers.machines import balanced_cost

N_BLOCKS = 6


@cache
def whole(frozen_block: int | None = None) -> Analysis:
    torch.manual_seed(0)
    model = tiny_gpt2(N_BLOCKS)
    for name, parameter in model.named_parameters():
        if f".h.{frozen_block}." in name:
            parameter.requires_grad_(False)
    return Analysis.of(captured(model, random_tokens(0), precision="fp64"))


def stages(analysis: Analysis, *n_blocks: int, shift: int = 0) -> list[Analysis]:
    """Stages of these numbers of blocks, cut `shift` operators after a block begins.

    The first stage also holds what precedes the blocks. The last stage holds the rest.
    """
    (run,) = find_runs(whole())
    first = (run.start + run.period * n + shift for n in itertools.accumulate(n_blocks))
    ends = (*first, len(analysis.operators))
    return [analysis.part(program) for program in cut(analysis.program, ends)]


def strategy_of(part: Analysis) -> Strategy:
    """The strategy chosen on 2 x 2 ranks, with two microbatches in flight."""
    return choose(
        part, PlacementRequest(balanced_cost((2, 2)), 2, Constraints(), 2), "adamw", None
    ).strategy


def test_stages_of_as_many_blocks_are_alike() -> None:
    for n_blocks, n_kinds in (((1, 1, 1, 1, 1), 3), ((1, 2, 2), 3), ((1, 2, 1, 1), 4)):
        kinds = [Numbered.of(part).likeness for part in stages(whole(), *n_blocks)]
        assert len(set(kinds)) == n_kinds
    first, second, third, *_ = (Numbered.of(p) for p in stages(whole(), 1, 1, 1, 1, 1))
    assert second.likeness == third.likeness != first.likeness


def test_what_tells_stages_apart() -> None:
    _, one, other, _ = stages(whole(), 1, 2, 2)
    (run,) = find_runs(whole())
    assert Numbered.of(one).likeness == Numbered.of(other).likeness
    # Equally many operators, but a different first one.
    shifted = stages(whole(), 1, 2, 2, shift=3)[1]
    assert len(shifted.operators) == len(one.operators)
    assert Numbered.of(shifted).likeness != Numbered.of(one).likeness
    # Equal operators, but one stage recomputes a block.
    block = range(run.period)
    assert Numbered.of(one, [block]).likeness != Numbered.of(other).likeness
    # One stage has a frozen block.
    _, frozen, learns, _ = stages(whole(frozen_block=2), 1, 2, 2)
    assert Numbered.of(frozen).likeness != Numbered.of(learns).likeness


def test_what_one_chooses_the_others_choose_under_their_names() -> None:
    _, one, other, _ = stages(whole(), 1, 2, 2)
    names = Numbered.of(one).names_in(Numbered.of(other))
    mine, theirs = strategy_of(one), strategy_of(other)
    assert mine != theirs
    found = rename_strategy(mine, names)
    assert found == theirs
    assert list(found.operators) == list(theirs.operators)
    assert list(found.storage) == list(theirs.storage)
    program = lower(other, found, balanced_cost((2, 2)))
    assert program == lower(other, theirs, balanced_cost((2, 2)))


def test_what_is_lowered_for_one_is_joined_and_priced_as_the_others() -> None:
    begin, one, other, end = stages(whole(), 1, 2, 2)
    cost = balanced_cost((2, 2))
    names = Numbered.of(one).names_in(Numbered.of(other))
    ends = [lower(part, strategy_of(part), cost) for part in (begin, end)]
    middle = [lower(part, strategy_of(part), cost) for part in (one, other)]
    named = rename_lowered(middle[0], one.program, other.program, names)
    assert [p.name for p in named.parameters] == [p.name for p in middle[1].parameters]
    meshes = [replace(cost.mesh, first_rank=4 * k) for k in range(4)]
    found, wanted = (
        Pipeline.of([ends[0], middle[0], third, ends[1]], meshes, one_f_one_b)
        for third in (named, middle[1])
    )
    assert found.ties == wanted.ties
    assert found.schedule == wanted.schedule
    assert [(c.source, c.target, c.value) for c in found.crossings] == [
        (c.source, c.target, c.value) for c in wanted.crossings
    ]
    peaks = [peak_memory(program, "adamw", 2) for program in (named, middle[1])]
    assert peaks[0].peak_bytes == peaks[1].peak_bytes
    assert peaks[0].parts == peaks[1].parts
    assert stage_times(named, cost, "adamw") == stage_times(middle[1], cost, "adamw")
