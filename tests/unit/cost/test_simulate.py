"""The simulator: textbook bubbles, hand-made schedules, and laws for any durations."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from autopar.cost.simulate import PartWork, SplitBackward, StageTimes, TieTimes, Timeline, simulate
from autopar.schedule import (
    ORDERS,
    Schedule,
    chain,
    lower,
    one_f_one_b,
    parse_schedule,
    script_of,
    zero_bubble,
)
from tests.helpers.strategies import placed, schedules

NOTHING = PartWork()


def stage(
    forward_s: float, backward_s: float, n_ranks: int = 1, comm_s: float = 0.0, **fields: Any
) -> StageTimes:
    """A stage with nothing before or after; forward and backward each have `comm_s`."""
    forward, backward = PartWork(forward_s, comm_s), PartWork(backward_s, comm_s)
    return StageTimes(n_ranks, NOTHING, forward, backward, NOTHING, 0.0, **fields)


def lowered(order: str, n_stages: int, n_microbatches: int) -> Schedule:
    return lower(ORDERS[order](range(n_stages), n_microbatches), chain(n_stages))


def adds_up(timeline: Timeline) -> None:
    """Every second of every stage is accounted for once."""
    for k, s in enumerate(timeline.devices):
        parts_s = (s.compute_s, s.collectives_s, s.waited_s, s.update_s, timeline.idle_s(k))
        assert sum(parts_s) == pytest.approx(timeline.step_time_s)
        assert min(parts_s) >= 0


def events_of(timeline: Timeline, action: str) -> tuple[float, float]:
    return next((e.start_s, e.end_s) for e in timeline.events if e.action == action)


def test_parts_of_a_backward() -> None:
    whole = stage(1.0, 3.0)
    halves = replace(whole, backward=SplitBackward(PartWork(1.5), PartWork(1.5)))
    found = simulate(zero_bubble(range(4), 8), [replace(halves, forward=PartWork(1.5))] * 4)
    assert found.step_time_s == pytest.approx(8 * 4.5 + 3 * 1.5)
    adds_up(found)
    # A schedule that does not split backward runs the sum of its parts.
    plain = simulate(lowered("1f1b", 4, 8), [whole] * 4)
    assert simulate(lowered("1f1b", 4, 8), [halves] * 4).step_time_s == plain.step_time_s


def test_one_stage_is_the_sum() -> None:
    times = StageTimes(
        2,
        PartWork(1.0, 2.0),
        PartWork(3.0, 4.0),
        PartWork(5.0, 6.0),
        PartWork(7.0, 8.0),
        update_s=9.0,
    )
    found = simulate(lowered("1f1b", 1, 3), [times], loss_s=100.0)
    compute_s, comm_s = 1 + 3 * (3 + 5) + 7, 2 + 3 * (4 + 6) + 8
    assert found.step_time_s == compute_s + comm_s + 9
    assert (found.compute_time_s, found.comm_time_s) == (compute_s, comm_s)
    assert (found.exposed_comm_s, found.bubble) == (comm_s, 0.0)


def test_messages_by_hand() -> None:
    """With one microbatch nothing overlaps: F, message, F, B, message, B."""
    found = simulate(lowered("1f1b", 2, 1), [stage(1.0, 2.0)] * 2, lambda action: 0.5)
    assert found.step_time_s == 7.0
    assert events_of(found, "0SF0>1") == (1.0, 1.5)
    assert events_of(found, "1B0") == (2.5, 4.5)
    assert [s.waited_s for s in found.devices] == [0.5, 0.5]
    assert [found.idle_s(k) for k in (0, 1)] == [3.5, 3.5]
    assert found.bubble == 0.5
    adds_up(found)


def test_sends_do_not_block_the_sender() -> None:
    found = simulate(lowered("gpipe", 2, 2), [stage(1.0, 1.0)] * 2, lambda action: 10.0)
    assert events_of(found, "0F1") == (1.0, 2.0)
    # The link carries the first message until 11.0.
    assert events_of(found, "0SF0>1") == (1.0, 11.0)
    assert events_of(found, "0SF1>1")[0] >= 11.0
    adds_up(found)


def test_a_transfer_waits_for_both_ends() -> None:
    """Stage 1 posts its second receive after its first forward, so the transfer starts then."""
    found = simulate(lowered("gpipe", 2, 2), [stage(1.0, 1.0), stage(5.0, 1.0)], lambda a: 0.5)
    assert events_of(found, "1F0") == (1.5, 6.5)
    assert events_of(found, "0SF1>1") == (6.5, 7.0)
    assert events_of(found, "1F1") == (7.0, 12.0)


def test_more_batches_than_stages_wait_for_the_first() -> None:
    """With three stages, three sends may be under way; the fourth waits for the first."""
    schedule = parse_schedule(
        "0F0 0SF0>2 0F1 0SF1>2 0F2 0SF2>2 0F3 0SF3>2 0F4 0SF4>2\n"
        "1F0 1F1 1F2 1F3 1F4\n"
        "2RF0<0 2F0 2RF1<0 2F1 2RF2<0 2F2 2RF3<0 2F3 2RF4<0 2F4"
    )
    found = simulate(schedule, [stage(1.0, 0.0)] * 3, lambda action: 100.0)
    assert events_of(found, "0F3") == (3.0, 4.0)
    assert events_of(found, "0F4") == (101.0, 102.0)
    adds_up(found)


def test_once_a_step() -> None:
    """Gathers, gradient sync, tied gradients, the loss and the optimizer run once a step."""
    times = StageTimes(1, PartWork(0.0, 1.0), PartWork(2.0), PartWork(3.0), PartWork(0.0, 4.0), 5.0)
    tie = TieTimes((0, 1), 6.0, (7.0, 0.0))
    found = simulate(lowered("1f1b", 2, 1), [times, times], ties=[tie], loss_s=8.0)
    # Stage 0 ends backward last, at 1 + 2 + 2 + 3 + 3.
    assert found.step_time_s == 11 + 4 + 6 + 7 + 8 + 5
    assert found.devices[0].collectives_s == 1 + 4 + 6 + 7 + 8
    assert found.devices[1].collectives_s == 1 + 4 + 6 + 8
    adds_up(found)


def test_the_bubble_weighs_stages_by_their_ranks() -> None:
    stages = [stage(1.0, 1.0, n_ranks=3), stage(3.0, 3.0)]
    found = simulate(lowered("gpipe", 2, 1), stages)
    assert found.step_time_s == 8.0
    assert found.bubble == pytest.approx((3 * 6 + 1 * 2) / (4 * 8))
    assert found.busiest.compute_s == 6.0


SHARES = st.floats(0.0, 0.9)


@hypothesis.given(st.floats(0, 10), st.floats(0, 10), st.floats(0, 10), SHARES)
def test_what_overlaps(compute_s: float, waited_s: float, beside_s: float, slowdown: float) -> None:
    duration = PartWork(compute_s, waited_s, beside_s).duration(slowdown)
    slowed_s = compute_s + beside_s * slowdown / (1 + slowdown)
    assert duration.time_s == pytest.approx(waited_s + max(beside_s, slowed_s))
    assert duration.hidden_s <= min(beside_s, duration.compute_s) + 1e-9
    assert duration.exposed_s + duration.hidden_s == pytest.approx(waited_s + beside_s)
    # Never better than no collectives at all, never worse than one after the other.
    one_by_one_s = PartWork(compute_s, waited_s + beside_s).duration().time_s
    assert compute_s + waited_s - 1e-9 <= duration.time_s
    assert PartWork(compute_s, waited_s, beside_s).duration(0.0).time_s <= one_by_one_s + 1e-9


def test_overlap_by_hand() -> None:
    """With a slowdown of 0.5, 2 s beside collectives do 4/3 s of compute."""
    assert PartWork(4.0, 1.0, 2.0).duration(0.5) == pytest.approx((4 + 2 / 3, 1.0, 2.0))
    assert PartWork(4.0, 1.0, 9.0).duration(0.5) == pytest.approx((6.0, 1.0 + 3.0, 6.0))


def test_compute_waits_for_a_host_that_launches_slower() -> None:
    """A host of 9 s leaves the device idle for 4 s beside 4 s of compute and 1 s of collectives."""
    assert PartWork(4.0, 1.0, host_s=9.0).duration() == pytest.approx((8.0, 1.0, 0.0))
    assert PartWork(4.0, 1.0, host_s=5.0).duration() == PartWork(4.0, 1.0).duration()
    work = PartWork(4.0, 1.0, 2.0, 9.0)
    parts = work.split()
    assert parts.input + parts.weight == work
    assert work.times(2) == work + work


def one_device(n_microbatches: int, **fields: Any) -> Timeline:
    return simulate(one_f_one_b(range(1), n_microbatches), [stage(1.0, 2.0, **fields)])


@pytest.mark.parametrize("sync_s", [0.5, 2.0, 10.0])
@pytest.mark.parametrize("n_buckets", [1, 4, 100])
def test_sync_beside_the_last_backward(sync_s: float, n_buckets: int) -> None:
    found = one_device(3, sync_s=sync_s, n_sync_buckets=n_buckets)
    left_s = max(sync_s / n_buckets, sync_s - 2.0 * (n_buckets - 1) / n_buckets)
    assert found.step_time_s == pytest.approx(9.0 + left_s)
    assert found.exposed_comm_s == pytest.approx(left_s)
    assert found.comm_time_s == pytest.approx(sync_s)
    adds_up(found)


def test_sync_slows_the_backward_beside_it() -> None:
    found = one_device(1, sync_s=1.0, n_sync_buckets=2, overlap_slowdown_fraction=0.25)
    # Half a second of the sync is hidden, which costs 0.1 s; the other half is exposed.
    assert found.step_time_s == pytest.approx(3.0 + 0.1 + 0.5)
    adds_up(found)


def test_sync_waits_for_the_lane() -> None:
    """The last backward's own collectives use the lane first."""
    times = replace(stage(1.0, 2.0, sync_s=1.0, n_sync_buckets=4), backward=PartWork(2.0, 0.0, 1.0))
    assert simulate(one_f_one_b(range(1), 1), [times]).step_time_s == pytest.approx(3.0 + 0.5)


def test_sync_of_chunks_shares_the_lane() -> None:
    """The last chunk's gradients are ready first; their sync runs beside the other's backward."""
    times = stage(1.0, 2.0, sync_s=1.5, n_sync_buckets=3)
    found = simulate(placed("interleaved", 1, 1, 2), [times] * 2)
    assert [e[1:] for e in sorted(lane_of(found, "collectives"))] == [
        pytest.approx((2 + 2 / 3, 4.5)),
        pytest.approx((4 + 2 / 3, 6.5)),
    ]
    assert found.step_time_s == pytest.approx(6.5)
    adds_up(found)


def lane_of(timeline: Timeline, lane: str) -> list[tuple[int, float, float]]:
    return [(e.device, e.start_s, e.end_s) for e in timeline.events if e.lane == lane]


SECONDS = st.floats(0.1, 10.0)


def durations(draw: st.DataObject, schedule: Schedule) -> list[StageTimes]:
    """The times of every stage, with each part drawn separately."""
    found = []
    for _ in range(schedule.n_stages):
        forward_s, input_s, weight_s, comm_s = (draw.draw(SECONDS) for _ in range(4))
        backward = SplitBackward(PartWork(input_s, comm_s), PartWork(weight_s))
        found.append(replace(stage(forward_s, 0.0), backward=backward))
    return found


@hypothesis.settings(deadline=None, max_examples=60)
@hypothesis.given(schedules(max_stages=6, max_microbatches=6), SECONDS, st.data())
def test_messages_need_not_be_written_out(
    schedule: Schedule, message_s: float, data: st.DataObject
) -> None:
    """A schedule without messages is simulated as if it had the messages of a chain."""
    stages = durations(data, schedule)
    written = lower(schedule, chain(schedule.n_stages))
    found = simulate(schedule, stages, message_s)
    assert found == replace(simulate(written, stages, message_s), record=found.record)
    assert Counter(map(str, found.events)) == Counter(
        map(str, simulate(written, stages, message_s).events)
    )
    kept = script_of(schedule)
    assert simulate(kept, stages, message_s).step_time_s == found.step_time_s
    as_made = simulate(schedule, stages, message_s, sends_as_made=True)
    for timeline in (found, as_made):
        adds_up(timeline)
        assert sum(e.lane == "p2p" for e in timeline.events) == kept.n_messages
    free = simulate(schedule, stages)
    assert free.step_time_s <= min(found.step_time_s, as_made.step_time_s) + 1e-9
