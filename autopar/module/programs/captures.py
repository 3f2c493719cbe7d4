"""The programs that were captured for other shapes: how many are kept, and what the user is told.

Each shape of a batch is traced, placed and compiled anew, which takes seconds, and holds memory
(constants of that shape, the graph). So a new shape is announced, and the programs that were used
least recently are dropped. The planned program stays.
"""

from __future__ import annotations

import gc
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from typing import Generic, TypeVar

from autopar.module.agreement import Given, fingerprints
from autopar.module.programs.compiled_step import Kind
from autopar.module.programs.signatures import Signature

# Training, evaluation and a last shorter batch of each, for a few buckets of lengths.
MOST_KEPT = 16
# By then it is a stream of lengths, not a few buckets.
N_BEFORE_HINT = 6
T = TypeVar("T")
Key = tuple[bool, Kind, Signature]


class Captures(Generic[T]):
    """(mode, kind, signature) -> programs; `MOST_KEPT` beside the first, the planned one."""

    def __init__(self) -> None:
        self._planned: tuple[Key, T] | None = None
        self._others: OrderedDict[Key, T] = OrderedDict()
        self._announced: list[Signature] = []

    def __len__(self) -> int:
        return len(self._others) + (self._planned is not None)

    def __iter__(self) -> Iterator[T]:
        """The planned program, then the others, the least recently used first."""
        yield from [self._planned[1]] if self._planned else []
        yield from self._others.values()

    def items(self) -> Iterator[tuple[Key, T]]:
        """All keys and what is kept of them, the planned one first."""
        yield from [self._planned] if self._planned else []
        yield from self._others.items()

    def find(self, key: Key) -> T | None:
        """The program of a key, which counts as used."""
        if self._planned is not None and self._planned[0] == key:
            return self._planned[1]
        if key in self._others:
            self._others.move_to_end(key)
        return self._others.get(key)

    def add(self, key: Key, made: T) -> None:
        """Keep a program; drop the least recently used one if there are too many."""
        if self._planned is None or self._planned[0] == key:
            self._planned = key, made
            return
        self._others[key] = made
        if len(self._others) > MOST_KEPT:
            self._others.popitem(last=False)
            gc.collect()  # graphs are cycles; they may hold tensors on the device

    def is_new(self, signature: Signature) -> bool:
        """Whether no program of any kind is kept for these shapes."""
        keys = [self._planned[0]] if self._planned else []
        return all(kept != signature for _, _, kept in (*keys, *self._others))

    def announce(self, signature: Signature, given: Given) -> None:
        """Warn that a batch of a new signature was captured."""
        self._announced.append(signature)
        n = len(self._announced)
        forms = ", ".join(
            f"{path} {leaf.form}" for path, leaf in fingerprints(given, with_content=False).items()
        )
        hint = ""
        if n >= N_BEFORE_HINT:
            again = n - len(set(self._announced))
            hint = f" ({again} of them again)" if again else ""
            hint += (
                ": if shapes keep changing, pad batches to a few lengths (buckets), or use "
                "drop_last=True"
            )
        warnings.warn(
            f"captured a batch unlike the planned one: {forms}. The plan is the same, the program "
            f"is another. {n} so far, at most {MOST_KEPT} are kept{hint}",
            stacklevel=4,
        )
