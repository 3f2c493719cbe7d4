"""Schedules: known grids, counts and clocks; lowering never deadlocks; faults are named."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import hypothesis
import pytest
from hypothesis import strategies as st

from autopar.errors import AutoparError, OptionError, PlanError, VerificationError
from autopar.schedule import (
    CHUNKS,
    ORDERS,
    Schedule,
    ScheduleFactory,
    Transfer,
    chain,
    clocks,
    format_grid,
    forward_only,
    gpipe,
    in_flight,
    lower,
    one_f_one_b,
    parse_action,
    parse_schedule,
    prove_deadlock_free,
    start_times,
    validate,
    zero_bubble,
)
from tests.conftest import Golden
from tests.helpers.strategies import placed, schedules, transfers

SPLIT_KINDS = ("forward", "backward_input", "backward_weight")
UP_TO_12 = list(itertools.product(range(1, 13), repeat=2))


@st.composite
def lowered(draw: st.DrawFn) -> tuple[Schedule, Schedule]:
    """A schedule without messages, and the same one with messages."""
    schedule = draw(schedules())
    return schedule, lower(schedule, draw(transfers(schedule.n_stages)))


@pytest.mark.parametrize("name", ORDERS)
def test_grids(name: str, golden: Golden) -> None:
    if CHUNKS[name][0] == 1:
        golden(f"schedule_{name}_4_6.txt", format_grid(placed(name, 4, 6)))
    else:
        golden(f"schedule_{name}_4x2_8.txt", format_grid(placed(name, 4, 8, 2)))


def test_lowered_1f1b(golden: Golden) -> None:
    skip = Transfer(0, 3, has_gradient=False)
    golden(
        "schedule_1f1b_4_6_lowered.txt", f"{lower(one_f_one_b(range(4), 6), chain(4) | {skip})}\n"
    )


def test_reference_results() -> None:
    for n, m in UP_TO_12:
        early, late = one_f_one_b(range(n), m), gpipe(range(n), m)
        for schedule in (early, late):
            validate(schedule)
            assert clocks(schedule) == 2 * (n + m - 1)
            assert clocks(schedule, forward=1, backward=2) == 3 * (n + m - 1)
        assert [in_flight(early, i) for i in range(n)] == [min(m, n - i) for i in range(n)]
        assert [in_flight(late, i) for i in range(n)] == [m] * n
        assert clocks(forward_only(range(n), m)) == n + m - 1


def test_reference_results_of_interleaving() -> None:
    for p, v, rounds in itertools.product(range(1, 7), range(2, 5), range(1, 4)):
        m = rounds * p
        schedule = placed("interleaved", p, m, v)
        validate(schedule)
        for backward in (1, 2):
            chunks_s = (1 + backward) * (m * v + p - 1)
            assert clocks(schedule, forward=1, backward=backward) == chunks_s
        kept = [min(m * v, 2 * (p - i - 1) + (v - 1) * p + 1) for i in range(p)]
        assert [in_flight(schedule, i) for i in range(p)] == kept


@pytest.mark.parametrize("costs", [(1, 1, 1), (2, 2, 1), (1, 2, 1), (3, 4, 2)])
def test_reference_results_of_zero_bubble(costs: tuple[int, int, int]) -> None:
    forward, backward, weight = costs
    for n, m in UP_TO_12:
        schedule = zero_bubble(range(n), m)
        validate(schedule)
        assert [in_flight(schedule, i) for i in range(n)] == [min(m, n)] * n
        if m >= n:
            idle = (n - 1) * (forward + backward - weight)
            assert clocks(schedule, *costs) == m * sum(costs) + idle
        whole = clocks(one_f_one_b(range(n), m), forward, backward + weight)
        assert clocks(schedule, *costs) <= whole


@pytest.mark.parametrize("n", range(1, 8))
def test_reference_results_of_eager_zero_bubble(n: int) -> None:
    for m in range(1, 20):
        schedule = zero_bubble(range(n), m, zb_h2=True)
        validate(schedule)
        prove_deadlock_free(lower(schedule, chain(n)))
        assert [in_flight(schedule, i) for i in range(n)] == [min(m, 2 * n - 1)] * n
        work = [(kind, k) for kind in SPLIT_KINDS for k in range(m)]
        for row in schedule.rows:
            assert sorted((a.kind, a.microbatch) for a in row) == sorted(work)
        if m >= 2 * n:
            assert clocks(schedule, 1, 1, 1) == 3 * m + n - 1
            assert clocks(schedule, 1, 1, 1) <= clocks(zero_bubble(range(n), m), 1, 1, 1)


@pytest.mark.parametrize("order", [*ORDERS.values(), forward_only])
@pytest.mark.parametrize(("n", "m"), [(0, 1), (1, 0), (-1, 4)])
def test_counts_below_one(order: ScheduleFactory, n: int, m: int) -> None:
    with pytest.raises(OptionError, match="at least one stage and one microbatch"):
        order(range(n), m)


@hypothesis.given(lowered())
def test_text_round_trip(case: tuple[Schedule, Schedule]) -> None:
    schedule, with_messages = case
    assert parse_schedule(str(schedule)) == schedule
    assert parse_schedule(format_grid(schedule)) == schedule
    parsed = parse_schedule(str(with_messages))
    assert parsed.rows == with_messages.rows
    if with_messages.trains and with_messages.transfers and schedule.n_chunks == 1:
        assert parsed == with_messages


@pytest.mark.parametrize(
    "text", ["", "F0", "2F", "2C0", "2I", "2SW0>1", "2F0>1", "2SF0", "2SF0<1", "2RB0>1", "²F0"]
)
def test_not_an_action(text: str) -> None:
    with pytest.raises(PlanError, match="is not an action of a schedule"):
        parse_action(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [("0F0 0F1\n2F0 2F1", "no stage 1"), ("0F0 0F1\n1F0 0F1", "stage 0 on two devices")],
)
def test_stages_without_a_device(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        parse_schedule(text)


@hypothesis.given(lowered())
def test_lowering_is_valid_and_keeps_the_order(case: tuple[Schedule, Schedule]) -> None:
    schedule, with_messages = case
    validate(with_messages)
    kept = tuple(tuple(a for a in line if a.is_compute) for line in with_messages.rows)
    assert kept == schedule.rows
    for device in range(schedule.n_devices):
        assert in_flight(with_messages, device) == in_flight(schedule, device)
    if schedule.n_chunks == 1 and not schedule.splits_backward:
        assert clocks(with_messages) <= clocks(schedule)


def test_neighbours_lose_no_clock() -> None:
    for n, m in itertools.product((1, 2, 3, 5, 8), (1, 2, 4, 7, 12)):
        for schedule in (one_f_one_b(range(n), m), gpipe(range(n), m)):
            with_messages = lower(schedule, chain(n))
            for backward in (1, 2, 3):
                assert clocks(with_messages, 1, backward) == clocks(schedule, 1, backward)


def test_durations_of_messages_count() -> None:
    times = start_times(lower(gpipe(range(2), 1), chain(2)), lambda a: 10 if a.is_send else 1)
    assert times == ((0, 1, 12 + 1, 23), (1, 11, 12, 13))


def edited(schedule: Schedule, stage: int, old: str, new: str) -> Schedule:
    """`schedule` with `old` replaced by `new` in one stage's text."""
    line = " ".join(map(str, schedule.rows[stage]))
    assert old in line, f"{old} is not in {line}"
    actions = tuple(parse_action(word) for word in line.replace(old, new).split())
    stages = (*schedule.rows[:stage], actions, *schedule.rows[stage + 1 :])
    return replace(schedule, rows=stages)


FAULTS: dict[str, Callable[[], Schedule]] = {
    "never": lambda: edited(gpipe(range(2), 2), 1, "1F1", ""),
    "twice": lambda: edited(gpipe(range(2), 2), 1, "1F1", "1F1 1F1"),
    "too many microbatches": lambda: edited(gpipe(range(2), 2), 1, "1F1", "1F1 1F2"),
    "backward in evaluation": lambda: edited(forward_only(range(2), 2), 1, "1F1", "1F1 1B1"),
    "of another stage": lambda: edited(gpipe(range(2), 2), 1, "1F1", "0F1"),
    "backward first": lambda: edited(gpipe(range(1), 1), 0, "0F0 0B0", "0B0 0F0"),
    "order of forwards": lambda: edited(gpipe(range(2), 2), 0, "0F0 0F1", "0F1 0F0"),
    "order of backwards": lambda: edited(gpipe(range(2), 2), 0, "0B0 0B1", "0B1 0B0"),
    "cycle of computes": lambda: edited(gpipe(range(2), 2), 0, "0F1 0B0", "0B0 0F1"),
    "lost receive": lambda: edited(lower(gpipe(range(2), 2), chain(2)), 1, "1RF1<0", ""),
    "stray message": lambda: edited(
        lower(gpipe(range(3), 1), chain(3)), 0, "0SF0>1", "0SF0>1 0SF0>2"
    ),
    "sent before made": lambda: edited(
        lower(gpipe(range(2), 1), chain(2)), 0, "0F0 0SF0>1", "0SF0>1 0F0"
    ),
    "received too late": lambda: edited(
        lower(gpipe(range(2), 1), chain(2)), 1, "1RF0<0 1F0", "1F0 1RF0<0"
    ),
    "messages exchanged": lambda: edited(
        lower(one_f_one_b(range(2), 2), chain(2)), 1, "1SB0>0 1RF1<0", "1RF1<0 1SB0>0"
    ),
    "backward transfer": lambda: replace(gpipe(range(2), 1), transfers=frozenset({Transfer(1, 0)})),
    "two of a pair": lambda: lower(gpipe(range(2), 1), [Transfer(0, 1), Transfer(0, 1, False)]),
}


def test_messages_of_faults(golden: Golden) -> None:
    texts = []
    for name, make in FAULTS.items():
        with pytest.raises(AutoparError) as failure:
            validate(make())
        assert isinstance(failure.value, VerificationError), name
        texts.append(f"{name}:\n{failure.value}\n")
    golden("schedule_errors.txt", "\n".join(texts))


@hypothesis.given(lowered(), st.data())
def test_any_lost_or_repeated_action_is_noticed(
    case: tuple[Schedule, Schedule], data: st.DataObject
) -> None:
    schedule = case[1]
    device = data.draw(st.integers(0, schedule.n_devices - 1))
    line = schedule.rows[device]
    at = data.draw(st.integers(0, len(line) - 1))
    count = data.draw(st.sampled_from((0, 2)))
    faulty = (*line[:at], *[line[at]] * count, *line[at + 1 :])
    rows = (*schedule.rows[:device], faulty, *schedule.rows[device + 1 :])
    with pytest.raises(
        VerificationError, match=rf"(never runs {line[at]}$|runs {line[at]} 2 times)"
    ):
        validate(replace(schedule, rows=rows))


@hypothesis.given(lowered(), st.data())
def test_exchanged_messages_of_a_pair_are_noticed(
    case: tuple[Schedule, Schedule], data: st.DataObject
) -> None:
    """Two neighbouring messages between the same devices, swapped on one of them."""
    schedule = case[1]
    places = [
        (device, i)
        for device, line in enumerate(schedule.rows)
        for i, (a, b) in enumerate(itertools.pairwise(line))
        if not a.is_compute
        and not b.is_compute
        and schedule.device_of(a.partner.stage) == schedule.device_of(b.partner.stage)
    ]
    hypothesis.assume(places)
    device, i = data.draw(st.sampled_from(places))
    line = list(schedule.rows[device])
    line[i], line[i + 1] = line[i + 1], line[i]
    rows = (*schedule.rows[:device], tuple(line), *schedule.rows[device + 1 :])
    with pytest.raises(VerificationError, match="wait"):
        validate(replace(schedule, rows=rows))
