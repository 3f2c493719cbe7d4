"""Do all ranks call the module with the same batch?

Every rank passes the same global batch, or with `batch="local"` the rows that `local_slice` names.
A loader that gives each rank rows of its own (DistributedSampler) is wrong for a module that splits
the batch itself: nothing would fail, and the gradients would be wrong. Such a habit shows in the
first steps; a loader that drifts later shows in one of every `check_every` steps.

Fingerprints of every input (`hashes.py`) are compared before anything is captured or run. A local
batch differs by rank. Its fingerprints are always gathered: ranks with the same rows of an input
must have the same content.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autopar.errors import BatchError
from autopar.module.agreement.hashes import Fingerprint, fingerprints
from autopar.module.agreement.meeting import CALLS, Due, compared, has_others
from autopar.units import format_ranks

Given = Mapping[str, Any] | Sequence[Any]

# A loader's habit shows at once. Three steps, because the first batches of two loaders may agree
# by chance (a warm-up batch, equal padding); one evaluation, because its loader is another one.
N_CHECKED = {"step": 3, "local step": 3, "evaluation": 1, "loss": 1}
_WAYS_OUT = (
    "pass the same global batch on every rank (no DistributedSampler; seed the loader and "
    'its augmentation alike), or pm.step(..., batch="local") with the rows that '
    "pm.local_slice(name) says"
)


@dataclass(frozen=True)
class Rows:
    """The rows of an input that a rank passes: how many, and which of the global batch it reads.

    `of` is (first, after the last).
    """

    n: int
    of: tuple[int, int]

    @property
    def wanted(self) -> int:
        return self.of[1] - self.of[0]


class Agreement:
    """What this rank compares of the batches that it is called with.

    every   compare again each so many calls of a kind; None: only the first ones
    """

    def __init__(self, device: torch.device, every: int | None) -> None:
        self._device = device
        self._is_due = Due(every)

    def check(self, kind: str, given: Given) -> None:
        """Compare a global batch; `kind` is a key of `N_CHECKED`, or "plan" (shapes only).

        Raises `BatchError` on every rank if the batches or the kinds of calls differ.
        """
        if kind == "plan":
            if not has_others():
                return
        elif not self._is_due(kind, N_CHECKED[kind]):
            return
        every = compared(kind, fingerprints(given, with_content=kind != "plan"), self._device)
        if every is not None:
            _refuse_different(kind, list(every.values()))

    def check_local(self, given: Given, rows: Mapping[str, Rows]) -> None:
        """Compare a local batch; `rows` are of the inputs that this rank reads, by path.

        Raises `BatchError` if a rank passes another number of rows than it reads; where batches are
        compared on every rank, also if ranks that read the same rows have different ones.
        """
        kind = "local step"
        if not self._is_due(kind, N_CHECKED[kind]):
            _refuse_other_numbers([rows])
            return
        found = {path: (rows[path], f) for path, f in fingerprints(given).items() if path in rows}
        every = compared(kind, found, self._device, always=True)
        assert every is not None
        of_ranks = list(every.values())
        _refuse_other_numbers([{p: r for p, (r, _) in found.items()} for found in of_ranks])
        _refuse_different_rows(of_ranks)


def _refuse_different(kind: str, of_ranks: Sequence[Mapping[str, Fingerprint]]) -> None:
    first = of_ranks[0]
    paths = sorted({path for found in of_ranks for path in found})
    lines = []
    for path in paths:
        others = [r for r, found in enumerate(of_ranks) if found.get(path) != first.get(path)]
        if others:
            here, there = first.get(path), of_ranks[others[0]].get(path)
            lines.append(
                f"`{path}` on {format_ranks(others)} is not rank 0's: {_difference(here, there)}"
            )
    raise BatchError(
        f"{CALLS[kind]}: the batch differs between ranks:\n  " + "\n  ".join(lines), hint=_WAYS_OUT
    )


def _difference(first: Fingerprint | None, other: Fingerprint | None) -> str:
    if first is None or other is None:
        having = "rank 0 has none" if first is None else "only rank 0 has one"
        return having
    if first.form == other.form:
        return f"both are {first.form}, with other values"
    return f"{other.form}, where rank 0 has {first.form}"


def _refuse_other_numbers(of_ranks: Sequence[Mapping[str, Rows]]) -> None:
    lines = [
        f"`{path}` on rank {r}: {rows.n} rows, where pm.local_slice({path!r}) says rows "
        f"{rows.of[0]} to {rows.of[1]}, which are {rows.wanted}"
        for r, found in enumerate(of_ranks)
        for path, rows in found.items()
        if rows.n != rows.wanted
    ]
    if len(of_ranks) == 1:
        lines = [line.replace(" on rank 0:", ":") for line in lines]
    if lines:
        raise BatchError(
            "a local batch with another number of rows than this rank reads:\n  "
            + "\n  ".join(lines),
            hint="pass value[pm.local_slice(name)]; for a global batch of n rows that is not the "
            'planned one, pm.local_slice(name, n) and pm.step(..., batch="local", global_rows=n)',
        )


def _refuse_different_rows(of_ranks: Sequence[Mapping[str, tuple[Rows, Fingerprint]]]) -> None:
    known: dict[tuple[str, tuple[int, int]], tuple[int, Fingerprint]] = {}
    lines = []
    for r, found in enumerate(of_ranks):
        for path, (rows, mine) in found.items():
            owner, theirs = known.setdefault((path, rows.of), (r, mine))
            if theirs != mine:
                lines.append(
                    f"`{path}`, rows {rows.of[0]} to {rows.of[1]}: rank {r} has other ones than "
                    f"rank {owner} ({_difference(theirs, mine).replace('rank 0', f'rank {owner}')})"
                )
    if lines:
        raise BatchError(
            'pm.step(..., batch="local"): ranks that read the same rows have different ones:\n  '
            + "\n  ".join(lines),
            hint="these ranks share rows: give both value[pm.local_slice(name)] of one global "
            "batch, which is the same for equal slices",
        )
