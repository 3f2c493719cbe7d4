"""The order of forwards and backwards on each device: gpipe, 1f1b, interleaved, zero bubble.

An order is a function of the device of every stage and the number of microbatches. Each has its own
placement (`devices_of`). n stages, m microbatches, p devices of v chunks each. `in flight` is the
largest number of live microbatches on stage i.

    gpipe        all forwards, then all backwards                      in flight m
    1f1b         stage i runs min(m, n - i) forwards, then alternates
                 backward and forward, then the remaining backwards    in flight min(m, n - i)
    interleaved  1f1b over v chunks per device: a round of p microbatches goes through one
                 chunk, then through the next; device i runs 2(p - i - 1) + (v - 1)p + 1
                 forwards before it alternates                         (`interleaved`)
    zero_bubble  1f1b with split backwards: stage i runs the parameter
                 part i microbatches later, as no stage waits for it   in flight min(m, n)
                 `zb_h2`: 2(n - i) - 1 forwards first, and the
                 parameter part 2i microbatches later                  in flight min(m, 2n - 1)

Every stage runs its backwards in the order of its forwards, so gradients add up in the same
order under every schedule. If m <= n - i, stage i has no forwards left to alternate with, so
gpipe and 1f1b are the same list.

The bubble is what a step takes beyond m (f + b). With equal stages and free messages, forward f,
backward b, and w the parameter part of b, it is:

    gpipe, 1f1b    (n - 1)(f + b)              interleaved    (p - 1)(f + b) / v
    zero_bubble    (n - 1)(f + b - 2w)         if w <= f, w <= b / 2 and n <= m
    zb_h2          (n - 1) f                   if w = f = b / 2 and 2n <= m: only the fill is left

Sources: GPipe, Huang et al. 2019; PipeDream-Flush and interleaving, Narayanan et al. 2021 (arXiv
2104.04473, figure 4); ZB-H1 and ZB-H2, Qi et al. 2023 (arXiv 2401.10241, figures 2 and 3).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

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
}


def devices_of(order: str, n_devices: int, n_chunks: int) -> tuple[int, ...]:
    """The device of every stage, as `order` places them: round after round over the devices.

    Raises `OptionError` for a number of chunks that `order` cannot have.
    """
    fewest, most = CHUNKS[order]
    if n_chunks < fewest or (most is not None and n_chunks > most):
        wanted = f"{fewest}" if most == fewest else f"{fewest} or more"
        raise OptionError(
            f"{n_chunks} stages on each device, which {order} cannot schedule",
            hint=f"{order} takes {wanted} on each device",
        )
    return tuple(range(n_devices)) * n_chunks


def gpipe(devices: Sequence[int], n_microbatches: int) -> Schedule:
    """All forwards, then all backwards."""
    n_devices, _ = _counts("gpipe", devices, n_microbatches)
    return _eager(n_devices, n_microbatches, [n_microbatches] * n_devices)


def one_f_one_b(devices: Sequence[int], n_microbatches: int) -> Schedule:
    """Each backward as early as possible: at most n - i microbatches are live on stage i."""
    n_devices, _ = _counts("1f1b", devices, n_microbatches)
    return _eager(n_devices, n_microbatches, range(n_devices, 0, -1))


def interleaved(devices: Sequence[int], n_microbatches: int) -> Schedule:
    """1f1b over v stages on each device: the bubble is v times shorter.

    In flight on device i are min(m v, 2(p - i - 1) + (v - 1)p + 1) chunks.

    Raises `OptionError` if `n_microbatches` is not a multiple of the number of devices.
    """
    n_devices, n_chunks = _counts("interleaved", devices, n_microbatches)
    if n_microbatches % n_devices:
        raise OptionError(
            f"{n_microbatches} microbatches are not in whole rounds of {n_devices}, the number of "
            "devices, which an interleaved schedule needs",
            hint=f"use a multiple of {n_devices} microbatches",
        )
    turns = [
        (chunk, first + k)
        for first in range(0, n_microbatches, n_devices)
        for chunk in range(n_chunks)
        for k in range(n_devices)
    ]
    rows = []
    for device in range(n_devices):
        forwards = [Action("forward", c * n_devices + device, k) for c, k in turns]
        backwards = [
            Action("backward", (n_chunks - 1 - c) * n_devices + device, k) for c, k in turns
        ]
        n_first = 2 * (n_devices - device - 1) + (n_chunks - 1) * n_devices + 1
        rows.append(_in_turn(forwards, backwards, n_first))
    return Schedule(tuple(rows), tuple(devices), n_microbatches)


def zero_bubble(devices: Sequence[int], n_microbatches: int, *, zb_h2: bool = False) -> Schedule:
    """ZB-H1: parameter gradients fill the bubble. Every stage needs the memory of 1f1b's stage 0.

    zb_h2    ZB-H2: almost no bubble, with twice that memory
    """
    n_stages, _ = _counts("zero-bubble", devices, n_microbatches)
    rows = []
    for stage in range(n_stages):
        n_first = 2 * (n_stages - stage) - 1 if zb_h2 else n_stages - stage
        delay = 2 * stage if zb_h2 else stage
        forwards = _all("forward", stage, n_microbatches)
        backwards = _all("backward_input", stage, n_microbatches)
        late = _all("backward_weight", stage, n_microbatches)
        row: list[Action] = []
        for action in _in_turn(forwards, backwards, n_first):
            row.append(action)
            if action.kind == "backward_input" and action.microbatch >= delay:
                row.append(late[action.microbatch - delay])
        row += late[max(0, n_microbatches - delay) :]
        rows.append(tuple(row))
    return Schedule(tuple(rows), tuple(devices), n_microbatches, splits_backward=True)


def forward_only(devices: Sequence[int], n_microbatches: int) -> Schedule:
    """Forwards only, for evaluation, of stages on any devices.

    A device runs its stages by rounds of p microbatches.
    """
    n_devices = _n_devices(devices, n_microbatches)
    rows: list[list[Action]] = [[] for _ in range(n_devices)]
    for first in range(0, n_microbatches, n_devices):
        last = min(first + n_devices, n_microbatches)
        for stage, device in enumerate(devices):
            rows[device] += _all("forward", stage, last)[first:]
    return Schedule(tuple(map(tuple, rows)), tuple(devices), n_microbatches, trains=False)


# Keyed by the words of the option `schedule`.
ORDERS: Mapping[str, ScheduleFactory] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zero-bubble": zero_bubble,
}


def _eager(n_stages: int, n_microbatches: int, n_first: Sequence[int]) -> Schedule:
    """On stage i, `n_first[i]` forwards first, then as `_in_turn`."""
    rows = tuple(
        _in_turn(
            _all("forward", stage, n_microbatches),
            _all("backward", stage, n_microbatches),
            n_first[stage],
        )
        for stage in range(n_stages)
    )
    return Schedule(rows, tuple(range(n_stages)), n_microbatches)


def _all(kind: Kind, stage: int, n_microbatches: int) -> list[Action]:
    return [Action(kind, stage, k) for k in range(n_microbatches)]


def _in_turn(forwards: list[Action], backwards: list[Action], n_first: int) -> tuple[Action, ...]:
    """`n_first` forwards, then a backward and a forward in turn, then the remaining backwards."""
    row = forwards[:n_first]
    rest = iter(forwards[n_first:])
    for backward in backwards:
        row.append(backward)
        row.extend(itertools.islice(rest, 1))
    return tuple(row)


def _counts(order: str, devices: Sequence[int], n_microbatches: int) -> tuple[int, int]:
    """The numbers of devices and of stages on each.

    Raises `OptionError` if `order` places its stages on other devices.
    """
    n_devices = _n_devices(devices, n_microbatches)
    n_chunks = len(devices) // n_devices
    expected = devices_of(order, n_devices, n_chunks)
    if tuple(devices) != expected:
        raise OptionError(
            f"stages on devices {_listed(devices)}, which {order} cannot schedule",
            hint=f"place them on {_listed(expected)}",
        )
    return n_devices, n_chunks


def _listed(devices: Sequence[int]) -> str:
    return ", ".join(map(str, devices))


def _n_devices(devices: Sequence[int], n_microbatches: int) -> int:
    if not devices or n_microbatches < 1:
        raise OptionError(
            f"a schedule needs at least one stage and one microbatch, not {len(devices)} and "
            f"{n_microbatches}"
        )
    return len(set(devices))
