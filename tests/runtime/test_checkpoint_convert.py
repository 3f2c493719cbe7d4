"""`autopar convert`: checkpoints with pickled metadata become readable, and no pickle runs."""

from __future__ import annotations

import json
import os
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.optim import AdamW
from typer.testing import CliRunner

from autopar.cli import app
from autopar.errors import StateError
from autopar.runtime.checkpoints import convert
from autopar.runtime.state import initial_shards
from autopar.runtime.storage import Checkpoint
from tests.helpers.checkpoint_jobs import Rank, assert_same
from tests.helpers.state_model import ONE, seeded_model


def write_with_dcp(values: dict[str, Any], folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save(values, checkpoint_id=folder, no_dist=True)


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """What autopar 0.3 wrote: DCP's files, and a record of version 1."""
    rank = Rank(ONE, 0, AdamW)
    rank.train(0, 2)
    rank.save(str(tmp_path / "now"), 2, {"epoch": 1})
    with Checkpoint(tmp_path / "now") as checkpoint:
        names = [name for name in checkpoint.tensors if not name.startswith("autopar.")]
        write_with_dcp({name: checkpoint.whole(name) for name in names}, tmp_path / "old")
        record = {"format": "autopar checkpoint", "version": 1, **checkpoint.record}
    (tmp_path / "old" / "autopar.json").write_text(json.dumps(record))
    return tmp_path / "old"


def test_a_checkpoint_of_0_3(old: Path, tmp_path: Path) -> None:
    expected, again = Rank(ONE, 3, AdamW), Rank(ONE, 5, AdamW)
    expected.load(str(tmp_path / "now"))
    with pytest.raises(StateError, match=f"autopar convert {old} NEW"):
        again.load(str(old))
    result = CliRunner().invoke(app, ["convert", str(old), str(tmp_path / "new")])
    assert (result.exit_code, "tensors of" in result.output) == (0, True)
    assert again.load(str(tmp_path / "new")) == (2, {"epoch": 1})
    assert_same(again.whole(), expected.whole())
    assert again.options() == expected.options()


def test_a_folder_of_dcp(tmp_path: Path) -> None:
    """Weights that a user saved; a pickled object beside them is left out."""
    write_with_dcp({**seeded_model(0).state_dict(), "note": {"by": print}}, tmp_path / "dcp")
    place = Rank(ONE, 0, AdamW).place
    with pytest.raises(StateError, match=r"written by torch.distributed.checkpoint"):
        initial_shards(place, str(tmp_path / "dcp"), seeded_model(0))
    assert convert(tmp_path / "dcp", tmp_path / "new").left_out == ("note.by",)
    shards = initial_shards(place, str(tmp_path / "new"), seeded_model(0))
    assert torch.equal(shards["gain"], seeded_model(0).gain)


class Payload:
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.system, ("touch ran",)


def test_what_is_refused(old: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data = next(old.glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:-400])
    with pytest.raises(StateError, match=r"the data of .* are damaged"):
        convert(old, tmp_path / "new")
    (old / ".metadata").write_bytes(pickle.dumps(Payload()))
    with pytest.raises(StateError, match=r"ask for posix\.system, which no checkpoint needs"):
        convert(old, tmp_path / "new")
    (old / ".metadata").write_bytes(pickle.dumps([1]))
    with pytest.raises(StateError, match="is not the metadata of a checkpoint"):
        convert(old, tmp_path / "new")
    (old / ".metadata").write_bytes(b"\x80")
    with pytest.raises(StateError, match="is damaged"):
        convert(old, tmp_path / "new")
    (old / "autopar.json").write_text("{")
    with pytest.raises(StateError, match="is damaged"):
        convert(old, tmp_path / "new")
    assert not (tmp_path / "new").exists()
    assert not (tmp_path / "ran").exists()
