"""Opens a checkpoint on all ranks together: the newest that is whole, or none at all."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

from autopar.errors import StateError
from autopar.runtime.state.names import Shape, gathered, own_rank, together, world_size
from autopar.runtime.storage import Checkpoint, DamagedError, candidates, disk_faults

# What a checkpoint holds beside the entries of `model.state_dict()` has these prefixes.
OPTIMIZER_PREFIX = "optimizer.state."
OWN_PREFIX = "autopar."


def open_newest(path: str | os.PathLike[str], verify: bool = True) -> Checkpoint:
    """The newest whole checkpoint that a path stands for; all ranks call it, and agree.

    Each rank proves a share of the data, unless `verify` is False. If the newest is damaged, the
    one before is taken, with a warning.

    Raises `StateError` on every rank, with the rank that found the damage, if none is whole.
    """
    folders: list[Path] = []
    with together(), disk_faults("reading", Path(path)):
        if own_rank() == 0:  # a file system may show ranks different listings for a while
            folders = candidates(Path(path).absolute())
    damages: list[str] = []
    for folder in gathered(folders)[0]:
        found = _proved(folder, verify)
        if isinstance(found, Checkpoint):
            if damages and own_rank() == 0:
                text = "\n".join([f"{folder} is loaded, because the newer is damaged:", *damages])
                warnings.warn(text, stacklevel=4)
            return found
        damages.append(found)
    raise StateError("\n".join(damages))


def _proved(folder: Path, verify: bool) -> Checkpoint | str:
    """The open checkpoint, or what any rank found damaged in it.

    Raises `StateError` on every rank for one that is not damaged, but cannot be read.
    """
    checkpoint: Checkpoint | None = None
    damage: DamagedError | None = None
    with together():
        try:
            checkpoint = Checkpoint(folder)
            if verify:
                checkpoint.check(own_rank(), world_size())
        except DamagedError as error:
            damage = error
    for rank, message in enumerate(gathered(None if damage is None else str(damage))):
        if message is not None:
            return message if world_size() == 1 else f"rank {rank} found: {message}"
    assert checkpoint is not None
    return checkpoint


def model_shapes(checkpoint: Checkpoint) -> dict[str, Shape]:
    """Name -> whole shape of the entries of the model's state dict."""
    return {
        name: stored.shape
        for name, stored in checkpoint.tensors.items()
        if not name.startswith((OPTIMIZER_PREFIX, OWN_PREFIX))
    }
