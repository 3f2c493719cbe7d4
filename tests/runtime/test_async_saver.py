"""Saves beside training: what they hold, what stays, what is loaded, and errors that surface."""

from __future__ import annotations

import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import AdamW

from autopar import AsyncSaver
from autopar.errors import OptionError, StateError
from autopar.runtime.state import initial_shards
from autopar.runtime.storage import write_pieces
from tests.helpers.checkpoint_jobs import Rank, assert_same
from tests.helpers.full_disk import files_of_at_most
from tests.helpers.pools import Pool
from tests.helpers.state_model import ONE, PAIR, seeded_model

WRITES = "autopar.runtime.checkpoints.saving.write_pieces"


def slowly(*args: Any) -> Any:
    time.sleep(0.3)
    return write_pieces(*args)


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def flip(folder: Path) -> None:
    """Flip a bit of the last data file."""
    file = sorted(folder.glob("*.safetensors"))[-1]
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")


def test_what_is_kept_and_what_is_loaded(tmp_path: Path) -> None:
    rank = Rank(ONE, 0, AdamW)
    at: dict[int, dict[str, Tensor]] = {}
    with AsyncSaver(tmp_path / "run", keep_last=2, keep_every=3) as saver:
        for step in range(1, 7):
            rank.train(step, 1)
            at[step] = rank.whole()
            saver.save(rank, rank.optimizer, step=step, extra={"seen": step})
    assert names(tmp_path / "run") == ["step-00000003", "step-00000005", "step-00000006"]
    again = Rank(ONE, 5, AdamW)
    assert again.load(str(tmp_path / "run")) == (6, {"seen": 6})
    assert_same(again.whole(), at[6])
    assert again.load(str(tmp_path / "run" / "step-00000003"))[0] == 3
    assert_same(again.whole(), at[3])
    flip(tmp_path / "run" / "step-00000006")
    with pytest.warns(UserWarning, match=r"step-00000005 is loaded, because the newer is damaged"):
        assert again.load(str(tmp_path / "run"))[0] == 5
    assert_same(again.whole(), at[5])
    with pytest.warns(UserWarning, match="step-00000005 is loaded"):
        shards = initial_shards(rank.place, str(tmp_path / "run"), seeded_model(0))
    assert torch.equal(shards["qkv.weight"], at[5]["qkv.weight/value"])
    for folder in (tmp_path / "run").iterdir():
        flip(folder)
    with pytest.raises(StateError, match=r"step-00000006(?s:.*)step-00000005(?s:.*)step-00000003"):
        again.load(str(tmp_path / "run"))


def test_a_damaged_step_is_not_one_of_the_last(tmp_path: Path) -> None:
    rank, saver = Rank(ONE, 0, AdamW), AsyncSaver(tmp_path, keep_last=1)
    for step in (1, 2):
        saver.save(rank, rank.optimizer, step=step)
        saver.wait()
    next((tmp_path / "step-00000002").glob("*.safetensors")).unlink()
    (tmp_path / ".step-00000007.draft").mkdir()
    saver.save(rank, rank.optimizer, step=1)
    saver.wait()
    assert names(tmp_path) == ["step-00000001", "step-00000002"]


def train_beside(path: str) -> tuple[list[float], bool, bool]:
    """(the losses of steps beside a slow save, was it under way, are the saved values as then)."""
    rank, saver = Rank(PAIR, 0, AdamW), AsyncSaver(path)
    rank.train(0, 1)
    expected, losses = rank.whole(), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WRITES, slowly)
        saver.save(rank, rank.optimizer, step=1)
        began = threading.active_count()
        for step in range(1, 20):
            loss = torch.tensor(float(dist.get_rank() + step))
            dist.all_reduce(loss)
            losses.append(loss.item())
            rank.train(step, 1)
        is_beside = began > 1 and not (Path(path) / "step-00000001").exists()
        saver.save(rank, rank.optimizer, step=20)  # waits for the first
        is_first_done = (Path(path) / "step-00000001").exists()
        saver.wait()
    rank.load(f"{path}/step-00000001")
    again = rank.whole()
    is_as_then = all(torch.equal(again[name], value) for name, value in expected.items())
    return losses, is_beside and is_first_done, is_as_then


def test_training_goes_on(workers: Pool, tmp_path: Path) -> None:
    for losses, is_beside, is_as_then in workers(2).run(train_beside, str(tmp_path / "run")):
        assert losses == [2.0 * step + 1 for step in range(1, 20)]
        assert is_beside
        assert is_as_then


def fail_beside(path: str) -> list[str]:
    """What each rank is told of a save that fails on rank 1, and what it then loads."""
    rank, saver = Rank(PAIR, 0, AdamW), AsyncSaver(path)
    saver.save(rank, rank.optimizer, step=1)
    saver.wait()

    told, most_bytes = [], 100 if dist.get_rank() == 1 else 10**9
    with files_of_at_most(most_bytes):
        for call in (lambda: saver.save(rank, rank.optimizer, step=3), saver.wait):
            saver.save(rank, rank.optimizer, step=2)
            with pytest.raises(StateError) as caught:
                call()
            told.append(str(caught.value))
    assert rank.load(path)[0] == 1
    saver.save(rank, rank.optimizer, step=4)
    saver.wait()
    return told


def test_errors_surface(workers: Pool, tmp_path: Path) -> None:
    path = tmp_path / "run"
    for told in workers(2).run(fail_beside, str(path)):
        for message in told:
            assert message.startswith(f"rank 1 failed: writing {path}/step-00000002 failed: File")
    assert names(path) == ["step-00000001", "step-00000004"]


def unwaited(path: Path) -> weakref.ref[AsyncSaver]:
    """A saver that nobody asks how its last save went."""
    rank, saver = Rank(ONE, 0, AdamW), AsyncSaver(path)
    with files_of_at_most(100):
        saver.save(rank, rank.optimizer, step=1)
        saver._thread.shutdown()
    return weakref.ref(saver)


def test_a_failure_that_nobody_waits_for(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="(?s)the last save .* File too large.*hint: .*free space"):
        assert unwaited(tmp_path)() is None


def test_what_is_refused(tmp_path: Path) -> None:
    rank = Rank(ONE, 0, AdamW)
    with pytest.raises(OptionError, match="keep_last is a count, 1 or more, not 0"):
        AsyncSaver(tmp_path, keep_last=0)
    with pytest.raises(OptionError, match="keep_every is a count"):
        AsyncSaver(tmp_path, keep_every=0)
    with pytest.raises(OptionError, match="not -1"):
        AsyncSaver(tmp_path).save(rank, rank.optimizer, step=-1)
    rank.save(str(tmp_path / "one"), 1)
    with pytest.raises(StateError, match="one is a checkpoint itself"):
        AsyncSaver(tmp_path / "one").save(rank, rank.optimizer, step=1)
