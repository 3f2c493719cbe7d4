"""How rows of a dataset become a batch: in the loader's own process or in its workers.

A `Task` names the rows of one batch. Its rows depend on the dataset, the seed, the epoch and their
indices alone: random numbers that the dataset draws (Python's, torch's and NumPy's global
generators) are seeded for every row, those that `collate_fn` draws for every batch. So a row is the
same on every rank, for any number of workers, and after a resume. (A dataset that reads many rows
at once, by `__getitems__`, is seeded by the first of them.) Seeding takes some 10 µs a row.
"""

from __future__ import annotations

import contextlib
import hashlib
import numbers
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import Dataset, Subset

from autopar.errors import BatchError

Pad = Mapping[str, Any] | Callable[[Any], Any]


@dataclass(frozen=True)
class Part:
    """The rows of a batch that one rank loads.

    rows     [first, last) of the batch: those that any of its inputs needs; at least one
    inputs   path -> (first, after the last) of the batch; None if this rank reads none
    shapes   path -> the planned shape of one row
    """

    rows: tuple[int, int]
    inputs: Mapping[str, tuple[int, int] | None]
    shapes: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Task:
    """One batch.

    indices    of its rows, in the dataset
    n_padded   rows of padding after them
    seed       (seed, epoch); `number` is the batch's in the epoch
    part       what this rank loads; None: the whole batch
    """

    indices: tuple[int, ...]
    seed: tuple[int, int]
    number: int
    n_padded: int = 0
    part: Part | None = None


@dataclass(frozen=True)
class Fill:
    """Padding rows by name of an input: every element is `values[name]`."""

    values: Mapping[str, Any]

    def __call__(self, row: Any) -> Any:
        """A padding row of the form of `row`. Raises `BatchError` for inputs without a value."""
        if not isinstance(row, Mapping):
            raise BatchError(
                f"pad={dict(self.values)!r} names inputs, and a row of the dataset is a "
                f"{type(row).__name__}",
                hint="let the dataset return dictionaries, or pad=fn with fn(row) -> a padding row",
            )
        if set(row) != set(self.values):
            raise BatchError(
                f"pad= has values for {sorted(self.values)}, and rows have {sorted(row)}",
                hint='give every input of a row a value: pad={"input_ids": 0, "labels": -100}',
            )
        return {
            name: pytree.tree_map(lambda leaf, v=self.values[name]: _filled(leaf, v), value)
            for name, value in row.items()
        }


def _filled(leaf: Any, value: Any) -> Any:
    if isinstance(leaf, Tensor):
        return torch.full_like(leaf, value)
    if isinstance(leaf, np.ndarray):
        return np.full_like(leaf, value)
    if isinstance(leaf, numbers.Number):
        return type(leaf)(value)  # type: ignore[call-arg]
    raise BatchError(
        f"pad= cannot fill a {type(leaf).__name__}", hint="give pad=fn with fn(row) -> a row"
    )


class Assembly(Dataset[Any]):
    """A dataset whose items are batches; its keys are tasks."""

    def __init__(
        self,
        dataset: Any,
        collate_fn: Callable[[list[Any]], Any],
        pad: Callable[[Any], Any] | None,
    ) -> None:
        self._dataset, self._collate, self._pad = dataset, collate_fn, pad

    def __getitem__(self, task: Task) -> tuple[Any, bool]:
        """(batch, whether it has the rows of this rank alone).

        A dataset whose rows are no dictionaries gives whole batches: rows have no names by which
        to say what a rank reads.
        """
        with own_random_numbers():
            if task.part is not None:
                first, after = task.part.rows
                rows = self._rows(task, task.indices[first:after])
                if isinstance(rows[0], Mapping):
                    return self._part(task.part, self._collated(task, rows)), True
            rows = self._rows(task, task.indices)
            if task.n_padded:
                assert self._pad is not None
                rows += [self._pad(rows[-1]) for _ in range(task.n_padded)]
            return self._collated(task, rows), False

    def _rows(self, task: Task, indices: Sequence[int]) -> list[Any]:
        dataset: Any = self._dataset
        while type(dataset) is Subset:
            indices, dataset = [dataset.indices[i] for i in indices], dataset.dataset
        at_once = getattr(dataset, "__getitems__", None)
        if at_once is not None:
            seed_everything(*task.seed, "row", indices[0])
            return list(at_once(list(indices)))
        rows = []
        for index in indices:
            seed_everything(*task.seed, "row", index)
            rows.append(dataset[index])
        return rows

    def _collated(self, task: Task, rows: list[Any]) -> Any:
        seed_everything(*task.seed, "batch", task.number)
        return self._collate(rows)

    def _part(self, part: Part, batch: dict[str, Any]) -> dict[str, Any]:
        out = {}
        for name, value in batch.items():
            if name not in part.inputs:
                out[name] = value
                continue
            shape = tuple(value.shape[1:])
            if shape != part.shapes[name]:
                raise BatchError(
                    f"rows of `{name}` have shape {shape}, planned as {part.shapes[name]}: a rank "
                    "that loads only its own rows does not know those of the others",
                    hint='pm.dataloader(..., rows="global") loads the whole batch on every rank',
                )
            rows = part.inputs[name]
            if rows is not None:
                out[name] = value[rows[0] - part.rows[0] : rows[1] - part.rows[0]]
        return out


def seed_everything(*key: object) -> None:
    """Seed the global generators (of the CPU) by the words of a key."""
    words = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    seed = int.from_bytes(words, "little")
    random.seed(seed)
    np.random.seed(seed % (1 << 32))
    torch.default_generator.manual_seed(seed)


@contextlib.contextmanager
def own_random_numbers() -> Iterator[None]:
    """What is drawn inside does not move the generators of the process."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])
