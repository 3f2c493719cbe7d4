"""The order of forwards and backwards on each device: gpipe, 1f1b, interleaved, zero bubble.

n stages, m microbatches, p devices of v chunks each (stage s on device s mod p). `in flight` is
the largest number of live microbatches on stage i.

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
from collections.abc import Callable

from autopar.errors import OptionError
from autopar.schedule.actions import Action, Kind, Schedule


def gpipe(n_stages: int, n_microbatches: int) -> Schedule:
    """All forwards, then all backwards."""
    return _with_first(n_stages, n_microbatches, lambda stage: n_microbatches)


def one_f_one_b(n_stages: int, n_microbatches: int) -> Schedule:
    """Each backward as early as possible: at most n - i microbatches are live on stage i."""
    return _with_first(n_stages, n_microbatches, lambda stage: n_stages - stage)


def interleaved(n_devices: int, n_chunks: int, n_microbatches: int) -> Schedule:
    """1f1b over `n_chunks` stages on each device: the bubble is `n_chunks` times shorter.

    In flight on device i are min(m v, 2(p - i - 1) + (v - 1)p + 1) chunks. With one chunk, this
    is 1f1b.

    Raises `OptionError` if `n_microbatches` is not a multiple of `n_devices`.
    """
    _check_counts(n_devices * n_chunks, n_microbatches)
    if n_chunks == 1:
        return one_f_one_b(n_devices, n_microbatches)
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
    return Schedule(tuple(rows), n_microbatches, n_chunks=n_chunks)


def zero_bubble(n_stages: int, n_microbatches: int, *, zb_h2: bool = False) -> Schedule:
    """ZB-H1: parameter gradients fill the bubble. Every stage needs the memory of 1f1b's stage 0.

    zb_h2    ZB-H2: almost no bubble, with twice that memory
    """
    _check_counts(n_stages, n_microbatches)
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
    return Schedule(tuple(rows), n_microbatches, splits_backward=True)


def forward_only(n_stages: int, n_microbatches: int) -> Schedule:
    """Forwards only, for evaluation."""
    _check_counts(n_stages, n_microbatches)
    stages = tuple(
        tuple(Action("forward", stage, k) for k in range(n_microbatches))
        for stage in range(n_stages)
    )
    return Schedule(stages, n_microbatches, trains=False)


# Keyed by the words of the option `schedule`.
ORDERS: dict[str, Callable[[int, int], Schedule]] = {"gpipe": gpipe, "1f1b": one_f_one_b}


def _with_first(n_stages: int, n_microbatches: int, first: Callable[[int], int]) -> Schedule:
    """On each stage, `first(stage)` forwards first, then as `_in_turn`."""
    _check_counts(n_stages, n_microbatches)
    rows = tuple(
        _in_turn(
            _all("forward", stage, n_microbatches),
            _all("backward", stage, n_microbatches),
            first(stage),
        )
        for stage in range(n_stages)
    )
    return Schedule(rows, n_microbatches)


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


def _check_counts(n_stages: int, n_microbatches: int) -> None:
    if n_stages < 1 or n_microbatches < 1:
        raise OptionError(
            f"a schedule needs at least one stage and one microbatch, not {n_stages} and "
            f"{n_microbatches}"
        )
