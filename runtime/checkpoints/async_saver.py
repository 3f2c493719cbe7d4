"""Saves beside training: a step waits for a copy to host memory, never for the disk.

    save     the save before is waited for; ranks agree on what is saved, and that replicas are
             equal; every piece is copied to host buffers, which the next save uses again; then
             training goes on
    thread   each rank writes its own files; when all have, rank 0 publishes (`saving.py`), and
             removes old steps

The thread's collectives run in a gloo group of its own, so they meet none of training's, whatever
order the two come in. There is one save at a time. What fails in the thread fails on all ranks, and
is raised by the next `save` or `wait`.
"""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.errors import OptionError
from autopar.runtime.checkpoints.contents import ModuleState
from autopar.runtime.checkpoints.replicas import check_replicas
from autopar.runtime.checkpoints.saving import (
    Snapshot,
    States,
    begin,
    snapshot,
    write_and_publish,
)
from autopar.runtime.checkpoints.several import Optimizers
from autopar.runtime.flight import explained
from autopar.runtime.groups import current_context, new_group, together_in
from autopar.runtime.state import own_rank, together, world_size
from autopar.runtime.storage import Piece, disk_faults, prune, step_folder

_POLL_S = 0.25


class Checkpointed(Protocol):
    """A parallel module."""

    def checkpointed(self) -> ModuleState: ...


class _Kept(NamedTuple):
    path: Path
    last: int
    every: int | None


class AsyncSaver:
    """Checkpoints of several steps in one folder, written while training goes on.

        with autopar.AsyncSaver("ckpt", keep_last=2, keep_every=1000) as saver:
            for step, batch in enumerate(loader, 1):
                ...
                if step % 100 == 0:
                    saver.save(pm, optimizer, step=step)

    `autopar.load(pm, optimizer, "ckpt")` takes the newest whole one. The last `keep_last` steps and
    those that `keep_every` divides are kept. Leaving the block waits for the last save; without a
    block, call `wait`. It holds one copy of this rank's state in host memory.
    """

    def __init__(
        self, path: str | os.PathLike[str], keep_last: int = 2, keep_every: int | None = None
    ) -> None:
        for name, value in (("keep_last", keep_last), ("keep_every", keep_every)):
            if not (value is None and name == "keep_every") and (
                type(value) is not int or value < 1
            ):
                raise OptionError(f"{name} is a count, 1 or more, not {value!r}")
        self._path = Path(path).absolute()
        self._keep = _Kept(self._path, keep_last, keep_every)
        self._buffers: dict[tuple[int, str], Tensor] = {}
        self._group: dist.ProcessGroup | None = None
        self._thread = ThreadPoolExecutor(1, "autopar.AsyncSaver")
        self._pending: list[Future[None]] = []
        weakref.finalize(self, _tell_failure, self._pending)

    def save(
        self,
        module: Checkpointed,
        optimizer: Optimizers,
        *,
        step: int,
        extra: Mapping[str, Any] | None = None,
        states: States | None = None,
    ) -> None:
        """Begin to save what there is now as `path/step-<step>`; every rank must call it.

        Raises what `autopar.save` raises, and what the save before failed with.
        """
        if step < 0:
            raise OptionError(f"step is the number of steps done, not {step}")
        held = module.checkpointed()
        with together_in("AsyncSaver.save(...)"):
            self.wait()
            check_replicas(held)
            taken = snapshot(held, optimizer, step, extra, states)
            folder = step_folder(self._path, step)
            save_id = begin(folder)
            if self._group is None and world_size() > 1:
                self._group = new_group(range(world_size()), backend="gloo")
            staged = replace(taken, files=self._staged(taken.files))
        write = partial(_write, folder, staged, save_id, self._group, self._keep)
        self._pending.append(self._thread.submit(write))

    def wait(self) -> None:
        """Wait until the last save is complete, and in its place; raises what it failed with."""
        if not self._pending:
            return
        saved, flight = self._pending.pop(), current_context().flight
        with explained(flight.together("AsyncSaver.wait()")):
            while not wait([saved], timeout=_POLL_S).done:
                flight.progress_beside("the save before is written")
            saved.result()

    def __enter__(self) -> AsyncSaver:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Wait for the last save, unless an error leaves the block: other ranks may be gone."""
        if kind is None:
            self.wait()

    def _staged(self, files: list[dict[str, Piece]]) -> list[dict[str, Piece]]:
        """The pieces, copied to host buffers; buffers of the save before are used again."""
        before, self._buffers = self._buffers, {}
        for k, pieces in enumerate(files):
            for name, piece in pieces.items():
                self._buffers[k, name] = _copied(piece.value, before.get((k, name)))
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return [
            {name: replace(piece, value=self._buffers[k, name]) for name, piece in pieces.items()}
            for k, pieces in enumerate(files)
        ]


def _write(
    folder: Path, staged: Snapshot, save_id: str, group: dist.ProcessGroup | None, kept: _Kept
) -> None:
    """What the thread does."""
    write_and_publish(folder, staged, save_id, group)
    with together(group):
        if own_rank() == 0:
            with disk_faults("removing old steps of", kept.path):
                prune(*kept)


def _copied(value: Tensor, buffer: Tensor | None) -> Tensor:
    """A copy on the host, in `buffer` if that fits; from a GPU, it is under way."""
    if buffer is None or (buffer.shape, buffer.dtype) != (value.shape, value.dtype):
        buffer = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
    return buffer.copy_(value, non_blocking=value.is_cuda)


def _tell_failure(pending: list[Future[None]]) -> None:
    """Nobody waited for the last save: say if it failed."""
    for future in pending:
        error = future.exception() if future.done() else None
        if error is not None:
            warnings.warn(f"the last save of an AsyncSaver failed: {error}", stacklevel=1)
