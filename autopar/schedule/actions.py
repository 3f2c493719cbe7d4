"""The language of schedules: actions, transfers, and their text.

A schedule is one list of actions per device. A device is a group of ranks that
work as one. The text of an action is: stage, kind, microbatch, and for a message the stage at
its other end:

    2F0     stage 2 runs forward of microbatch 0        2B0     backward
    2SF0>3  stage 2 sends microbatch 0's activations    3RF0<2  stage 3 receives them
    3SB0>2  stage 3 sends their gradients back          2RB0<3  stage 2 receives them

Backward may be split into two parts. Other stages wait only for the first:

    2I0     gradients of what stage 2 received          2W0     gradients of its parameters

A stage is on one device (`Schedule.devices`). A device may have several, which are then called
chunks. On two devices of two chunks, looped stages are on 0, 1, 0, 1, and V-shaped ones on
0, 1, 1, 0.

A *transfer* says that a stage's forward reads tensors of an earlier stage. One message per
microbatch carries all tensors between the two stages. Stages on one device send nothing.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from autopar.errors import PlanError

Kind = Literal[
    "forward",
    "backward",
    "backward_input",
    "backward_weight",
    "send_forward",
    "recv_forward",
    "send_backward",
    "recv_backward",
]

_CODES: dict[Kind, str] = {
    "forward": "F",
    "backward": "B",
    "backward_input": "I",
    "backward_weight": "W",
    "send_forward": "SF",
    "recv_forward": "RF",
    "send_backward": "SB",
    "recv_backward": "RB",
}
_KINDS: dict[str, Kind] = {code: kind for kind, code in _CODES.items()}
_OTHER_END: dict[Kind, Kind] = {
    "send_forward": "recv_forward",
    "recv_forward": "send_forward",
    "send_backward": "recv_backward",
    "recv_backward": "send_backward",
}
_TEXT = re.compile(r"(?a:(\d+)(?:([FBIW])(\d+)|(S[FB])(\d+)>(\d+)|(R[FB])(\d+)<(\d+)))")
IDLE = "."

# After one of these, a stage has a microbatch's parameter gradients and keeps nothing else of it.
GRADIENTS_DONE: tuple[Kind, ...] = ("backward", "backward_weight")


class Action(NamedTuple):
    """One thing a stage does. `peer` is the stage at the other end of a send or receive."""

    kind: Kind
    stage: int
    microbatch: int
    peer: int | None = None

    @property
    def is_compute(self) -> bool:
        return self.peer is None

    @property
    def is_forward(self) -> bool:
        """Does it compute or carry activations (else gradients)?"""
        return self.kind.endswith("forward")

    @property
    def is_send(self) -> bool:
        return self.kind in ("send_forward", "send_backward")

    @property
    def partner(self) -> Action:
        """The same message seen from its other end."""
        assert self.peer is not None, f"{self} has no other end"
        return Action(_OTHER_END[self.kind], self.peer, self.microbatch, self.stage)

    def __str__(self) -> str:
        text = f"{self.stage}{_CODES[self.kind]}{self.microbatch}"
        return text if self.peer is None else f"{text}{'>' if self.is_send else '<'}{self.peer}"


@dataclass(frozen=True, order=True)
class Transfer:
    """Stage `target` reads tensors of stage `source`.

    has_gradient    at least one of them has a gradient, which is sent back
    """

    source: int
    target: int
    has_gradient: bool = True

    def forward(self, microbatch: int) -> tuple[Action, Action]:
        """The send and the receive of a microbatch's activations."""
        send = Action("send_forward", self.source, microbatch, self.target)
        return send, send.partner

    def backward(self, microbatch: int) -> tuple[Action, Action]:
        """The send and the receive of a microbatch's gradients."""
        send = Action("send_backward", self.target, microbatch, self.source)
        return send, send.partner


@dataclass(frozen=True)
class Schedule:
    """What every device does, in order.

    rows              the actions of each device
    devices           the device of each stage
    transfers         what its sends and receives carry; None before it is lowered (`lower`)
    trains            False for a schedule of forwards only
    splits_backward   every backward is split into two parts
    """

    rows: tuple[tuple[Action, ...], ...]
    devices: tuple[int, ...]
    n_microbatches: int
    transfers: frozenset[Transfer] | None = None
    trains: bool = True
    splits_backward: bool = False

    @property
    def n_devices(self) -> int:
        return len(self.rows)

    @property
    def n_stages(self) -> int:
        return len(self.devices)

    @property
    def n_chunks(self) -> int:
        """The most stages that a device has."""
        return max(Counter(self.devices).values(), default=1)

    @property
    def is_lowered(self) -> bool:
        return self.transfers is not None

    def device_of(self, stage: int) -> int:
        return self.devices[stage]

    def stages_on(self, device: int) -> tuple[int, ...]:
        """The stages of a device, in order."""
        return tuple(stage for stage, at in enumerate(self.devices) if at == device)

    def actions_of(self, stage: int) -> Iterator[Action]:
        """What a stage does, in order."""
        return (action for action in self.rows[self.devices[stage]] if action.stage == stage)

    def is_inside(self, transfer: Transfer) -> bool:
        """Both ends are on one device, so nothing is sent."""
        return self.device_of(transfer.source) == self.device_of(transfer.target)

    def computes(self) -> tuple[Kind, ...]:
        """The kinds of compute that every stage runs for every microbatch, in order."""
        if not self.trains:
            return ("forward",)
        if self.splits_backward:
            return ("forward", "backward_input", "backward_weight")
        return ("forward", "backward")

    def __iter__(self) -> Iterator[Action]:
        """All actions, device by device."""
        return (action for actions in self.rows for action in actions)

    def __str__(self) -> str:
        """One line per device."""
        return "\n".join(" ".join(map(str, actions)) for actions in self.rows)


def chain(n_stages: int) -> frozenset[Transfer]:
    """Every stage reads from the one before it."""
    return frozenset(Transfer(i, i + 1) for i in range(n_stages - 1))


def parse_action(text: str) -> Action:
    """`"2F0"` -> the action. Raises `PlanError` if `text` is not an action."""
    match = _TEXT.fullmatch(text)
    if match is None:
        raise PlanError(
            f"{text!r} is not an action of a schedule",
            hint="2F0 is stage 2's forward of microbatch 0, 2B0 its backward, 2I0 and 2W0 the "
            "parts of it; 2SF0>3, 3RF0<2, 3SB0>2 and 2RB0<3 send and receive",
        )
    stage, code, microbatch, *peer = (group for group in match.groups() if group is not None)
    return Action(_KINDS[code], int(stage), int(microbatch), int(peer[0]) if peer else None)


def parse_schedule(text: str) -> Schedule:
    """Parse one line of actions per device; idle cells (`.`) of a grid are skipped.

    The rest is inferred from the actions: the number of microbatches, the device of every stage,
    the transfers of a lowered schedule, and whether it trains. Raises `PlanError` for a word that
    is not an action, and for a stage that no device or more than one runs.
    """
    rows = tuple(
        tuple(parse_action(word) for word in line.split() if word != IDLE)
        for line in text.strip().splitlines()
    )
    actions = [action for row in rows for action in row]
    kinds = {a.kind for a in actions}
    returned = {(a.peer, a.stage) for a in actions if a.kind == "send_backward"}
    sent = {(a.stage, a.peer) for a in actions if a.kind == "send_forward"}
    return Schedule(
        rows,
        _devices_of(rows),
        n_microbatches=1 + max((a.microbatch for a in actions), default=-1),
        transfers=frozenset(
            Transfer(source, target, (source, target) in returned)
            for source, target in sent
            if target is not None
        )
        if any(not a.is_compute for a in actions)
        else None,
        trains=bool(kinds & {"backward", "backward_input", "backward_weight"}),
        splits_backward=bool(kinds & {"backward_input", "backward_weight"}),
    )


def _devices_of(rows: Sequence[Sequence[Action]]) -> tuple[int, ...]:
    """The device of every stage. Raises `PlanError` unless each stage runs on one device."""
    found = {(action.stage, device) for device, row in enumerate(rows) for action in row}
    stages = sorted(stage for stage, _ in found)
    for at, stage in enumerate(stages):
        if stage != at:
            what = f"stage {stage} on two devices" if stage < at else f"no stage {at}"
            raise PlanError(f"the schedule has {what}", hint="every stage is on one device")
    return tuple(device for _, device in sorted(found))
