"""The order of forwards and backwards on each device, schedule by schedule.

An order is a function of the device of every stage and the number of microbatches. Each has its own
placement (`devices_of`): stages go over the devices in rounds, or, in the V shapes, down and up
again. Each device runs some forwards first, then a backward and a forward in turn, then the
remaining backwards (`_row`). If backwards are split, the parameter part may lag (`_split`).

    gpipe          all forwards first
    1f1b           device i runs n - i forwards first
    interleaved    1f1b over v stages a device: a round of microbatches goes through one stage, then
                   through the next; 2(p - i - 1) + (v - 1)r + 1 forwards first
    zero-bubble    1f1b with split backwards: device i runs the parameter part i microbatches later,
                   as no stage waits for it
        `zb_h2`    2(n - i) - 1 forwards first, and the parameter part 2i microbatches later
    zero-bubble-v  stages i and 2p - 1 - i on device i: 2p forwards first, then a forward, an input
                   part and a parameter part of one stage, then of the other; parameter parts lag at
                   the end
    dualpipe-v     the same with one more forward ahead, and the parameter parts lag less

n stages, m microbatches, p devices of v stages, rounds of r >= p microbatches (r = p if p divides
m). A stage's forward takes f, the input part of its backward b, the parameter part w. The bubble is
what a step takes beyond v m (f + b + w), with equal stages and free messages. `in flight` is the
largest number of live microbatches on device i, counted once a stage (`live.py`).

                   bubble                                                    in flight
    gpipe          (n - 1)(f + b + w)                                        m
    1f1b           (n - 1)(f + b + w)                                        min(m, n - i)
    interleaved    (p - 1)(f + b + w)        if p divides m
                                              min(m v, 2(p - i - 1) + (v - 1)r + 1)
    zero-bubble    (n - 1)(f + b - w)        if w <= f, w <= b, n <= m       min(m, n)
        `zb_h2`    (n - 1) f                 if w = f = b, 2n <= m           min(m, 2n - 1)
    zero-bubble-v  (p - 1) max(b, 2(b - w))  if f <= b, w <= b, 2p <= m + 1  2p
    dualpipe-v     (p - 1)(f + b - w)        if f = b, w <= b                2p + 1

For f = b = w, the V shapes idle while the devices fill, p - 1 forwards of half a stage, as their
papers say. DualPipe's has (p - 1)(F&B + B - 3W) with B = b + w: a forward and a backward that
overlap are one action there, and their results are there when both are done. Here they are two, so
a step is (p - 1) b shorter.

Microbatches of a stage come in one order in every kind of action, so gradients add up in the same
order under every schedule. If m <= n - i, stage i has no forwards left to take turns with, so
gpipe and 1f1b are the same list.

Sources: GPipe, Huang et al. 2019; PipeDream-Flush and interleaving, Narayanan et al. 2021 (arXiv
2104.04473, figure 4); ZB-H1 and ZB-H2, Qi et al. 2023 (arXiv 2401.10241, figures 2 and 3); ZB-V,
Qi et al. 2024 (arXiv 2405.15362); DualPipe, DeepSeek-V3 2024 (arXiv 2412.19437, figure 5), of which
DualPipeV is one half.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from autopar.errors import OptionError
from autopar.schedule.actions import Action, Kind, Schedule

# (the device of each stage, number of microbatches) -> the schedule
ScheduleFactory = Callable[[Sequence[int], int], Schedule]

# Fewest and most stages of a device, by the words of the option `schedule`.
CHUNKS: Mapping[str, tuple[int, int | None]] = {
    "gpipe": (1, 1),
    "1f1b": (1, 1),
    "interleaved": (2, None),
    "zero-bubble": (1, 1),
    "zero-bubble-v": (2, 2),
    "dualpipe-v": (2, 2),
}
_V_SHAPED = ("zero-bubble-v", "dualpipe-v")
# Those that run backward as two actions.
SPLITS_BACKWARD = frozenset({"zero-bubble", *_V_SHAPED})


def devices_of(order: str, n_devices: int, n_chunks: int) -> tuple[int, ...]:
    """The device of every stage, as `order` places them: 0, 1, 0, 1 or, in a V, 0, 1, 1, 0.

    Raises `OptionError` for a number of chunks that `order` cannot have.
    """
    fewest, most = CHUNKS[order]
    if n_chunks < fewest or (most is not None and n_chunks > most):
        wanted = f"{fewest}" if most == fewest else f"{fewest} or more"
        raise OptionError(
            f"{n_chunks} stages on each device, which {order} cannot schedule",
            hint=f"{order} takes {wanted} on each device",
        )
    there = tuple(range(n_devices))
    return there + there[::-1] if order in _V_SHAPED else there * n_chunks


def fewest_microbatches(order: str, n_devices: int) -> int:
    """The fewest microbatches that `order` can schedule."""
    return 2 * n_devices if order == "dualpipe-v" else 1


def check_microbatches(order: str, n_devices: int, n_microbatches: int) -> None:
    """Raises `OptionError` for fewer microbatches than `order` can schedule."""
    fewest = fewest_microbatches(order, n_devices)
    if n_microbatches < fewest:
        raise OptionError(
            f"{n_microbatches} microbatches on {n_devices} devices, fewer than {order} can "
            "schedule",
            hint=f"use at least {fewest} microbatches, or zero-bubble-v",
        )


def gpipe(devices: Sequence[int], n_microbatches: int) -> Schedule:
    """All forwards, then all backwards."""
    return _schedule(devices, n_microbatches, _rows("gpipe", devices, n_microbatches))


def one_f_one_b(devices: Sequence[int], n_microbatches: int) -> Schedule:
    """Each backward as early as possible: at most n - i microbatches are live on stage i."""
    return _schedule(devices, n_microbatches, _rows("1f1b", devices, n_microbatches))


def interleaved(devices: Sequence[int], n_microbatches: int) -> Schedule:
    """1f1b over several stages on each device: the bubble is as many times shorter.

    Megatron's order, which takes whole rounds of p microbatches. Other numbers are cut into as many
    rounds of p or a few more, of which the first are the longest.
    """
    return _schedule(devices, n_microbatches, _rows("interleaved", devices, n_microbatches))


def zero_bubble(devices: Sequence[int], n_microbatches: int, *, zb_h2: bool = False) -> Schedule:
    """ZB-H1: parameter gradients fill the bubble. Every stage needs the memory of 1f1b's stage 0.

    zb_h2    ZB-H2: almost no bubble, with twice that memory
    """
    n, m = _n_devices("zero-bubble", devices, n_microbatches), n_microbatches
    rows = []
    for i in range(n):
        n_first, lag = (2 * (n - i) - 1, 2 * i) if zb_h2 else (n - i, i)
        rows.append(_split(_row(m, _one_stage(i, m, n_first)), m, lag))
    return _schedule(devices, m, rows)


def zero_bubble_v(devices: Sequence[int], n_microbatches: int) -> Schedule:
    """ZB-V: the bubble of ZB-H2 with the memory of 1f1b's stage 0."""
    rows = _rows("zero-bubble-v", devices, n_microbatches)
    split = [_split(row, len(rows) + i, 2 * i) for i, row in enumerate(rows)]
    return _schedule(devices, n_microbatches, split)


def dualpipe_v(devices: Sequence[int], n_microbatches: int) -> Schedule:
    """DualPipeV: a forward and a backward of different stages are neighbours.

    Raises `OptionError` for fewer than 2p microbatches.
    """
    rows = _rows("dualpipe-v", devices, n_microbatches)
    check_microbatches("dualpipe-v", len(rows), n_microbatches)
    split = [_split(row, len(rows), i) for i, row in enumerate(rows)]
    return _schedule(devices, n_microbatches, split)


def forward_only(devices: Sequence[int], n_microbatches: int) -> Schedule:
    """Forwards only, for evaluation, of stages on any devices: the last stage that can run, first.

    It is what happens at equal costs, clock by clock.
    """
    _check_counts(devices, n_microbatches)
    rows: list[list[Action]] = [[] for _ in set(devices)]
    n_done = [0] * len(devices)
    while n_done[-1] < n_microbatches:
        n_arrived = [n_microbatches, *n_done]
        ready = (stage for stage, n in enumerate(n_done) if n < n_arrived[stage])
        for stage in {devices[stage]: stage for stage in ready}.values():
            rows[devices[stage]].append(Action("forward", stage, n_done[stage]))
            n_done[stage] += 1
    return Schedule(tuple(map(tuple, rows)), tuple(devices), n_microbatches, trains=False)


# Keyed by the words of the option `schedule`.
ORDERS: Mapping[str, ScheduleFactory] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zero-bubble": zero_bubble,
    "zero-bubble-v": zero_bubble_v,
    "dualpipe-v": dualpipe_v,
}


def first_forwards(order: str, devices: Sequence[int], n_microbatches: int) -> tuple[int, ...]:
    """The forwards of every stage before the first backward of its device: so many microbatches of
    it are live then. The schedule is not made."""
    p, found = len(set(devices)), [0] * len(devices)
    for i in range(p):
        turns = _TURNS[order](p, i, len(devices) // p, n_microbatches)
        n_first = turns.n_first + (turns.more[1] if turns.more[0] == 0 else 0)
        for stage in itertools.islice(turns.forwards, n_first):
            found[stage] += 1
    return tuple(min(n, n_microbatches) for n in found)


class _Turns(NamedTuple):
    """`n_first` forwards, then a backward and a forward in turn, then the remaining backwards.

    forwards, backwards    the stage of each. Beyond the number of microbatches, a forward of a
                           stage is a turn in which nothing runs, and a backward is left out
    more                   (k, n): before backward k, `n` forwards more
    """

    forwards: Iterable[int]
    backwards: Iterable[int]
    n_first: int
    more: tuple[int, int] = (0, 0)


def _one_stage(i: int, m: int, n_first: int) -> _Turns:
    return _Turns(itertools.repeat(i, m), itertools.repeat(i, m), n_first)


def _in_rounds(p: int, i: int, v: int, m: int) -> _Turns:
    n_rounds = max(1, m // p)
    rounds = [m // n_rounds + (k < m % n_rounds) for k in range(n_rounds)]
    stages = range(i, v * p, p)
    forwards = (stage for size in rounds for stage in stages for _ in range(size))
    backwards = (stage for size in rounds for stage in stages[::-1] for _ in range(size))
    return _Turns(forwards, backwards, 2 * (p - i - 1) + (v - 1) * rounds[0] + 1)


def _in_a_v(p: int, i: int, m: int, n_more: int) -> _Turns:
    """2p forwards first; `n_more` more from backward p - i - 1 on."""
    down, up = i, 2 * p - 1 - i
    in_turn = [down, up] * m
    forwards = [down] * (2 * (p - i) - 1) + [up, down] * i + [up] * (p - i) + in_turn
    return _Turns(forwards, [up] * (p - i) + in_turn, 2 * p, (p - i - 1, n_more))


# Order -> the turns of device i of p, which has v stages, with m microbatches.
_TURNS: Mapping[str, Callable[[int, int, int, int], _Turns]] = {
    "gpipe": lambda p, i, v, m: _one_stage(i, m, m),
    "1f1b": lambda p, i, v, m: _one_stage(i, m, p - i),
    "interleaved": _in_rounds,
    "zero-bubble": lambda p, i, v, m: _one_stage(i, m, p - i),
    "zero-bubble-v": lambda p, i, v, m: _in_a_v(p, i, m, 0),
    "dualpipe-v": lambda p, i, v, m: _in_a_v(p, i, m, 1),
}


def _rows(order: str, devices: Sequence[int], m: int) -> list[list[Action]]:
    """The rows of all devices, with whole backwards."""
    p = _n_devices(order, devices, m)
    return [_row(m, _TURNS[order](p, i, len(devices) // p, m)) for i in range(p)]


def _row(m: int, turns: _Turns) -> list[Action]:
    ahead = _numbered("forward", turns.forwards)
    row: list[Action] = []
    n_done, at = 0, turns.n_first
    made = (action for action in _numbered("backward", turns.backwards) if action.microbatch < m)
    for k, backward in enumerate(made):
        at += turns.more[1] if k == turns.more[0] else 0
        row += [*ahead[n_done : at + k], backward]
        n_done = max(n_done, at + k)
    return [action for action in row if action.microbatch < m]


def _numbered(kind: Kind, stages: Iterable[int]) -> list[Action]:
    """Actions of these stages; each stage takes its microbatches in order."""
    n_done, actions = Counter[int](), list[Action]()
    for stage in stages:
        actions.append(Action(kind, stage, n_done[stage]))
        n_done[stage] += 1
    return actions


def _split(row: Sequence[Action], n_late: int, lag: int) -> list[Action]:
    """The row with every backward in two parts.

    The parameter part comes right after the input part. In the last `n_late` backwards, it is that
    of `lag` backwards before.
    """
    n_left = sum(action.kind == "backward" for action in row)
    waiting, split = deque[Action](), list[Action]()
    for action in row:
        if action.kind == "forward":
            split.append(action)
            continue
        split.append(action._replace(kind="backward_input"))
        waiting.append(action._replace(kind="backward_weight"))
        if n_left > n_late or len(waiting) > lag:
            split.append(waiting.popleft())
        n_left -= 1
    return [*split, *waiting]


def _schedule(devices: Sequence[int], m: int, rows: Iterable[Iterable[Action]]) -> Schedule:
    kept = tuple(map(tuple, rows))
    splits = kept[0][-1].kind == "backward_weight"
    return Schedule(kept, tuple(devices), m, splits_backward=splits)


def _n_devices(order: str, devices: Sequence[int], n_microbatches: int) -> int:
    """The number of devices. Raises `OptionError` unless the stages are where `order` has them."""
    _check_counts(devices, n_microbatches)
    n_devices = len(set(devices))
    expected = devices_of(order, n_devices, len(devices) // n_devices)
    if tuple(devices) != expected:
        placed, wanted = (", ".join(map(str, at)) for at in (devices, expected))
        raise OptionError(
            f"stages on devices {placed}, which {order} cannot schedule",
            hint=f"place them on {wanted}",
        )
    return n_devices


def _check_counts(devices: Sequence[int], n_microbatches: int) -> None:
    if not devices or n_microbatches < 1:
        raise OptionError(
            f"a schedule needs at least one stage and one microbatch, not {len(devices)} and "
            f"{n_microbatches}"
        )
