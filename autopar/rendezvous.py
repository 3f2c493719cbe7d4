"""Proof that ranks which wait for each other never wait for ever.

Every rank is a list of calls, each over a group of ranks. Under rendezvous semantics a call
returns only when every member of its group has made it, so it fires exactly when it is the
next call of each of them. A rank has one next call, so firing one call never disables
another: whether all lists can be finished does not depend on the order of firing, and one
simulation proves it for all (`check_rendezvous`).

What fails is told apart: two members of a group whose sequences of calls over that group
differ (`_check_agreement`), and sequences that agree but are interleaved differently with
other groups (a cycle of waits).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from autopar.errors import VerificationError

_HINT = "all ranks of a group must call its collectives in the same order"


@dataclass(frozen=True)
class GroupCall:
    """A call by one rank. `what` must be equal on all members; a send and its receive are one."""

    ranks: tuple[int, ...]
    what: Hashable

    def __str__(self) -> str:
        return f"{self.what} of ranks {list(self.ranks)}"


def check_rendezvous(calls: Mapping[int, Sequence[GroupCall]]) -> None:
    """Raise `VerificationError` unless the ranks' calls match and can all be finished."""
    _check_membership(calls)
    _check_agreement(calls)
    position = dict.fromkeys(calls, 0)
    ready = deque(calls)
    while ready:
        rank = ready.popleft()
        if position[rank] == len(calls[rank]):
            continue
        call = calls[rank][position[rank]]
        if all(_next(calls, position, r) == call for r in call.ranks):
            for member in call.ranks:
                position[member] += 1
                ready.append(member)
    waiting = {r: _next(calls, position, r) for r in calls if position[r] < len(calls[r])}
    if waiting:
        text = "; ".join(f"rank {r} in {call}" for r, call in sorted(waiting.items()))
        raise VerificationError(f"ranks wait for each other for ever: {text}", hint=_HINT)


def _next(
    calls: Mapping[int, Sequence[GroupCall]], position: Mapping[int, int], rank: int
) -> GroupCall | None:
    at = position[rank]
    return calls[rank][at] if at < len(calls[rank]) else None


def _check_membership(calls: Mapping[int, Sequence[GroupCall]]) -> None:
    for rank, sequence in calls.items():
        for call in sequence:
            if rank not in call.ranks or len(set(call.ranks)) < len(call.ranks):
                raise VerificationError(f"rank {rank} calls {call}, a group it is not one of")
            missing = [r for r in call.ranks if r not in calls]
            if missing:
                raise VerificationError(f"{call} waits for ranks {missing}, which do not run")


def _check_agreement(calls: Mapping[int, Sequence[GroupCall]]) -> None:
    """Every group sees one sequence of calls on all its members."""
    seen: dict[tuple[int, ...], dict[int, list[Hashable]]] = {}
    for rank, sequence in calls.items():
        for call in sequence:
            members = seen.setdefault(call.ranks, {r: [] for r in call.ranks})
            members[rank].append(call.what)
    for ranks, members in seen.items():
        first = ranks[0]
        for rank in ranks[1:]:
            if members[rank] == members[first]:
                continue
            at = next(
                (
                    i
                    for i, (a, b) in enumerate(zip(members[first], members[rank], strict=False))
                    if a != b
                ),
                min(len(members[first]), len(members[rank])),
            )
            raise VerificationError(
                f"ranks {list(ranks)} call different collectives: call {at} is "
                f"{_item(members[first], at)} on rank {first}, "
                f"{_item(members[rank], at)} on rank {rank}",
                hint=_HINT,
            )


def _item(sequence: Sequence[Hashable], at: int) -> str:
    return str(sequence[at]) if at < len(sequence) else "none"
