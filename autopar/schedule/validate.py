"""What a schedule must satisfy before anything runs it.

compute     every stage runs forward, and if it trains backward, of each microbatch exactly
            once, its forward first; forwards in the order of microbatches, and backwards,
            so that gradients add up in the same order under every schedule
messages    of a lowered schedule: each transfer of each microbatch exactly once at both
            ends, sent after it is made and received before it is read; no others
progress    under rendezvous, all actions can be finished (`prove_deadlock_free`)
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterable

from autopar.errors import VerificationError
from autopar.schedule.actions import Action, Kind, Schedule, Transfer
from autopar.schedule.clocks import start_times


def validate(schedule: Schedule) -> None:
    """Raise `VerificationError` unless the schedule is all of what the module's text says."""
    for stage, actions in enumerate(schedule.stages):
        stray = next((a for a in actions if a.stage != stage), None)
        if stray is not None:
            raise VerificationError(f"stage {stage} has {stray}, an action of another stage")
    if schedule.transfers is not None:
        check_transfers(schedule.n_stages, schedule.transfers)
    for stage, actions in enumerate(schedule.stages):
        _check_complete(schedule, stage)
        _check_microbatch_order(actions)
        _check_local_order(actions)
    prove_deadlock_free(schedule)


def prove_deadlock_free(schedule: Schedule) -> None:
    """Raise `VerificationError` with the cycle of waits if one is possible.

    A send blocks until its receive is posted; one simulation proves it for all durations.
    """
    start_times(schedule, lambda action: 1)


def check_transfers(n_stages: int, transfers: Collection[Transfer]) -> None:
    """Transfers go from a stage to a later one, and a pair of stages has one."""
    for transfer in sorted(transfers):
        if not 0 <= transfer.source < transfer.target < n_stages:
            raise VerificationError(
                f"a transfer from stage {transfer.source} to stage {transfer.target} of "
                f"{n_stages}: tensors go from a stage to a later one"
            )
    pairs = Counter((t.source, t.target) for t in transfers)
    for (source, target), count in pairs.items():
        if count > 1:
            raise VerificationError(
                f"{count} transfers from stage {source} to stage {target}: one message carries "
                "all tensors between two stages"
            )


def _check_complete(schedule: Schedule, stage: int) -> None:
    """Each action that the stage must do is there once, and no other."""
    found = Counter(schedule.stages[stage])
    wanted = dict.fromkeys(_wanted(schedule, stage))
    for action in wanted:
        if found[action] == 0:
            raise VerificationError(f"stage {stage} never runs {action}")
        if found[action] > 1:
            raise VerificationError(f"stage {stage} runs {action} {found[action]} times")
    extra = next((action for action in found if action not in wanted), None)
    if extra is not None:
        raise VerificationError(
            f"stage {stage} runs {extra}, which is not part of the schedule: {_extent(schedule)}"
        )


def _extent(schedule: Schedule) -> str:
    """What a schedule is of, for messages."""
    what = "" if schedule.trains else ", forward only"
    pairs = ", ".join(f"{t.source} to {t.target}" for t in sorted(schedule.transfers or ()))
    carried = f"transfers {pairs}" if pairs else "no transfers"
    return f"microbatches below {schedule.n_microbatches}{what}, {carried}"


def _wanted(schedule: Schedule, stage: int) -> Iterable[Action]:
    """Every action of a stage, in no particular order."""
    kinds: tuple[Kind, ...] = ("forward", "backward") if schedule.trains else ("forward",)
    own = [t for t in sorted(schedule.transfers or ()) if stage in (t.source, t.target)]
    for k in range(schedule.n_microbatches):
        yield from (Action(kind, stage, k) for kind in kinds)
        for transfer in own:
            ends = list(transfer.forward(k))
            if transfer.has_gradient and schedule.trains:
                ends += transfer.backward(k)
            yield from (end for end in ends if end.stage == stage)


def _check_microbatch_order(actions: tuple[Action, ...]) -> None:
    for kind in ("forward", "backward"):
        line = [a for a in actions if a.kind == kind]
        for earlier, later in itertools.pairwise(line):
            if later.microbatch < earlier.microbatch:
                raise VerificationError(
                    f"{later} comes after {earlier}: a stage runs its {kind}s in the order of "
                    "microbatches"
                )


def _check_local_order(actions: tuple[Action, ...]) -> None:
    """On one stage: receive before forward, forward before its send, and so on."""
    at = {action: i for i, action in enumerate(actions)}
    for action in actions:
        if action.kind == "forward":
            continue
        forward = Action("forward", action.stage, action.microbatch)
        backward = Action("backward", action.stage, action.microbatch)
        first, then = {
            "backward": (forward, action),
            "recv_forward": (action, forward),
            "send_forward": (forward, action),
            "recv_backward": (action, backward),
            "send_backward": (backward, action),
        }[action.kind]
        if at[first] > at[then]:
            raise VerificationError(f"stage {action.stage} runs {then} before {first}")
