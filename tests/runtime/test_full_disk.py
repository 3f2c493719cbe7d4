"""A disk that is really full: the checkpoint before stays, and saving works again with room."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import autopar
from autopar import Manual, StateError
from autopar.runtime.launch import WorkerPool
from tests.helpers.jobs import machine
from tests.helpers.models.tiny_model import Tiny, batch

DISK_BYTES = 400_000


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.getuid() != 0:
        pytest.skip("only root may mount a small file system")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if mounted.returncode:
        pytest.skip(f"a small file system cannot be mounted: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def filled(folder: str) -> tuple[str, int, list[str], int]:
    """(error, step that loads, files of the disk then, step that loads with room again)."""
    torch.manual_seed(0)
    pm = autopar.parallelize(Tiny(), machine((1, 2)), batch(), manual=Manual(dp=2, zero=3))
    optimizer = torch.optim.AdamW(pm.parameters(), lr=1e-3)
    path, ballast = Path(folder) / "checkpoint", Path(folder) / "ballast"
    pm.step(**batch())
    optimizer.step()
    autopar.save(pm, optimizer, path, step=1)
    if os.environ["RANK"] == "0":
        ballast.write_bytes(b"x" * (os.statvfs(folder).f_bavail * os.statvfs(folder).f_bsize))
    torch.distributed.barrier()
    with pytest.raises(StateError) as refusal:
        autopar.save(pm, optimizer, path, step=2)
    step, _ = autopar.load(pm, optimizer, path)
    names = sorted(entry.name for entry in Path(folder).iterdir())
    torch.distributed.barrier()
    if os.environ["RANK"] == "0":
        ballast.unlink()
    torch.distributed.barrier()
    autopar.save(pm, optimizer, path, step=2)
    return str(refusal.value), step, names, autopar.load(pm, optimizer, path)[0]


def test_the_checkpoint_before_stays(workers: Callable[[int], WorkerPool], disk: Path) -> None:
    for message, step, names, again in workers(2).run(filled, str(disk)):
        assert "No space left on device" in message and "hint: " in message
        assert (step, again) == (1, 2)
        assert names == ["ballast", "checkpoint"]
