"""Checkpoint folders: replaced in one step, and side by side.

    path/autopar.json            one checkpoint; a save replaces it
    path/step-00000010/          checkpoints side by side (`AsyncSaver`), by step

A save writes to `.<folder>.draft` beside the final place, and the manifest last. Then it renames
the old checkpoint to `.<folder>.old`, renames the draft, and removes the old one. So whenever the
job dies, `<folder>` or else `.<folder>.old` is a whole checkpoint.
"""

from __future__ import annotations

import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

from autopar.errors import StateError
from autopar.runtime.storage.faults import DamagedError
from autopar.runtime.storage.manifest import MANIFEST, Manifest

_STEP = re.compile(r"step-(\d{8,})")


def is_checkpoint(folder: Path) -> bool:
    """Whether a save was finished here; it may have been damaged since."""
    return (folder / MANIFEST).is_file()


def holds_checkpoint(path: Path) -> bool:
    """Whether a path is meant as a checkpoint: one, several steps, or one that is not read."""
    is_old = is_checkpoint(beside(path, "old")) or (path / ".metadata").is_file()
    return is_old or is_checkpoint(path) or bool(_steps(path))


def step_folder(path: Path, step: int) -> Path:
    return path / f"step-{step:08d}"


def candidates(path: Path) -> list[Path]:
    """The checkpoints that a path stands for, the one to prefer first.

    Raises `StateError` if there is none.
    """
    steps = _steps(path)
    found = [path] if is_checkpoint(path) or not steps else [steps[s] for s in sorted(steps)[::-1]]
    every = [f for folder in found for f in (folder, beside(folder, "old")) if is_checkpoint(f)]
    if every:
        return every
    if (path / ".metadata").is_file():
        raise StateError(
            f"{path} was written by torch.distributed.checkpoint: its metadata are a pickle, "
            "which could run code and is not read",
            hint=f"if you trust it: autopar convert {path} NEW",
        )
    raise StateError(
        f"there is no whole checkpoint at {path}",
        hint="a save that was interrupted leaves only a draft; load an earlier checkpoint"
        if beside(path, "draft").exists() or (path.is_dir() and any(path.glob(".step-*.draft")))
        else "autopar.save writes checkpoints; for other weights use weights=path",
    )


def beside(folder: Path, what: str) -> Path:
    return folder.with_name(f".{folder.name}.{what}")


def refuse_other_folder(folder: Path) -> None:
    """Raise `StateError` if the folder holds anything but a checkpoint: that is never deleted.

    Nor is one saved inside another, which the next save would replace.
    """
    if is_checkpoint(folder.parent):
        raise StateError(
            f"{folder.parent} is a checkpoint itself; nothing is saved inside of it",
            hint="choose another path",
        )
    if not folder.exists():
        return
    if not folder.is_dir() or (any(folder.iterdir()) and not is_checkpoint(folder)):
        raise StateError(
            f"{folder} exists and is not a checkpoint; it is not overwritten",
            hint="choose another path, or remove it",
        )


def make_draft(folder: Path) -> None:
    """An empty draft beside the folder; what an earlier save left of one is removed."""
    draft = beside(folder, "draft")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)


def discard(folder: Path) -> None:
    """Remove the draft of a save that failed, so that it takes no space."""
    shutil.rmtree(beside(folder, "draft"), ignore_errors=True)


def put_in_place(folder: Path) -> None:
    """The draft, with its manifest, becomes the checkpoint."""
    draft, old = beside(folder, "draft"), beside(folder, "old")
    _sync(draft)
    if folder.exists():
        # A save that died after its last rename left it; `folder` is complete.
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
    draft.rename(folder)
    _sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def prune(path: Path, keep_last: int, keep_every: int | None) -> None:
    """Remove steps, but for the last `keep_last` that look whole and every `keep_every`-th.

    A damaged one does not count as one of the last, and is left for its owner to look at. Drafts
    are of saves that died: there is one save at a time.
    """
    for draft in path.glob(".step-*.draft"):
        shutil.rmtree(draft, ignore_errors=True)
    steps = {step: folder for step, folder in _steps(path).items() if _looks_whole(folder)}
    last = sorted(steps)[-keep_last:]
    for step, folder in steps.items():
        if step not in last and (keep_every is None or step % keep_every):
            # Without its manifest, a half removed folder is no checkpoint.
            with suppress(FileNotFoundError):
                (folder / MANIFEST).unlink()
            shutil.rmtree(folder, ignore_errors=True)


def _steps(path: Path) -> dict[int, Path]:
    """Step -> its folder, finished or replaced by a save that died."""
    if not path.is_dir():
        return {}
    found = {}
    for entry in path.iterdir():
        name = entry.name.removeprefix(".").removesuffix(".old")
        match = _STEP.fullmatch(name)
        if match and entry.is_dir() and is_checkpoint(entry):
            found[int(match[1])] = path / name
    return found


def _looks_whole(folder: Path) -> bool:
    """Whether the manifest is proved, and the files are there with their sizes."""
    try:
        files = Manifest.read(folder).files
        return all((folder / f.name).stat().st_size == f.n_bytes for f in files)
    except (DamagedError, StateError, OSError):
        return False


def _sync(folder: Path) -> None:
    """Wait until the disk has the names in a folder."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
