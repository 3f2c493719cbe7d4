"""A slow disk is waited for as long as it writes.

Slowness is put into the system's `fsync` and into the bytes of each piece, because no slow file
system can be mounted everywhere.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import autopar
from autopar import AsyncSaver, Manual
from autopar.runtime.storage import data_files
from tests.helpers.jobs import machine
from tests.helpers.models.tiny_model import Tiny, batch
from tests.helpers.nightly import nightly

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


def slow_writes(patch: pytest.MonkeyPatch) -> None:
    """Each piece takes `PIECE_S` longer, and so does the disk's end."""
    bytes_of = data_files.bytes_of

    def slowly(value: torch.Tensor) -> Any:
        time.sleep(PIECE_S)
        return bytes_of(value)

    patch.setattr(data_files, "bytes_of", slowly)
    patch.setattr(os, "fsync", lambda _: time.sleep(PIECE_S))


def saves_slowly(folder: str) -> tuple[float, int, int]:
    """(seconds that a save took, the step that loads, the step that a saver beside it wrote)."""
    pm, optimizer = trained()
    with pytest.MonkeyPatch.context() as patch:
        slow_writes(patch)
        begun = time.monotonic()
        autopar.save(pm, optimizer, f"{folder}/alone", step=1)
        took_s = time.monotonic() - begun
        with AsyncSaver(f"{folder}/beside") as saver:
            saver.save(pm, optimizer, step=2)
            pm.step(**batch())
    alone, _ = autopar.load(pm, optimizer, f"{folder}/alone")
    return took_s, alone, autopar.load(pm, optimizer, f"{folder}/beside")[0]


@nightly
def test_a_slow_disk_is_waited_for(tmp_path: Path) -> None:
    for took_s, alone, beside in autopar.launch(
        saves_slowly, 2, str(tmp_path), timeout_s=TIMEOUT_S
    ):
        assert took_s > 1.5 * TIMEOUT_S
        assert (alone, beside) == (1, 2)
