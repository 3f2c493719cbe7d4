"""A slow disk is waited for as long as it writes; one that stands still ends the job, by name.

Either way the checkpoint before stays. Slowness is put into the system's `fsync` and into the bytes
of each piece, because no slow file system can be mounted everywhere.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import autopar
from autopar import AsyncSaver, LaunchError, Manual
from autopar.runtime.storage import data_files
from tests.helpers.jobs import machine
from tests.helpers.models.tiny_model import Tiny, batch

# Ranks start up to some seconds apart on a busy machine, which must not be taken for a stop.
TIMEOUT_S = 10.0
PIECE_S = TIMEOUT_S / 8


def trained() -> tuple[autopar.ParallelModule, torch.optim.Optimizer]:
    torch.manual_seed(0)
    pm = autopar.parallelize(Tiny(), machine((1, 2)), batch(), manual=Manual(dp=2, zero=3))
    optimizer = torch.optim.AdamW(pm.parameters(), lr=1e-3)
    pm.step(**batch())
    optimizer.step()
    return pm, optimizer


def slow_writes(patch: pytest.MonkeyPatch, piece_s: float, at_piece: int | None = None) -> None:
    """Each piece takes `piece_s` longer, or only piece `at_piece` does; so does the disk's end."""
    bytes_of, n_written = data_files.bytes_of, 0

    def slowly(value: torch.Tensor) -> Any:
        nonlocal n_written
        n_written += 1
        if at_piece in (None, n_written):
            time.sleep(piece_s)
        return bytes_of(value)

    patch.setattr(data_files, "bytes_of", slowly)
    if at_piece is None:
        patch.setattr(os, "fsync", lambda _: time.sleep(piece_s))


def saves_slowly(folder: str) -> tuple[float, int, int]:
    """(seconds that a save took, the step that loads, the step that a saver beside it wrote)."""
    pm, optimizer = trained()
    with pytest.MonkeyPatch.context() as patch:
        slow_writes(patch, PIECE_S)
        begun = time.monotonic()
        autopar.save(pm, optimizer, f"{folder}/alone", step=1)
        took_s = time.monotonic() - begun
        with AsyncSaver(f"{folder}/beside") as saver:
            saver.save(pm, optimizer, step=2)
            pm.step(**batch())
    alone, _ = autopar.load(pm, optimizer, f"{folder}/alone")
    return took_s, alone, autopar.load(pm, optimizer, f"{folder}/beside")[0]


def test_a_slow_disk_is_waited_for(tmp_path: Path) -> None:
    for took_s, alone, beside in autopar.launch(
        saves_slowly, 2, str(tmp_path), timeout_s=TIMEOUT_S
    ):
        assert took_s > 1.5 * TIMEOUT_S
        assert (alone, beside) == (1, 2)


def stands_still(folder: str) -> None:
    pm, optimizer = trained()
    autopar.save(pm, optimizer, folder, step=1)
    with pytest.MonkeyPatch.context() as patch:
        if os.environ["RANK"] == "1":
            slow_writes(patch, 600.0, at_piece=2)
        autopar.save(pm, optimizer, folder, step=2)


def loads(folder: str) -> int:
    pm, optimizer = trained()
    return autopar.load(pm, optimizer, folder)[0]


def test_a_disk_that_stands_still_ends_the_job(tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    begun = time.monotonic()
    with pytest.raises(LaunchError) as refusal:
        autopar.launch(stands_still, 2, folder, timeout_s=TIMEOUT_S)
    assert time.monotonic() - begun < 120
    (notes,) = refusal.value.__notes__
    assert re.search(r"rank 1: .*autopar\.save\(\.\.\.\): writing `", notes), notes
    assert autopar.launch(loads, 2, folder) == [1, 1]
