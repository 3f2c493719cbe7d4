"""Orders: bubbles and live microbatches by formula, placements, and a thousand random ones."""

from __future__ import annotations

import itertools
import random

import pytest

from autopar.cost.simulate import PartWork, SplitBackward, StageTimes, simulate
from autopar.errors import OptionError
from autopar.schedule import (
    CHUNKS,
    GRADIENTS_DONE,
    ORDERS,
    Schedule,
    Transfer,
    chain,
    clocks,
    devices_of,
    even_in_flight,
    fewest_microbatches,
    first_forwards,
    forward_only,
    in_flight,
    in_flight_by_stage,
    live_counts,
    lower,
    parse_schedule,
    script_of,
    validate,
    zero_bubble,
)
from tests.helpers.nightly import one_in
from tests.helpers.strategies import placed

NOTHING = PartWork()
V_SHAPED = ("zero-bubble-v", "dualpipe-v")


def bubble(schedule: Schedule, forward_s: float, input_s: float, weight_s: float) -> float:
    """The simulated bubble of equal stages and free messages."""
    parts = SplitBackward(PartWork(input_s), PartWork(weight_s))
    stage = StageTimes(1, NOTHING, PartWork(forward_s), parts, NOTHING, 0.0)
    return simulate(schedule, [stage] * schedule.n_stages).bubble


def fraction(idle_s: float, p: int, busy_s: float) -> float:
    """The bubble of devices that each work `busy_s` and idle `idle_s`."""
    return idle_s / (busy_s + idle_s) if p > 1 else 0.0


@pytest.mark.parametrize("costs", [(1.0, 1.0, 1.0), (1.0, 1.2, 0.8), (2.0, 2.0, 1.0)])
def test_bubbles_of_the_papers(costs: tuple[float, float, float]) -> None:
    f, b, w = costs
    for p, rounds in itertools.product((1, 2, 3, 4, 6), (2, 3)):
        m = p * rounds
        whole = fraction(p - 1, p, m)
        for order in ("gpipe", "1f1b"):
            assert bubble(placed(order, p, m), *costs) == pytest.approx(whole)
        for v in (2, 3):
            found = bubble(placed("interleaved", p, m, v), *costs)
            assert found == pytest.approx(fraction(p - 1, p, v * m))
        if w <= f:
            found = bubble(placed("zero-bubble", p, m), *costs)
            assert found == pytest.approx(fraction((p - 1) * (f + b - w), p, m * (f + b + w)))
        found = bubble(placed("zero-bubble-v", p, m, 2), *costs)
        idle_s = (p - 1) * max(b, 2 * (b - w))
        assert found == pytest.approx(fraction(idle_s, p, 2 * m * (f + b + w)))
        if f == b:
            found = bubble(placed("dualpipe-v", p, m, 2), *costs)
            idle_s = (p - 1) * (f + b - w)
            assert found == pytest.approx(fraction(idle_s, p, 2 * m * (f + b + w)))


def test_equal_parts_leave_the_fill_alone() -> None:
    """(p - 1)/(3m + p - 1) for ZB-H1, and half of it for the V shapes: m twice as short parts."""
    for p, rounds in itertools.product((2, 4, 8), (2, 4)):
        m = p * rounds
        once = bubble(placed("zero-bubble", p, m), 1.0, 1.0, 1.0)
        assert once == pytest.approx((p - 1) / (3 * m + p - 1))
        for order in V_SHAPED:
            found = bubble(placed(order, p, m, 2), 1.0, 1.0, 1.0)
            assert found == pytest.approx((p - 1) / (6 * m + p - 1))


def test_rounds_need_not_be_whole() -> None:
    """No more bubble than 1f1b's, and at most the memory of rounds of twice the devices."""
    for p, v, m in itertools.product(range(1, 7), (2, 3), range(1, 20)):
        schedule = placed("interleaved", p, m, v)
        validate(schedule)
        assert clocks(schedule, 1, 2) <= 3 * v * (m + p - 1)
        r = m // max(1, m // p) + (m % max(1, m // p) > 0)
        kept = [min(m * v, 2 * (p - i - 1) + (v - 1) * r + 1) for i in range(p)]
        assert [in_flight(schedule, i) for i in range(p)] == kept


def test_live_microbatches_of_v_shapes() -> None:
    for p, more in itertools.product(range(1, 7), range(4)):
        m = 2 * p + more
        for order, most in (("zero-bubble-v", 2 * p), ("dualpipe-v", 2 * p + 1)):
            schedule = placed(order, p, m, 2)
            assert [in_flight(schedule, i) for i in range(p)] == [most] * p
            assert in_flight_by_stage(schedule) == tuple(2 * p - s for s in range(2 * p))
            lag = [max(1, i + 1 if order == "zero-bubble-v" else i // 2 + 1) for i in range(p)]
            waits = most_waiting(schedule)
            assert all(waits[i] <= lag[i] + 1 and waits[-1 - i] <= lag[i] for i in range(p))


@pytest.mark.parametrize("order", ORDERS)
def test_first_forwards_need_no_schedule(order: str) -> None:
    """So many forwards of each stage are before the first backward of its device."""
    fewest, most = CHUNKS[order]
    for p, v, m in itertools.product((1, 2, 3, 5), range(fewest, (most or 4) + 1), (1, 2, 7, 12)):
        if m < fewest_microbatches(order, p):
            continue
        schedule, found = placed(order, p, m, v), [0] * (p * v)
        for row in schedule.rows:
            for action in itertools.takewhile(lambda a: a.kind == "forward", row):
                found[action.stage] += 1
        assert first_forwards(order, schedule.devices, m) == tuple(found)
        assert min(found) > 0


@pytest.mark.parametrize("order", ORDERS)
def test_stages_of_a_device_share_its_most_microbatches(order: str) -> None:
    """Together they have the most of the device, and none has more than its own most."""
    fewest, most = CHUNKS[order]
    for p, v, m in itertools.product((1, 2, 3, 5), range(fewest, (most or 4) + 1), (1, 2, 7, 12)):
        if m < fewest_microbatches(order, p):
            continue
        schedule = placed(order, p, m, v)
        even, own = even_in_flight(schedule), in_flight_by_stage(schedule)
        assert all(n <= most for n, most in zip(even, own, strict=True))
        for device in range(p):
            together = sum(even[stage] for stage in schedule.stages_on(device))
            assert together == pytest.approx(in_flight(schedule, device))
        if v == 1:
            assert even == own


def most_waiting(schedule: Schedule) -> list[int]:
    """Of each stage, the most microbatches whose backward lacks its second part."""
    found = [0] * schedule.n_stages
    for device in range(schedule.n_devices):
        for count in live_counts(schedule, device):
            for stage, n in zip(schedule.stages_on(device), count.waiting, strict=True):
                found[stage] = max(found[stage], n)
    return found


@pytest.mark.parametrize("order", ORDERS)
def test_live_counts_hold_every_moment(order: str) -> None:
    """For any bytes of a live and of a waiting microbatch, one of them is the peak of the row."""
    schedule = placed(order, 3, 7, CHUNKS[order][0])
    for device in range(3):
        stages = schedule.stages_on(device)
        counts = live_counts(schedule, device)
        for kept, left in itertools.product((1.0, 5.0), (0.0, 1.0, 7.0)):
            now, most = 0.0, 0.0
            for action in schedule.rows[device]:
                scale = 1 + action.stage
                ends = action.kind in GRADIENTS_DONE
                now += kept * scale * (action.kind == "forward")
                now += (left - kept) * scale * (action.kind == "backward_input")
                now -= (left if schedule.splits_backward else kept) * scale * ends
                most = max(most, now)
            peak = max(
                sum(
                    (1 + s) * (kept * (live - waits) + left * waits)
                    for s, live, waits in zip(stages, *count, strict=True)
                )
                for count in counts
            )
            assert peak == pytest.approx(most)


@pytest.mark.parametrize(
    ("order", "devices", "m", "message"),
    [
        ("1f1b", (0, 1, 0, 1), 4, "2 stages on each device, which 1f1b cannot schedule"),
        ("1f1b", (1, 0), 4, "stages on devices 1, 0, which 1f1b cannot schedule"),
        ("interleaved", (0, 1, 1, 0), 4, "devices 0, 1, 1, 0, which interleaved cannot schedule"),
        ("interleaved", (0, 1), 4, "1 stages on each device, which interleaved cannot schedule"),
        ("interleaved", (0, 1, 0), 4, "1 stages on each device"),
        ("zero-bubble-v", (0, 1, 0, 1), 4, "0, 1, 0, 1, which zero-bubble-v cannot schedule"),
        ("zero-bubble-v", (0, 1) * 3, 4, "3 stages on each device"),
        ("dualpipe-v", (0, 1, 1, 0), 3, "3 microbatches on 2 devices, fewer than dualpipe-v"),
        ("interleaved", (), 4, "at least one stage"),
    ],
)
def test_other_placements_are_refused(
    order: str, devices: tuple[int, ...], m: int, message: str
) -> None:
    with pytest.raises(OptionError, match=message) as failure:
        ORDERS[order](devices, m)
    assert failure.value.hint or not devices


def step_s(schedule: Schedule, message_s: float, sends_as_made: bool) -> float:
    stage = StageTimes(
        1, NOTHING, PartWork(1.0), SplitBackward(PartWork(1.0), PartWork(1.0)), NOTHING, 0.0
    )
    stages = [stage] * schedule.n_stages
    return simulate(schedule, stages, message_s, sends_as_made=sends_as_made).step_time_s


def test_receives_are_posted_in_time() -> None:
    """Messages of 5% of a forward cost what they cost at best: on the way in and out."""
    for p, m, order in itertools.product((2, 4, 8), (16, 32), V_SHAPED):
        schedule = placed(order, p, m, 2)
        at_best = step_s(schedule, 0.05, True)
        assert step_s(schedule, 0.05, False) == pytest.approx(at_best)
    for p, m, v in ((4, 8, 2), (4, 16, 2), (4, 16, 4), (8, 32, 4)):
        schedule = placed("interleaved", p, m, v)
        closed_s = 3 * (m * v + p - 1) + 0.05 * 2 * (p * v - 1)
        assert step_s(schedule, 0.05, True) == pytest.approx(closed_s)
        assert step_s(schedule, 0.05, False) == pytest.approx(closed_s)
    longer = placed("interleaved", 4, 32, 4)
    assert step_s(longer, 0.05, False) <= 1.01 * step_s(longer, 0.05, True)


def test_stages_of_a_device() -> None:
    schedule = placed("zero-bubble-v", 3, 6, 2)
    assert schedule.devices == (0, 1, 2, 2, 1, 0)
    assert [schedule.stages_on(i) for i in range(3)] == [(0, 5), (1, 4), (2, 3)]
    inside = [t for t in sorted(chain(6)) if schedule.is_inside(t)]
    assert inside == [Transfer(2, 3)]
    sent = {a.stage for a in lower(schedule, chain(6)) if a.kind == "send_forward"}
    assert sent == {0, 1, 3, 4}


def test_forwards_of_any_placement() -> None:
    """Looped and V-shaped stages idle only while the pipeline fills and drains."""
    for p, m in itertools.product((1, 2, 4), (1, 3, 4, 8)):
        for v in (1, 2, 3):
            found = clocks(forward_only(tuple(range(p)) * v, m))
            whole_rounds = -(-m // p) * p
            assert found <= whole_rounds * v + p - 1
        v_shape = forward_only(devices_of("zero-bubble-v", p, 2), m)
        assert clocks(v_shape) <= 2 * m + 2 * p - 2
        validate(v_shape)


def random_schedule(drawn: random.Random, order: str) -> Schedule:
    p, v, m = drawn.randint(1, 8), drawn.randint(1, 4), drawn.randint(1, 24)
    if order == "forward":
        at = [drawn.randrange(p) for _ in range(p * v)]
        return forward_only([sorted({*at}).index(device) for device in at], m)
    if order == "zb-h2":
        return zero_bubble(range(p), m, zb_h2=True)
    return placed(order, p, m, v)


@one_in(5)
@pytest.mark.parametrize("seed", range(20))
def test_random_schedules_finish_or_are_refused(seed: int) -> None:
    """Fifty each: any order, p, v and m, with a chain of transfers and random ones beside it."""
    drawn = random.Random(seed)
    refused: list[tuple[str, str]] = []
    for order in drawn.choices((*ORDERS, "zb-h2", "forward"), k=50):
        try:
            schedule = random_schedule(drawn, order)
        except OptionError as refusal:
            refused.append((order, str(refusal)))
            continue
        n = schedule.n_stages
        pairs = list(itertools.combinations(range(n), 2))
        skips = drawn.sample(pairs, min(len(pairs), drawn.randint(0, 4)))
        transfers = {(t.source, t.target): t for t in chain(n)}
        transfers |= {pair: Transfer(*pair, drawn.random() < 0.7) for pair in skips}
        lowered = lower(schedule, transfers.values())
        validate(lowered)
        assert parse_schedule(str(schedule)) == schedule
        sends = [(action.stage, action.peer) for action in lowered if action.is_send]
        assert not any(b is None or schedule.is_inside(Transfer(a, b)) for a, b in sends)
        assert len(sends) == script_of(lowered).n_messages
    assert len(refused) < 35
    assert all(order in text and "hint" in text for order, text in refused)
