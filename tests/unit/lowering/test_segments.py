"""What a recomputed segment keeps of a reshard at its beginning."""

from __future__ import annotations

import torch

import autopar
from autopar import Manual
from autopar.program.lines import MoveLine
from tests.helpers.jobs import llama, machine, tokens
from tests.helpers.plans import program_of


def test_the_reshard_of_an_embedding_does_not_run_again() -> None:
    """It is no larger than what it reads, which nothing else needs."""
    torch.manual_seed(0)
    manual = Manual(tp=2, recompute="full")
    program = program_of(autopar.plan(llama(3), machine((1, 2)), tokens(0), manual=manual))
    first, body = program.segments[0], program.body
    reshards = [i for i in range(first.start, first.stop) if isinstance(body[i], MoveLine)]
    made = {name for line in body[first.start : first.stop] for name in line.writes}
    from_before = [i for i in reshards if made.isdisjoint(body[i].reads)]
    assert from_before, "the embedding is resharded where the first block reads it"
    assert set(from_before).isdisjoint(first.again)
    assert (set(reshards) - set(from_before)) & set(first.again), "of those inside, some do"


def test_each_block_is_a_call_both_ways() -> None:
    torch.manual_seed(0)
    manual = Manual(tp=2, sp=True, recompute="full")
    plan = autopar.plan(llama(5), machine((1, 2)), tokens(0), manual=manual)
    (text,) = plan.code().values()
    assert "for i in range(5):" in text and "for i in reversed(range(5)):" in text
