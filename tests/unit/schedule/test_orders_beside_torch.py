"""Orders beside those of `torch.distributed.pipelining`, action by action.

torch lists each rank's actions without a process group. A backward that overlaps a forward is there
one action of two; here the forward comes first, then the two parts of the backward.

GPipe, 1F1B, interleaved and DualPipeV are the same lists. ZB-V has the same forwards and input
parts; its parameter parts come in the order of their input parts, while torch ends a step with all
of one stage, then all of the other. For m < 2p - 1, torch leaves microbatches out of a step of
2p - 1, and the places where they would have run stay empty; here they do not.
"""

from __future__ import annotations

import itertools
import re

import pytest
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

from autopar.schedule import Schedule, clocks, in_flight, parse_schedule, validate
from tests.helpers.strategies import placed

NAMES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "zero-bubble-v": "ZBVZeroBubble",
    "dualpipe-v": "DualPipeV",
}
COSTS = ((1, 1, 1), (2, 2, 1), (3, 4, 2), (1, 2, 1))


def torch_schedule(order: str, p: int, m: int, v: int) -> Schedule:
    rows = []
    for actions in get_schedule_ops(NAMES[order], p, m, v):
        words = re.findall(r"\d+[FBIW]\d+", " ".join(map(str, actions)))
        if order == "dualpipe-v":
            words = [re.sub(r"(\d+)B(\d+)", r"\1I\2 \1W\2", word) for word in words]
        rows.append(" ".join(words))
    return parse_schedule("\n".join(rows))


def text_of(schedule: Schedule, without: str = "-") -> list[list[str]]:
    return [[str(a) for a in row if without not in str(a)] for row in schedule.rows]


def test_one_stage_a_device() -> None:
    for p, m in itertools.product((2, 3, 4, 8), (8, 9, 12, 16)):
        assert placed("gpipe", p, m) == torch_schedule("gpipe", p, m, 1)
        # On the last device, torch's list of 1F1B begins with microbatch 1 and ends with one of m.
        found, theirs = placed("1f1b", p, m), torch_schedule("1f1b", p, m, 1)
        assert found.rows[:-1] == theirs.rows[:-1]
        assert text_of(found, "F")[-1] == text_of(theirs, "F")[-1]


@pytest.mark.parametrize("v", [2, 3, 4])
def test_interleaved(v: int) -> None:
    """For every number of microbatches that torch takes: those in equal rounds."""
    for p, m in itertools.product((1, 2, 3, 4, 8), (1, 2, 3, 4, 7, 8, 10, 12, 16)):
        if m % max(1, m // p) == 0:
            assert placed("interleaved", p, m, v) == torch_schedule("interleaved", p, m, v)


def test_dualpipe_v() -> None:
    for p, more in itertools.product((1, 2, 3, 4, 8), (0, 1, 2, 5)):
        found = placed("dualpipe-v", p, 2 * p + more, 2)
        assert found == torch_schedule("dualpipe-v", p, 2 * p + more, 2)


def test_zero_bubble_v() -> None:
    for p, more in itertools.product((1, 2, 3, 4, 8), (0, 1, 2, 5)):
        m = 2 * p - 1 + more
        found, theirs = placed("zero-bubble-v", p, m, 2), torch_schedule("zero-bubble-v", p, m, 2)
        assert text_of(found, "W") == text_of(theirs, "W")
        for cost in COSTS:
            assert clocks(found, *cost) <= clocks(theirs, *cost)
        for device in range(p):
            assert in_flight(found, device) <= in_flight(theirs, device)


def test_short_steps_of_zero_bubble_v() -> None:
    """Fewer than 2p - 1 microbatches: never longer where a forward takes more than a weight part,
    and within ZB-V's memory."""
    for p in (2, 3, 4, 8):
        for m in range(1, 2 * p - 1):
            found = placed("zero-bubble-v", p, m, 2)
            validate(found)
            theirs = torch_schedule("zero-bubble-v", p, m, 2)
            for cost in COSTS[1:3]:
                assert clocks(found, *cost) <= clocks(theirs, *cost)
            assert max(in_flight(found, device) for device in range(p)) <= min(2 * p, 2 * m)
