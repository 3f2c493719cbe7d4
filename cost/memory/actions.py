"""What the actions of a stage need beside what is held, so that stages of one device add up.

    peak of a device = max over its actions of   bytes that its stages hold when the action begins
                                               + peak of the action above those

A stage holds its state and, for each microbatch between two of its actions, what the later one
needs. All numbers are read off the step of `peak_memory` (`liveness.py`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.cost.memory.ledger import Ledger
from autopar.cost.memory.liveness import phases_of
from autopar.program.lines import StageProgram
from autopar.schedule import GRADIENTS_DONE, Action, Kind

_PHASES: dict[Kind, str] = {
    "forward": "forward",
    "backward": "backward",
    "backward_input": "backward",
    "backward_weight": "weights",
}


@dataclass(frozen=True)
class StageMemory:
    """Bytes of a stage on one rank.

    static_bytes     held from the first action to the last: stored parameters, optimizer state,
                     batch, parameters converted for use
    gradient_bytes   held besides, once the first backward is over
    kept_bytes       of a microbatch between its forward and its backward, or the first part of it
    waiting_bytes    of a microbatch between the two parts of its backward
    message_bytes    of the gradients that a backward sends
    edge_bytes       the peak before the first action and after the last one, all included
    first, later     phase ("forward", "backward", "weights") -> the peak above what is held when it
                     begins, of the first microbatch and of others
    """

    static_bytes: float
    gradient_bytes: float
    kept_bytes: float
    waiting_bytes: float
    message_bytes: float
    edge_bytes: float
    first: Mapping[str, float]
    later: Mapping[str, float]

    def held_bytes(self, n_in_flight: int, n_waiting: int, n_done: int) -> float:
        """Bytes between two actions; `n_done` backwards are over."""
        held_bytes = self.static_bytes + (self.gradient_bytes if n_done else 0.0)
        return held_bytes + n_in_flight * self.kept_bytes + n_waiting * self.waiting_bytes


def stage_memory(program: StageProgram, optimizer: str) -> StageMemory:
    """The bytes of a stage that trains."""
    ledger, before_bytes = Ledger(), 0.0
    peaks, held = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    for name, _ in phases_of(program, optimizer, 1, 0, ledger):
        peaks[name].append(ledger.peak_bytes - before_bytes)
        held[name].append(ledger.live_bytes)
        before_bytes = ledger.peak_bytes = ledger.live_bytes
    last = "weights" if program.splits_backward else "backward"
    (static_bytes,), (after_bytes,) = held["before"], held["after"]
    edges = (
        peaks["before"][0],
        held[last][-1] + peaks["after"][0],
        after_bytes + peaks["optimizer"][0],
    )
    sent = (b.local.size_bytes for b in program.received if b.local.has_grad)
    parts = ("forward", "backward", "weights")
    return StageMemory(
        static_bytes,
        held[last][0] - static_bytes,
        held["forward"][0] - static_bytes,
        held["backward"][0] - static_bytes if program.splits_backward else 0.0,
        float(sum(sent)),
        max(edges),
        {name: peaks[name][0] for name in parts if name in peaks},
        {name: peaks[name][-1] for name in parts if name in peaks},
    )


@dataclass(frozen=True)
class RowPeak:
    """The peak of a device, and when it is.

    action   during it; None: before the first action or after the last one
    counts   of each stage, microbatches in flight, waiting for their weights, done, when it begins
    """

    peak_bytes: float
    action: Action | None
    counts: Mapping[int, tuple[int, int, int]]

    @property
    def phase(self) -> str:
        """The phase of `phases_of` that the action is; "" for none."""
        return _PHASES[self.action.kind] if self.action else ""


def peak_of_row(
    row: Sequence[Action], memories: Mapping[int, StageMemory], n_under_way: Mapping[int, int]
) -> RowPeak:
    """The peak of a device that runs a row of a schedule; `memories` are those of its stages.

    n_under_way   stage -> gradient messages that may still be held during another backward
    """
    counts = {stage: [0, 0, 0] for stage in memories}  # in flight, waiting, done
    peak_bytes, peak_action = sum(memory.edge_bytes for memory in memories.values()), None
    at_peak: dict[int, tuple[int, int, int]] = {}
    for action in (action for action in row if action.is_compute):
        kind, stage, microbatch, _ = action
        now, own = counts[stage], memories[stage]
        held_bytes = sum(memory.held_bytes(*counts[k]) for k, memory in memories.items())
        held_bytes += sum(
            n_under_way.get(k, 0) * memory.message_bytes
            for k, memory in memories.items()
            if counts[k][2]
        )
        above = (own.later if microbatch else own.first)[_PHASES[kind]]
        if held_bytes + above > peak_bytes:
            peak_bytes, peak_action = held_bytes + above, action
            at_peak = {k: (n[0], n[1], n[2]) for k, n in counts.items()}
        now[0] += {"forward": 1, "backward": -1, "backward_input": -1}.get(kind, 0)
        now[1] += {"backward_input": 1, "backward_weight": -1}.get(kind, 0)
        now[2] += kind in GRADIENTS_DONE
    return RowPeak(peak_bytes, peak_action, at_peak)
