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

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopar.errors import VerificationError

_HINT = "all ranks of a group must call its collectives in the same order"


class GroupCall(NamedTuple):
    """A call by one rank. `what` must be equal on all members; a send and its receive are one."""

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


# Group -> a rank's calls over it, in order: positions in `_Numbered.groups` and in `distinct`.
_OverGroups = Mapping[int, NDArray[np.int64]]


@dataclass(frozen=True)
class _Numbered:
    """Every rank's calls as positions in `distinct`: calls are large, and compared often. `group`
    has the position in `groups` of each distinct call's ranks."""

    sequences: Mapping[int, Sequence[int]]
    distinct: Sequence[GroupCall]
    groups: Sequence[tuple[int, ...]]
    group: NDArray[np.int64]

    @staticmethod
    def of(calls: Mapping[int, Sequence[GroupCall]]) -> _Numbered:
        # Members often share one call.
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
    """Every group sees one sequence of calls on all its members."""
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
    """One simulation: whoever made a call goes on when all its group has made it."""
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
