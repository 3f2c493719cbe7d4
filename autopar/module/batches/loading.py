"""A loader for a parallel module: `pm.dataloader(dataset, batch_size)`.

`batch_size` is of the global batch. The order of rows depends on seed and epoch alone, so it is the
same on every rank and every mesh. What a rank loads:

    its rows            in training, where the plan splits rows over ranks, rows are dictionaries
                        and are collated as torch does: a row's tensor does not depend on others
    the whole batch     otherwise, and a batch with padding

Batches of the first kind say so themselves (`loaded.py`), and `pm.step` checks what they say.
torch's `DataLoader` does the loading, with workers and pinned memory (`assembly.py`). On a GPU, the
next batch is copied to it while a step runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, IterableDataset, Sampler, default_collate

from autopar.errors import BatchError, NotSupportedError, OptionError
from autopar.module.batches.assembly import Assembly, Fill, Pad, Part, Task
from autopar.module.batches.loaded import Loaded, PaddingRecord
from autopar.module.batches.local_rows import LocalRows
from autopar.module.job import from_rank_0
from autopar.passes.binding import nearest_sizes
from autopar.planning import Plan

ROWS = ("auto", "local", "global")
_OWN = {
    "sampler": "subclass the dataset, or torch.utils.data.Subset, to choose rows",
    "batch_sampler": "pass batch_size, shuffle and drop_last",
    "generator": "pass seed=",
}


@dataclass(frozen=True)
class Reader:
    """What a loader asks of its module.

    plan       None before there is one
    rows       which rows this rank reads
    check      (batch, n_rows, n_padded): raises `BatchError` if padding counts
    """

    plan: Callable[[], Plan | None]
    rows: Callable[[], LocalRows]
    is_training: Callable[[], bool]
    check: Callable[[Any, int, int], None]
    device: torch.device


class _Tasks(Sampler[Task]):
    """What torch's loader is to load next."""

    def __init__(self) -> None:
        self.tasks: Iterable[Task] = ()

    def __iter__(self) -> Iterator[Task]:
        return iter(self.tasks)


class Loader:
    """Batches for `pm.step`: `for batch in loader: pm.step(**batch)`. See `pm.dataloader`.

    Each `iter(loader)` is the next epoch, unless `set_epoch` or `load_state_dict` names one.
    """

    def __init__(
        self, reader: Reader, dataset: Any, batch_size: int, *, shuffle: bool, drop_last: bool,
        collate_fn: Callable[[list[Any]], Any] | None, pad: Pad | None, rows: str,
        seed: int | None, pin_memory: bool | None, options: Mapping[str, Any],
    ) -> None:  # fmt: skip
        _check(dataset, batch_size, rows, drop_last, pad, options)
        self.dataset, self.batch_size, self.drop_last = dataset, batch_size, drop_last
        self._reader, self._shuffle, self._rows = reader, shuffle, rows
        self._is_collated_by_row = collate_fn is None
        self._padding = None if pad is None else PaddingRecord()
        self._seed = from_rank_0(torch.initial_seed) if seed is None else seed
        self._epoch = self._next = 0
        self._is_placed = True  # the next iteration begins at (epoch, next)
        fill = Fill(pad) if isinstance(pad, Mapping) else pad
        on_gpu = reader.device.type == "cuda"
        self._tasks = _Tasks()
        self._assembly = Assembly(dataset, collate_fn or default_collate, fill)
        self._loader: DataLoader[Any] = DataLoader(
            self._assembly,
            batch_size=None, sampler=self._tasks, collate_fn=_identity,
            pin_memory=on_gpu if pin_memory is None else pin_memory,
            generator=torch.Generator(), **options,
        )  # fmt: skip

    def __len__(self) -> int:
        """The number of batches of an epoch."""
        whole, left = divmod(len(self.dataset), self.batch_size)
        return whole + (left > 0 and not self.drop_last)

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is of this epoch; in the middle of it, if a loaded state is."""
        if not (self._is_placed and epoch == self._epoch):
            self._epoch, self._next, self._is_placed = epoch, 0, True

    def state_dict(self) -> dict[str, Any]:
        """Which batch comes next; the same on every rank and for any mesh, and it survives JSON.

        Batches that were only prefetched count as not yet read.
        """
        return {
            "epoch": self._epoch, "next_batch": self._next, "seed": self._seed,
            **self._loader_facts(),
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the next iteration where a state was taken.

        Raises `OptionError` if the state is of other batches.
        """
        own = self._loader_facts()
        other = {k: v for k, v in own.items() if state.get(k) != v}
        if other or not {"epoch", "next_batch", "seed"} <= state.keys():
            kept = {k: state.get(k) for k in own}
            raise OptionError(
                f"the state is of a loader with {kept}; this one has {own}",
                hint="resume with the dataset, batch size and shuffle of the state",
            )
        self._epoch, self._next = int(state["epoch"]), int(state["next_batch"])
        self._seed, self._is_placed = int(state["seed"]), True

    def __iter__(self) -> Iterator[Any]:
        """The batches of an epoch. Raises `BatchError` now if the plan refuses one of them."""
        if not self._is_placed:
            self._epoch, self._next = self._epoch + 1, 0
        self._is_placed = False
        tasks = self._epoch_tasks(self._epoch)[self._next :]
        self._check_padding(tasks)
        return self._iterate(tasks, self._epoch)

    def _check_padding(self, tasks: list[Task]) -> None:
        """Find out before an epoch whether the padding of its last batch counts."""
        if not tasks or not tasks[-1].n_padded or self._reader.plan() is None:
            return
        assert self._padding is not None
        if not self._padding.is_exact:
            batch, is_local = self._assembly[tasks[-1]]
            mark = self._marked(tasks[-1], batch, is_local)["batch"]
            on_device = pytree.tree_map_only(Tensor, lambda t: t.to(self._reader.device), batch)
            self._reader.check(on_device, mark.n_rows, mark.n_padded)
            self._padding.is_exact = True

    def _iterate(self, tasks: list[Task], epoch: int) -> Iterator[Any]:
        self._tasks.tasks = tasks
        batches = ahead(iter(self._loader), self._reader.device)
        for task, (batch, is_local) in zip(tasks, batches, strict=True):
            self._epoch, self._next = epoch, task.number + 1
            yield self._marked(task, batch, is_local)
        self._epoch, self._next, self._is_placed = epoch + 1, 0, True

    def _epoch_tasks(self, epoch: int) -> list[Task]:
        n, size, order = len(self.dataset), self.batch_size, list(range(len(self.dataset)))
        if self._shuffle:
            generator = torch.Generator().manual_seed(self._seed + epoch)
            order = torch.randperm(n, generator=generator).tolist()
        sizes = {min(size, n - k * size) for k in range(len(self))}
        trains = self._reader.is_training()
        pads = self._padding is not None and trains
        if trains and self._reader.plan() is not None:
            self._check_sizes({size} if pads else sizes)
        parts = {s: None if pads and s < size else self._part(s) for s in sizes}
        return [
            Task(
                tuple(own := order[k * size : (k + 1) * size]), (self._seed, epoch), k,
                size - len(own) if pads else 0, parts[len(own)],
            )
            for k in range(len(self))
        ]  # fmt: skip

    def _check_sizes(self, sizes: set[int]) -> None:
        rows = self._reader.rows()
        for size in sorted(sizes, reverse=True):
            if size % rows.n_divisor:
                last = "the last batch of an epoch" if size < self.batch_size else "a batch"
                raise BatchError(
                    f"{last} has {size} rows ({len(self.dataset)} rows by {self.batch_size}), and "
                    f"does not divide by {rows.n_divisor}, the microbatches x ranks that split it; "
                    f"{nearest_sizes(size, rows.n_divisor)}",
                    hint="drop_last=True, a batch_size that divides, or pad= with rows that do not "
                    'count: pad={"input_ids": 0, "labels": -100}',
                )

    def _part(self, n_rows: int) -> Part | None:
        """What this rank loads of a batch; None if that is the whole batch, on every rank."""
        reason = self._why_whole()
        if reason is not None:
            if self._rows == "local":
                raise NotSupportedError(
                    f'rows="local": {reason}', hint='rows="auto" or "global" loads whole batches'
                )
            return None
        rows = self._reader.rows()
        found = {path: rows.slice_of(path, n_rows) for path in rows.shapes}
        inputs = {p: None if s is None else (s.start, s.stop) for p, s in found.items()}
        read = [pair for pair in inputs.values() if pair is not None] or [(0, 1)]
        return Part(
            (min(a for a, _ in read), max(b for _, b in read)), inputs,
            {path: tuple(shape[1:]) for path, shape in rows.shapes.items()},
        )  # fmt: skip

    def _why_whole(self) -> str | None:
        """Why every rank loads the whole batch; the same on every rank."""
        plan = self._reader.plan()
        if self._rows == "global":
            return "the whole batch was asked for"
        if not self._reader.is_training():
            return "evaluation takes whole batches"
        if plan is None:
            return "there is no plan yet"
        if plan.data.accumulates:
            return "its microbatches are parts of the whole batch"
        if self._rows == "auto" and not self._is_collated_by_row:
            return "collate_fn may make a row depend on others"
        return self._reader.rows().why_whole()

    def _marked(self, task: Task, batch: Any, is_local: bool) -> Any:
        """The batch, with what `pm.step` must know of it."""
        n_rows = len(task.indices) + task.n_padded
        if is_local:
            assert task.part is not None
            read = {p: r for p, r in task.part.inputs.items() if r is not None}
            mark = Loaded(n_rows, read)
        elif task.n_padded:
            assert self._padding is not None
            mark = Loaded(n_rows, None, task.n_padded, self._padding)
        else:
            return batch
        if not isinstance(batch, Mapping) or "batch" in batch:
            raise BatchError(
                f"a batch with padding, or of one rank's rows, is a dictionary without the key "
                f"`batch`; it is {_described(batch)}",
                hint="let the dataset return dictionaries of the model's inputs, or drop_last=True",
            )
        return {**batch, "batch": mark}

    def _loader_facts(self) -> dict[str, Any]:
        return {
            "n_rows": len(self.dataset), "batch_size": self.batch_size, "shuffle": self._shuffle,
        }  # fmt: skip


def ahead(batches: Iterator[Any], device: torch.device) -> Iterator[Any]:
    """The batches on a GPU, each copied while the one before it is used; on a CPU as they are."""
    if device.type != "cuda":
        yield from batches
        return
    copies = torch.cuda.Stream(device)
    waiting: tuple[Any, torch.cuda.Event] | None = None
    for batch in batches:
        with torch.cuda.stream(copies):
            moved = pytree.tree_map_only(Tensor, lambda t: t.to(device, non_blocking=True), batch)
            copied = copies.record_event()
        if waiting is not None:
            yield _arrived(waiting[0], waiting[1], device)
        waiting = moved, copied
    if waiting is not None:
        yield _arrived(waiting[0], waiting[1], device)


def _arrived(batch: Any, copied: torch.cuda.Event, device: torch.device) -> Any:
    """A copied batch for the current stream, which waits for the copy and then owns the memory."""
    stream = torch.cuda.current_stream(device)
    stream.wait_event(copied)
    pytree.tree_map_only(Tensor, lambda t: t.record_stream(stream), batch)
    return batch


def _identity(batch: Any) -> Any:
    return batch


def _described(batch: Any) -> str:
    keys = f" with {sorted(batch)}" if isinstance(batch, Mapping) else ""
    return f"a {type(batch).__name__}{keys}"


def _check(
    dataset: Any, batch_size: int, rows: str, drop_last: bool, pad: Any, options: Mapping[str, Any]
) -> None:
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise NotSupportedError(
            f"a loader of {type(dataset).__name__}, whose rows have no index",
            hint="torch.utils.data.DataLoader(dataset, batch_size) with the same stream on every "
            "rank, and pm.step(**batch) with its whole batches",
        )
    if batch_size < 1:
        raise OptionError(f"batch_size={batch_size}: it is the rows of the global batch")
    if len(dataset) < (batch_size if drop_last else 1):
        raise OptionError(f"the dataset has {len(dataset)} rows: no batch of {batch_size}")
    if rows not in ROWS:
        raise OptionError(f"rows={rows!r}: it is one of {', '.join(map(repr, ROWS))}")
    if pad is not None and drop_last:
        raise OptionError("pad= and drop_last=True", hint="a dropped batch is not padded")
    for name in options.keys() & _OWN.keys():
        raise OptionError(
            f"{name}=: the order of rows must be the same on every rank", hint=_OWN[name]
        )
