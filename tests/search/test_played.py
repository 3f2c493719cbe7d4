"""Scores, made of stages' times and messages, against the same stages lowered and simulated."""

from __future__ import annotations

import pytest

from autopar.cost.price.prediction import link_between, transfer_s
from autopar.options import Options
from autopar.passes.inter.candidate import Candidate
from autopar.passes.inter.score import (
    MessageSeconds,
    StageBoundary,
    StageSeconds,
    messages_between,
    score_s,
)
from autopar.passes.lowering.lines import join
from autopar.passes.search.evaluator import Evaluator, Scored
from autopar.program.messages import Messages
from autopar.schedule import ORDERS, Transfer
from tests.helpers.every_plan import Choices, choices_of
from tests.helpers.machines import SLOW, TIERED

REL = 1e-9
# What a score leaves out: how a stage's time divides into forward and backward, and for a parameter
# that two stages share, its gradients. A score may be too low by more: shards of gradients fill
# fewer buckets than whole ones, so less of a small stage's sync is hidden.
PLAYED_REL, BUCKETS_REL, TIED_REL = 0.01, 0.03, 0.06


def choices(model: str, shape: tuple[int, ...], speed: tuple[float, float], m: int) -> Choices:
    options = Options.of(microbatches=m)
    return choices_of(model, shape, speed, options)


def some_of(every: Choices, one_in: int) -> list[Candidate]:
    """One in so many of the plans with stages."""
    return [c for c in every.candidates() if len(c.stages) > 1][::one_in]


def messages(evaluator: Evaluator, scored: Scored) -> list[MessageSeconds]:
    candidate = scored.candidate
    types = [
        part.microbatch_types(candidate.n_microbatches).tensors
        for part in evaluator.parts(candidate.ends)
    ]
    ends = [
        StageBoundary(layout.view, chosen.sent, chosen.received, of)
        for layout, chosen, of in zip(candidate.stages, scored.choices, types, strict=True)
    ]
    return messages_between(ends, evaluator.hardware.links)


@pytest.mark.parametrize("speed", [SLOW, TIERED])
def test_messages_and_steps_are_those_of_the_lowered_stages(speed: tuple[float, float]) -> None:
    """Unequal stages, parts of nodes and whole nodes, matmuls split by rows and by columns."""
    every = choices("mlp", (2, 4), speed, 16)
    between = link_between(every.mesh, every.hardware.links)
    sizes = set()
    for candidate in some_of(every, 3):
        scored = every.evaluator.scored(candidate, None)
        solved = every.simulator.simulated(scored)
        excess = scored.score_s / solved.step_time_s - 1
        assert -BUCKETS_REL <= excess <= PLAYED_REL, candidate.name
        lowered = Messages(join(solved.stages, ORDERS["1f1b"]))
        found = messages(every.evaluator, scored)
        for message in found:
            transfer = Transfer(message.source, message.target)
            ways = (
                (transfer.forward(0), message.forward_s),
                (transfer.backward(0), message.backward_s),
            )
            for (send, _), time_s in ways:
                assert time_s == pytest.approx(transfer_s(lowered.of(send), between), rel=REL)
        sizes.add(tuple(layout.view.n_ranks for layout in candidate.stages))
    assert len(sizes) >= 4


def test_steps_with_skips_and_ties_are_near_the_lowered_ones() -> None:
    """Masks skip stages, and the first and last stages share an embedding."""
    every = choices("gpt2", (2, 2), TIERED, 4)
    n_skips = 0
    for candidate in some_of(every, 66):
        scored = every.evaluator.scored(candidate, None)
        step_time_s = every.simulator.simulated(scored).step_time_s
        assert scored.score_s == pytest.approx(step_time_s, rel=TIED_REL), candidate.name
        n_skips += any(
            message.target - message.source > 1 for message in messages(every.evaluator, scored)
        )
    assert n_skips


def test_a_step_is_the_textbooks() -> None:
    """Equal stages and free messages: m + S - 1 microbatches, then the work that is done once."""
    stages = [StageSeconds(3.0, 5.0)] * 4
    free = [MessageSeconds(k, k + 1, 0.0, 0.0) for k in range(3)]
    assert score_s("1f1b", 8, stages, free) == pytest.approx(3.0 * (8 + 3) + 5.0, rel=REL)
    assert score_s("1f1b", 8, stages, free, 2.0) == pytest.approx(3.0 * 11 + 7.0, rel=REL)


def test_receivers_wait_for_messages() -> None:
    """In the steady state a stage waits for an activation and for a gradient."""
    stages = [StageSeconds(3.0, 0.0)] * 3
    slow = [MessageSeconds(k, k + 1, 0.25, 0.5) for k in range(2)]
    long_s, short_s = (score_s("1f1b", n, stages, slow) for n in (24, 12))
    assert (long_s - short_s) / 12 == pytest.approx(3.0 + 0.25 + 0.5, rel=REL)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_many_microbatches_go_on_as_the_last_did(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = [StageSeconds(3.0, 1.0), StageSeconds(4.0, 2.0), StageSeconds(2.5, 0.5)]
    messages = [
        MessageSeconds(0, 1, 0.3, 0.4),
        MessageSeconds(1, 2, 0.2, 0.2),
        MessageSeconds(0, 2, 0.1, None),
    ]
    short_s = score_s(schedule, 100, stages, messages)
    monkeypatch.setattr("autopar.passes.inter.score._STEADY", 100)
    assert short_s == pytest.approx(score_s(schedule, 100, stages, messages), rel=1e-3)
