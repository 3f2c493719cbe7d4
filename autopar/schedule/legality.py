"""What a schedule must satisfy before anything runs it (`validate`).

compute     Every stage runs each microbatch once: forward, then, if it trains, backward (or its
            two parts). Each kind runs in the order of microbatches, so gradients add up in the
            same order under every schedule.
messages    In a lowered schedule, each transfer of each microbatch is there once at both ends,
            sent after it is made and received before it is read. There are no other messages.
            Between stages of one device there are none; the order of their compute is checked.
progress    Under rendezvous, all actions can finish (`prove_deadlock_free`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from autopar.errors import VerificationError
from autopar.schedule.actions import Action, Kind, Schedule, Transfer
from autopar.schedule.grid import start_times


def validate(schedule: Schedule) -> None:
    """Raise `VerificationError` unless the schedule satisfies the rules of this module."""
    for device, actions in enumerate(schedule.rows):
        stages = schedule.stages_on(device)
        stray = next((a for a in actions if a.stage not in stages), None)
        if stray is not None:
            raise VerificationError(
                f"{_row(schedule, device)} has {stray}, an action of another "
                + ("stage" if schedule.n_chunks == 1 else "device")
            )
    if schedule.transfers is not None:
        check_transfers(schedule.n_stages, schedule.transfers)
    for device, actions in enumerate(schedule.rows):
        _check_complete(schedule, device)
        _check_microbatch_order(actions)
        _check_local_order(schedule, device)
    prove_deadlock_free(schedule)


def prove_deadlock_free(schedule: Schedule) -> None:
    """Raise `VerificationError` with the cycle of waits if the schedule can deadlock.

    A send blocks until its receive is posted. One simulation proves it for all durations
    (`grid.py`).
    """
    start_times(schedule, lambda action: 1)


def check_transfers(n_stages: int, transfers: Collection[Transfer]) -> None:
    """Raise unless each transfer goes to a later stage and each pair of stages has at most one."""
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


def _row(schedule: Schedule, device: int) -> str:
    return f"{'stage' if schedule.n_chunks == 1 else 'device'} {device}"


def _check_complete(schedule: Schedule, device: int) -> None:
    """Raise unless the device runs each of its actions exactly once, and no others."""
    row, expected = schedule.rows[device], dict.fromkeys(_expected(schedule, device))
    if len(row) == len(expected) and expected.keys() == set(row):
        return
    found, who = Counter(row), _row(schedule, device)
    for action in expected:
        if found[action] == 0:
            raise VerificationError(f"{who} never runs {action}")
        if found[action] > 1:
            raise VerificationError(f"{who} runs {action} {found[action]} times")
    extra = next((action for action in found if action not in expected), None)
    if extra is not None:
        raise VerificationError(
            f"{who} runs {extra}, which is not part of the schedule: {_extent(schedule)}"
        )


def _extent(schedule: Schedule) -> str:
    """Microbatches and transfers of a schedule, for error messages."""
    what = "" if schedule.trains else ", forward only"
    pairs = ", ".join(f"{t.source} to {t.target}" for t in sorted(schedule.transfers or ()))
    carried = f"transfers {pairs}" if pairs else "no transfers"
    return f"microbatches below {schedule.n_microbatches}{what}, {carried}"


def _expected(schedule: Schedule, device: int) -> Iterable[Action]:
    """Every action that a device must run, in no particular order."""
    kinds = schedule.computes()
    for stage in schedule.stages_on(device):
        first = [Action(kind, stage, 0) for kind in kinds]
        for transfer in sorted(schedule.transfers or ()):
            if stage in (transfer.source, transfer.target) and not schedule.is_inside(transfer):
                ends = list(transfer.forward(0))
                if transfer.has_gradient and schedule.trains:
                    ends += transfer.backward(0)
                first += (end for end in ends if end.stage == stage)
        for k in range(schedule.n_microbatches):
            yield from (Action(kind, stage, k, peer) for kind, _, _, peer in first)


def _check_microbatch_order(actions: tuple[Action, ...]) -> None:
    """Raise unless each stage runs each kind of compute in the order of microbatches."""
    latest: dict[tuple[str, int], Action] = {}
    for action in actions:
        if not action.is_compute:
            continue
        earlier = latest.get((action.kind, action.stage))
        if earlier is not None and action.microbatch < earlier.microbatch:
            raise VerificationError(
                f"{action} comes after {earlier}: a stage runs its {action.kind}s in the order of "
                "microbatches"
            )
        latest[action.kind, action.stage] = action


def _check_local_order(schedule: Schedule, device: int) -> None:
    """Raise unless the device receives before it computes, computes before it sends, and so on."""
    at = {action: i for i, action in enumerate(schedule.rows[device])}
    for first, then in _local_order(schedule, device):
        if at[first] > at[then]:
            raise VerificationError(f"{_row(schedule, device)} runs {then} before {first}")


def _local_order(schedule: Schedule, device: int) -> Iterable[tuple[Action, Action]]:
    """Pairs of actions of a device that must come in this order."""
    kinds = schedule.computes()
    returns: Kind = kinds[1] if schedule.trains else "backward"
    for action in schedule.rows[device]:
        _, stage, k, _ = action
        match action.kind:
            case "forward":
                continue
            case "recv_forward":
                yield action, Action("forward", stage, k)
            case "send_forward":
                yield Action("forward", stage, k), action
            case "recv_backward":
                yield action, Action(returns, stage, k)
            case "send_backward":
                yield Action(returns, stage, k), action
            case _:
                yield Action(kinds[kinds.index(action.kind) - 1], stage, k), action
    for t in schedule.transfers or ():
        if schedule.is_inside(t) and schedule.device_of(t.source) == device:
            for k in range(schedule.n_microbatches):
                yield Action("forward", t.source, k), Action("forward", t.target, k)
                if schedule.trains:
                    yield Action(returns, t.target, k), Action(returns, t.source, k)
