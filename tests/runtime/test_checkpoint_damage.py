"""Damaged checkpoints: every flipped bit is noticed, nothing is unpickled, nothing is changed."""

from __future__ import annotations

import os
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import AdamW

from autopar.errors import AutoparError, StateError
from autopar.runtime.state import initial_shards
from tests.fuzz.trees import damaged
from tests.helpers.checkpoint_jobs import Rank, assert_same
from tests.helpers.nightly import nightly
from tests.helpers.pools import Pool
from tests.helpers.state_model import ONE, Shapes, seeded_model

N_FLIPS = 150
PAIR: Shapes = ((1, 2),)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of step 7 of a trained rank; tests damage copies of it."""
    folder = tmp_path_factory.mktemp("saved") / "step7"
    rank = Rank(ONE, 0, AdamW)
    rank.train(0, 7)
    rank.save(str(folder), 7, {"epoch": 1})
    return folder


def copy_of(saved: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "damaged"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(saved, copy)
    return copy


def refuses(rank: Rank, folder: Path, match: str | None = None) -> str:
    """The error of a load, which must change nothing."""
    before, groups = rank.whole(), rank.options()
    with pytest.raises(StateError, match=match) as caught:
        rank.load(str(folder))
    assert_same(rank.whole(), before)
    assert rank.options() == groups
    return str(caught.value)


def test_every_bit_that_flips_is_noticed(saved: Path, tmp_path: Path) -> None:
    rank, copy, draw = Rank(ONE, 5, AdamW), copy_of(saved, tmp_path), random.Random(0)
    files = sorted(copy.iterdir())
    for k in range(N_FLIPS):
        file = files[k % len(files)]
        good = file.read_bytes()
        bad = bytearray(good)
        bad[draw.randrange(len(bad))] ^= 1 << draw.randrange(8)
        file.write_bytes(bad)
        assert file.name in refuses(rank, copy)
        file.write_bytes(good)
    assert rank.load(str(copy)) == (7, {"epoch": 1})


def data_files(folder: Path) -> list[Path]:
    return sorted(f for f in folder.iterdir() if f.name not in ("autopar.json", ".metadata"))


def test_files_of_two_saves_do_not_mix(saved: Path, tmp_path: Path) -> None:
    copy, later = copy_of(saved, tmp_path), tmp_path / "step8"
    rank = Rank(ONE, 0, AdamW)
    rank.load(str(copy))
    rank.train(7, 1)
    rank.save(str(later), 8)
    for file in data_files(copy):
        shutil.copy(later / file.name, file)
    refuses(Rank(ONE, 5, AdamW), copy, "of another save")


Mutation = Callable[[random.Random, Path], None]


def any_file(draw: random.Random, folder: Path) -> Path:
    return draw.choice(sorted(folder.iterdir()))


def damage(draw: random.Random, folder: Path) -> None:
    file = any_file(draw, folder)
    file.write_bytes(damaged(file.read_bytes(), draw))


def edit_a_digit(draw: random.Random, folder: Path) -> None:
    """Of the record, or of the header of a data file."""
    file = any_file(draw, folder)
    content = bytearray(file.read_bytes())
    content[draw.choice([k for k, c in enumerate(content[:4000]) if chr(c).isdigit()])] ^= 1
    file.write_bytes(content)


def swap(draw: random.Random, folder: Path) -> None:
    one, two = draw.sample(sorted(folder.iterdir()), 2)
    content = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(content)


def add(draw: random.Random, folder: Path) -> None:
    (folder / draw.choice([".metadata", "rank-00009-0.safetensors", "x"])).write_bytes(b"\x80\x04")


def replace_by_a_folder(draw: random.Random, folder: Path) -> None:
    file = any_file(draw, folder)
    file.unlink()
    file.mkdir()


MUTATIONS: tuple[Mutation, ...] = (
    *(damage, damage, damage, edit_a_digit, swap, add, replace_by_a_folder),
    lambda draw, folder: any_file(draw, folder).unlink(),
)


@pytest.mark.parametrize("n_mutants", [160, pytest.param(2000, marks=nightly)])
def test_mutants(n_mutants: int, saved: Path, tmp_path: Path) -> None:
    """Each is refused, and changes nothing, or loads what was saved."""
    rank, trained, draw, n_refused = Rank(ONE, 5, AdamW), Rank(ONE, 0, AdamW), random.Random(0), 0
    trained.train(0, 7)
    before = rank.whole()
    for k in range(n_mutants):
        mutant = copy_of(saved, tmp_path)
        MUTATIONS[k % len(MUTATIONS)](draw, mutant)
        try:
            loaded = rank.load(str(mutant))
        except AutoparError:
            n_refused += 1
            assert_same(rank.whole(), before)
        else:
            assert loaded == (7, {"epoch": 1})
            assert_same(rank.whole(), trained.whole())
            rank = Rank(ONE, 5, AdamW)
    assert n_refused > 0.7 * n_mutants


class Payload:
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.system, ("touch ran",)


def test_nothing_is_unpickled(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By `load` and `weights=path`: a payload beside the files is ignored, or refused."""
    monkeypatch.chdir(tmp_path)
    copy = copy_of(saved, tmp_path)
    (copy / ".metadata").write_bytes(pickle.dumps(Payload()))
    rank = Rank(ONE, 5, AdamW)
    assert rank.load(str(copy))[0] == 7
    initial_shards(rank.place, str(copy), seeded_model(0))
    (copy / "autopar.json").unlink()
    refuses(rank, copy)
    with pytest.raises(StateError):
        initial_shards(rank.place, str(copy), seeded_model(0))
    assert not (tmp_path / "ran").exists()


def test_other_constant_buffers_change_nothing(saved: Path) -> None:
    rank = Rank(ONE, 5, AdamW)
    rank.buffers["norm.running_mean"] += 1
    refuses(rank, saved, "buffer `norm.running_mean` of .* differs from the model's")


def load_damaged(path: str) -> tuple[str, list[Tensor]]:
    """(the error, what changed) on this rank."""
    rank = Rank(PAIR, 5, AdamW)
    rank.train(0, 1)
    tensors = [
        *rank.locals.values(),
        *(v for s in rank.optimizer.state.values() for v in s.values()),
    ]
    before = [t.detach().clone() for t in tensors]
    try:
        rank.load(path)
    except StateError as error:
        changed = [a for a, b in zip(tensors, before, strict=True) if not torch.equal(a, b)]
        return str(error), changed
    return "", []


def test_damage_seen_by_one_rank_stops_all(saved: Path, tmp_path: Path, workers: Pool) -> None:
    copy = copy_of(saved, tmp_path)
    for file in data_files(copy):
        bad = bytearray(file.read_bytes())
        bad[-1] ^= 1
        file.write_bytes(bad)
    for error, changed in workers(2).run(load_damaged, str(copy)):
        assert "damaged" in error
        assert "rank " in error
        assert not changed
