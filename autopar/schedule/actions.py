"""The language of schedules: actions, transfers, and their text.

A schedule is one list of actions per stage. Text of an action: the stage that does it, what,
the microbatch, and for a message the stage at its other end:

    2F0     stage 2 runs forward of microbatch 0        2B0     backward
    2SF0>3  stage 2 sends microbatch 0's activations    3RF0<2  stage 3 receives them
    3SB0>2  stage 3 sends their gradients back          2RB0<3  stage 2 receives them

A *transfer* says that a stage's forward reads what an earlier one made; one message per
microbatch carries all tensors between the two stages.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from autopar.errors import PlanError

Kind = Literal[
    "forward", "backward", "send_forward", "recv_forward", "send_backward", "recv_backward"
]

_CODES: dict[Kind, str] = {
    "forward": "F",
    "backward": "B",
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
_TEXT = re.compile(r"(?a:(\d+)(?:([FB])(\d+)|(S[FB])(\d+)>(\d+)|(R[FB])(\d+)<(\d+)))")
IDLE = "."


@dataclass(frozen=True)
class Action:
    """One thing a stage does. `peer` is the stage at the other end of a send or receive."""

    kind: Kind
    stage: int
    microbatch: int
    peer: int | None = None

    def __post_init__(self) -> None:
        assert (self.peer is None) == self.is_compute, f"{self.kind} with peer {self.peer}"

    @property
    def is_compute(self) -> bool:
        return self.kind not in _OTHER_END

    @property
    def is_forward(self) -> bool:
        """Of activations; else of gradients."""
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
    """Stage `target` reads tensors that stage `source` makes; gradients return if any has one."""

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
    """What every stage does, in order.

    transfers   those that its sends and receives carry out; None while it has none (`lower`)
    trains      False where it has forwards only
    """

    stages: tuple[tuple[Action, ...], ...]
    n_microbatches: int
    transfers: frozenset[Transfer] | None = None
    trains: bool = True

    @property
    def n_stages(self) -> int:
        return len(self.stages)

    @property
    def is_lowered(self) -> bool:
        return self.transfers is not None

    def __iter__(self) -> Iterator[Action]:
        """All actions, stage by stage."""
        return (action for actions in self.stages for action in actions)

    def __str__(self) -> str:
        """One line per stage."""
        return "\n".join(" ".join(map(str, actions)) for actions in self.stages)


def chain(n_stages: int) -> frozenset[Transfer]:
    """Every stage reads from the one before it."""
    return frozenset(Transfer(i, i + 1) for i in range(n_stages - 1))


def parse_action(text: str) -> Action:
    """`"2F0"` -> the action. Raises `PlanError` where `text` is none."""
    match = _TEXT.fullmatch(text)
    if match is None:
        raise PlanError(
            f"{text!r} is not an action of a schedule",
            hint="2F0 is stage 2's forward of microbatch 0, 2B0 its backward; 2SF0>3, 3RF0<2, "
            "3SB0>2 and 2RB0<3 send and receive",
        )
    stage, code, microbatch, *peer = (group for group in match.groups() if group is not None)
    return Action(_KINDS[code], int(stage), int(microbatch), int(peer[0]) if peer else None)


def parse_schedule(text: str) -> Schedule:
    """One line of actions per stage; idle cells (`.`) of a grid are passed over.

    What the text does not say is taken from its actions: the number of microbatches, the
    transfers of a lowered schedule, and whether it trains. Raises `PlanError` for a word that
    is no action.
    """
    stages = tuple(
        tuple(parse_action(word) for word in line.split() if word != IDLE)
        for line in text.strip().splitlines()
    )
    actions = [action for line in stages for action in line]
    returned = {(a.peer, a.stage) for a in actions if a.kind == "send_backward"}
    sent = {(a.stage, a.peer) for a in actions if a.kind == "send_forward"}
    return Schedule(
        stages,
        n_microbatches=1 + max((a.microbatch for a in actions), default=-1),
        transfers=frozenset(
            Transfer(source, target, (source, target) in returned)
            for source, target in sent
            if target is not None
        )
        if any(not a.is_compute for a in actions)
        else None,
        trains=any(a.kind == "backward" for a in actions),
    )
