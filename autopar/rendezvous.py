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
    numbered = _Numbered.of(calls)
    _check_membership(numbered)
    _check_agreement(numbered)
    sequences, distinct = numbered.sequences, numbered.distinct
    position = dict.fromkeys(calls, 0)
    n_arrived = [0] * len(distinct)
    ready = deque(calls)
    while ready:
        rank = ready.popleft()
        if position[rank] == len(sequences[rank]):
            continue
        number = sequences[rank][position[rank]]
        ranks = distinct[number].ranks
        n_arrived[number] += 1
        if n_arrived[number] == len(ranks):
            n_arrived[number] = 0
            for member in ranks:
                position[member] += 1
            ready.extend(ranks)
    waiting = {r: calls[r][position[r]] for r in calls if position[r] < len(calls[r])}
    if waiting:
        text = "; ".join(f"rank {r} in {call}" for r, call in sorted(waiting.items()))
        raise VerificationError(f"ranks wait for each other for ever: {text}", hint=_HINT)


@dataclass(frozen=True)
class _Numbered:
    """Every rank's calls as positions in `distinct`: calls are large, and compared often."""

    sequences: Mapping[int, Sequence[int]]
    distinct: Sequence[GroupCall]

    @staticmethod
    def of(calls: Mapping[int, Sequence[GroupCall]]) -> _Numbered:
        numbers: dict[GroupCall, int] = {}
        of_object: dict[int, int] = {}  # members often share one call
        for sequence in calls.values():
            for call in sequence:
                if id(call) not in of_object:
                    of_object[id(call)] = numbers.setdefault(call, len(numbers))
        sequences = {r: [of_object[id(call)] for call in calls[r]] for r in calls}
        return _Numbered(sequences, tuple(numbers))


def _check_membership(calls: _Numbered) -> None:
    groups, every = [frozenset(call.ranks) for call in calls.distinct], frozenset(calls.sequences)
    is_sound = [
        len(group) == len(call.ranks) and group <= every
        for call, group in zip(calls.distinct, groups, strict=True)
    ]
    for rank, sequence in calls.sequences.items():
        for number in dict.fromkeys(sequence):
            if is_sound[number] and rank in groups[number]:
                continue
            call, group = calls.distinct[number], groups[number]
            if rank not in group or len(group) < len(call.ranks):
                raise VerificationError(f"rank {rank} calls {call}, a group it is not one of")
            missing = [r for r in call.ranks if r not in every]
            raise VerificationError(f"{call} waits for ranks {missing}, which do not run")


def _check_agreement(calls: _Numbered) -> None:
    """Every group sees one sequence of calls on all its members."""
    seen: dict[tuple[int, ...], dict[int, list[int]]] = {}
    for call in calls.distinct:
        if call.ranks not in seen:
            seen[call.ranks] = {r: [] for r in call.ranks}
    members_of = [seen[call.ranks] for call in calls.distinct]
    for rank, sequence in calls.sequences.items():
        for number in sequence:
            members_of[number][rank].append(number)
    for ranks, members in seen.items():
        first = ranks[0]
        for rank in ranks[1:]:
            if members[rank] == members[first]:
                continue
            whats = [[calls.distinct[i].what for i in members[r]] for r in (first, rank)]
            at = next(
                (i for i, (a, b) in enumerate(zip(*whats, strict=False)) if a != b),
                min(map(len, whats)),
            )
            raise VerificationError(
                f"ranks {list(ranks)} call different collectives: call {at} is "
                f"{_item(whats[0], at)} on rank {first}, "
                f"{_item(whats[1], at)} on rank {rank}",
                hint=_HINT,
            )


def _item(sequence: Sequence[Hashable], at: int) -> str:
    return str(sequence[at]) if at < len(sequence) else "none"
