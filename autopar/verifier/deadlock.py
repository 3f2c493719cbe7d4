"""Proof that the collectives and messages of a step cannot deadlock (`check_rendezvous`).

Every rank has a list of calls, each over a group of ranks. Under rendezvous semantics, a call
returns only when every member of its group has made it. So a call fires when it is the next call
of every member. A rank has exactly one next call, so firing one call never disables another.
Whether all lists can finish therefore does not depend on the order of firing: one simulation
proves it for every order (`_check_progress`).

There are three kinds of faults. A group has a wrong member (`_check_membership`). Members of a
group make different sequences of calls over it (`_check_agreement`). The sequences agree but are
interleaved differently with other groups, which is a cycle of waits (`_check_progress`).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopar.errors import VerificationError

_HINT = "all ranks of a group must call its collectives in the same order"


class GroupCall(NamedTuple):
    """A call by one rank over a group. A send and its receive are one call.

    what    equal on all members
    """

    ranks: tuple[int, ...]
    what: Hashable

    def __str__(self) -> str:
        return f"{self.what} of ranks {list(self.ranks)}"


def check_rendezvous(calls: Mapping[int, Sequence[GroupCall]]) -> None:
    """Raise `VerificationError` unless the ranks' calls match and can all be finished."""
    numbered = _Numbered.of(calls)
    over = {rank: numbered.over_groups(rank) for rank in calls}
    _check_membership(numbered, over)
    _check_agreement(numbered, over)
    _check_progress(numbered)


# Group -> one rank's calls over it, in order. A group is its position in `_Numbered.groups`, a
# call its position in `_Numbered.distinct`.
_OverGroups = Mapping[int, NDArray[np.int64]]


@dataclass(frozen=True)
class _Numbered:
    """Every rank's calls as numbers, because calls are large and often compared.

    sequences    per rank, its calls as positions in `distinct`
    group        per distinct call, the position of its ranks in `groups`
    """

    sequences: Mapping[int, Sequence[int]]
    distinct: Sequence[GroupCall]
    groups: Sequence[tuple[int, ...]]
    group: NDArray[np.int64]

    @staticmethod
    def of(calls: Mapping[int, Sequence[GroupCall]]) -> _Numbered:
        # Members often share one call object, so hash each object once.
        objects = {id(call): call for sequence in calls.values() for call in sequence}
        numbers: dict[GroupCall, int] = {}
        number = {at: numbers.setdefault(call, len(numbers)) for at, call in objects.items()}
        sequences = {r: [number[id(call)] for call in sequence] for r, sequence in calls.items()}
        groups: dict[tuple[int, ...], int] = {}
        group = [groups.setdefault(call.ranks, len(groups)) for call in numbers]
        return _Numbered(sequences, tuple(numbers), tuple(groups), np.array(group, dtype=np.int64))

    def over_groups(self, rank: int) -> _OverGroups:
        sequence = np.array(self.sequences[rank], dtype=np.int64)
        group = self.group[sequence]
        order = np.argsort(group, kind="stable")
        found, first = np.unique(group[order], return_index=True)
        return dict(zip(found.tolist(), np.split(sequence[order], first[1:]), strict=False))


def _check_membership(calls: _Numbered, over: Mapping[int, _OverGroups]) -> None:
    every = frozenset(calls.sequences)
    is_sound = [len(set(ranks)) == len(ranks) and every.issuperset(ranks) for ranks in calls.groups]
    for rank, own in over.items():
        wrong = {k for k in own if not (is_sound[k] and rank in calls.groups[k])}
        if not wrong:
            continue
        call = next(calls.distinct[i] for i in calls.sequences[rank] if calls.group[i] in wrong)
        if rank not in call.ranks or len(set(call.ranks)) < len(call.ranks):
            raise VerificationError(f"rank {rank} calls {call}, a group it is not one of")
        missing = [r for r in call.ranks if r not in every]
        raise VerificationError(f"{call} waits for ranks {missing}, which do not run")


def _check_agreement(calls: _Numbered, over: Mapping[int, _OverGroups]) -> None:
    """Raise unless all members of each group make the same sequence of calls over it."""
    nothing = np.zeros(0, dtype=np.int64)
    for group, ranks in enumerate(calls.groups):
        members = [over[rank].get(group, nothing) for rank in ranks]
        for rank, other in zip(ranks, members, strict=True):
            if np.array_equal(members[0], other):
                continue
            whats = [[calls.distinct[i].what for i in of] for of in (members[0], other)]
            at = next(
                (i for i, (a, b) in enumerate(zip(*whats, strict=False)) if a != b),
                min(map(len, whats)),
            )
            raise VerificationError(
                f"ranks {list(ranks)} call different collectives: call {at} is "
                f"{_item(whats[0], at)} on rank {ranks[0]}, "
                f"{_item(whats[1], at)} on rank {rank}",
                hint=_HINT,
            )


def _check_progress(calls: _Numbered) -> None:
    """Simulate: a rank goes on when its whole group has made its call. Raise if some get stuck."""
    ranks = [call.ranks for call in calls.distinct]
    n_missing = [len(group) for group in ranks]
    left = {rank: iter(sequence) for rank, sequence in calls.sequences.items()}
    made: dict[int, int | None] = {}  # None: a rank that is done
    ready = list(left)
    while ready:
        rank = ready.pop()
        made[rank] = number = next(left[rank], None)
        if number is None:
            continue
        n_missing[number] -= 1
        if not n_missing[number]:
            n_missing[number] = len(ranks[number])
            ready.extend(ranks[number])
    waiting = {r: calls.distinct[i] for r, i in sorted(made.items()) if i is not None}
    if waiting:
        text = "; ".join(f"rank {r} in {call}" for r, call in waiting.items())
        raise VerificationError(f"ranks wait for each other for ever: {text}", hint=_HINT)


def _item(sequence: Sequence[Hashable], at: int) -> str:
    return str(sequence[at]) if at < len(sequence) else "none"
