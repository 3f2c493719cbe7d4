"""Laws of simulated steps: closed forms, and what can never make a step faster.

Stage i of n takes f_i forward and r f_i backward, with one ratio r for all stages; t_i is their
sum. With m microbatches and free messages, a step takes

    gpipe   (sum of t_i) + (m - 1) max t_i
    1f1b    the same if all stages are equal or the last is the slowest. Otherwise less: a slow
            early stage works while later stages fill and drain. The lower bound is the maximum
            over stages j of (sum of t_i over i < j) + m t_j
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from autopar.cost.simulate import PartWork, SplitBackward, StageTimes, simulate
from autopar.schedule import (
    Schedule,
    gpipe,
    in_flight,
    lower,
    one_f_one_b,
    prove_deadlock_free,
)
from tests.helpers.strategies import placed, schedules, stage_times, transfers

SECONDS = st.floats(0.1, 10.0)
COUNTS = st.integers(1, 8)
RATIOS = st.floats(0.2, 4.0)
TOLERANCE = 1 + 1e-9


def proportional(forward_s: Sequence[float], ratio: float) -> list[StageTimes]:
    return [
        StageTimes(1, PartWork(), PartWork(time_s), PartWork(ratio * time_s), PartWork(), 0.0)
        for time_s in forward_s
    ]


@hypothesis.given(st.lists(SECONDS, min_size=1, max_size=6), COUNTS, RATIOS)
def test_the_closed_form_of_plain_orders(forward_s: list[float], m: int, ratio: float) -> None:
    stages, times_s = proportional(forward_s, ratio), [(1 + ratio) * f for f in forward_s]
    closed_s = sum(times_s) + (m - 1) * max(times_s)
    n = len(stages)
    assert simulate(gpipe(range(n), m), stages).step_time_s == pytest.approx(closed_s)
    found = simulate(one_f_one_b(range(n), m), stages)
    found_s, busy_s = found.step_time_s, m * sum(times_s)
    assert found.bubble == pytest.approx(1 - busy_s / (n * found_s), abs=1e-9)
    needed_s = max(sum(times_s[:j]) + m * times_s[j] for j in range(n))
    assert needed_s / TOLERANCE <= found_s <= closed_s * TOLERANCE
    if times_s[-1] == max(times_s):
        assert found_s == pytest.approx(closed_s)


@hypothesis.given(st.integers(1, 5), st.integers(2, 4), st.integers(1, 3), SECONDS, RATIOS)
def test_chunks_are_never_slower(p: int, v: int, rounds: int, forward_s: float, r: float) -> None:
    """For equal chunks, free messages and whole rounds of microbatches."""
    m = rounds * p
    whole = simulate(one_f_one_b(range(p), m), proportional([forward_s] * p, r)).step_time_s
    chunks = proportional([forward_s / v] * (p * v), r)
    found = simulate(placed("interleaved", p, m, v), chunks)
    assert found.step_time_s <= whole * TOLERANCE
    assert found.step_time_s == pytest.approx((v * m + p - 1) * forward_s / v * (1 + r))
    assert found.bubble == pytest.approx((p - 1) / (v * m + p - 1))


@hypothesis.given(st.data())
def test_every_schedule_ends_and_keeps_what_it_says(data: st.DataObject) -> None:
    plain = data.draw(schedules())
    schedule = lower(plain, data.draw(transfers(plain.n_stages)))
    prove_deadlock_free(schedule)
    stages = [
        replace(times, static_bytes=7.0, kept_bytes=3.0)
        for times in proportional([1.0] * plain.n_stages, 2.0)
    ]
    if plain.splits_backward:
        parts = SplitBackward(PartWork(1.0), PartWork(1.0))
        stages = [replace(times, backward=parts) for times in stages]
    timeline = simulate(schedule, stages)
    lanes = Counter(event.lane for event in timeline.events)
    assert lanes["compute"] == sum(action.is_compute for action in schedule)
    assert lanes["p2p"] == sum(action.is_send for action in schedule)
    m, v, p = plain.n_microbatches, plain.n_chunks, plain.n_devices
    for device in range(p):
        n_in_flight = in_flight(schedule, device)
        assert 1 <= n_in_flight <= m * v
        assert timeline.peak_bytes(device) == 7.0 * v + 3.0 * n_in_flight
        first, *_, last = timeline.memory(device)
        assert first == (0.0, 7.0 * v)
        assert last[1] == (7.0 * v if plain.trains else 7.0 * v + 3.0 * m * v)
        moments = [time_s for time_s, _ in timeline.memory(device)]
        assert moments == sorted(moments)
        assert moments[-1] <= timeline.step_time_s


@st.composite
def cases(draw: st.DrawFn) -> tuple[Schedule, list[StageTimes], float, bool]:
    """(schedule, times of its stages, seconds per message, whether sends start as made)."""
    schedule = draw(schedules(max_stages=5, max_microbatches=5))
    stages = [draw(stage_times(schedule.splits_backward)) for _ in range(schedule.n_stages)]
    return schedule, stages, draw(SECONDS), draw(st.booleans())


def step_s(case: tuple[Schedule, list[StageTimes], float, bool], **options: Any) -> float:
    schedule, stages, message_s, sends_as_made = case
    return simulate(schedule, stages, message_s, sends_as_made=sends_as_made, **options).step_time_s


@hypothesis.given(cases(), st.data())
def test_no_part_that_takes_longer_makes_a_faster_step(
    case: tuple[Schedule, list[StageTimes], float, bool], data: st.DataObject
) -> None:
    schedule, stages, message_s, sends_as_made = case
    at = data.draw(st.integers(0, len(stages) - 1))
    name = data.draw(st.sampled_from(("forward", "backward", "after", "update_s", "sync_s")))
    more = PartWork(*(data.draw(st.sampled_from((0.0, 0.5, 3.0))) for _ in range(3)))
    longer = [*stages]
    longer[at] = lengthened(stages[at], name, more)
    before_s = step_s(case) - slowed_at_most_s(schedule, stages)
    assert before_s <= step_s((schedule, longer, message_s, sends_as_made)) * TOLERANCE
    assert before_s <= step_s((schedule, stages, message_s + 1.0, sends_as_made)) * TOLERANCE


def slowed_at_most_s(schedule: Schedule, stages: Sequence[StageTimes]) -> float:
    """How much longer syncs can make other work of their device; 0 with one chunk per device.

    With several chunks, a longer part may delay the sync of another chunk until nothing runs beside
    it, and so undo its slowdown.
    """
    if schedule.n_chunks == 1:
        return 0.0
    return sum(times.overlap_slowdown_fraction * times.sync_s for times in stages)


def lengthened(times: StageTimes, name: str, more: PartWork) -> StageTimes:
    if name in ("update_s", "sync_s"):
        return replace(times, **{name: getattr(times, name) + more.compute_s})
    part = getattr(times, name)
    if isinstance(part, SplitBackward):
        return replace(times, backward=replace(part, weight=part.weight + more))
    return replace(times, **{name: part + more})


def test_sync_waits_for_all_collectives_beside_the_backward() -> None:
    """Exposed collectives use the lane too, so a slower device hides more of them and no sync."""
    backward = PartWork(compute_s=0.5, overlapped_s=2.5)
    stage = StageTimes(
        1, PartWork(), PartWork(), backward, PartWork(), 0.0,
        sync_s=0.5, n_sync_buckets=2, overlap_slowdown_fraction=1.0,
    )  # fmt: skip
    whole_s = [
        simulate(gpipe(range(1), 1), [stage], slow=(0, k)).step_time_s for k in (1.0, 2.0, 4.0)
    ]
    assert whole_s == [3.0, 3.0, 3.75]


@hypothesis.given(cases(), st.data())
def test_a_slow_device_and_jitter(
    case: tuple[Schedule, list[StageTimes], float, bool], data: st.DataObject
) -> None:
    device = data.draw(st.integers(0, case[0].n_devices - 1))
    factor, fraction = data.draw(st.floats(1.0, 3.0)), data.draw(st.floats(0.0, 1.0))
    seed = data.draw(st.integers(0, 5))
    before_s = step_s(case)
    slow_s = step_s(case, slow=(device, factor))
    assert before_s / TOLERANCE <= slow_s <= before_s * factor * TOLERANCE
    assert slow_s <= step_s(case, slow=(device, factor + 1)) * TOLERANCE
    jittered_s = step_s(case, jitter=(fraction, seed))
    assert before_s / TOLERANCE <= jittered_s <= before_s * (1 + fraction) * TOLERANCE
    assert jittered_s == step_s(case, jitter=(fraction, seed))
    assert jittered_s <= step_s(case, jitter=(2 * fraction, seed)) * TOLERANCE
