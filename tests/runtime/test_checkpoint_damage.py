"""Damaged checkpoints and replicas: every flipped bit is noticed, nothing unpickled or changed."""

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
from torch import Tensor, nn
from torch.optim import AdamW

import autopar
from autopar import Manual
from autopar.errors import AutoparError, DivergenceError, StateError
from autopar.runtime.checkpoints.replicas import fingerprint
from autopar.runtime.state import initial_shards
from autopar.runtime.tensors import local_of
from tests.fuzz.trees import damaged
from tests.helpers.checkpoint_jobs import Rank, assert_same
from tests.helpers.jobs import MlpWithLoss, machine
from tests.helpers.nightly import nightly, one_in
from tests.helpers.pools import Pool
from tests.helpers.state_model import ONE, PAIR, seeded_model

N_FLIPS = 150


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


def trained(manual: Manual, norm: bool = False) -> autopar.ParallelModule:
    torch.manual_seed(0)
    model = MlpWithLoss()
    if norm:
        model.net = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32))
    torch.manual_seed(1)
    batch: dict[str, Any] = {"x": torch.randn(16, 32), "y": torch.randn(16, 32)}
    pm = autopar.parallelize(model, machine((1, 2)), batch, manual=manual)
    optimizer = torch.optim.SGD(pm.parameters(), lr=0.1)
    pm.step(**batch)
    optimizer.step()
    return pm


def said(do: Any) -> str:
    try:
        do()
    except DivergenceError as error:
        return str(error)
    return ""


def compared(manual: Manual, name: str | None, folder: str) -> tuple[set[str], bool]:
    """What check and saves say after rank 1 changed one bit of `name`; is anything saved?"""
    pm = trained(manual)
    if name is not None and os.environ["RANK"] == "1":
        with torch.no_grad():
            local_of(dict(pm.named_parameters())[name]).view(torch.int32)[..., :1] ^= 1
    beside = autopar.AsyncSaver(f"{folder}/beside")
    found = {
        said(pm.check_replicas),
        said(lambda: autopar.save(pm, None, f"{folder}/alone", step=1)),
        said(lambda: beside.save(pm, None, step=1)),
    }
    beside.wait()
    return found, any(Path(folder).iterdir())


def buffers_apart() -> str:
    pm = trained(Manual(dp=2), norm=True)
    if os.environ["RANK"] == "0":
        dict(pm.named_buffers())["net.1.running_mean"] += 1.0
    return said(pm.check_replicas)


@one_in(3)
@pytest.mark.parametrize("manual", [Manual(dp=2), Manual(dp=2, zero=3), Manual(tp=2), Manual(pp=2)])
def test_parity_equal_replicas_pass(manual: Manual, tmp_path: Path, workers: Pool) -> None:
    for said_by_each, is_saved in workers(2).run(compared, manual, None, str(tmp_path)):
        assert said_by_each == {""} and is_saved


def test_parity_one_bit_of_one_rank_is_noticed(tmp_path: Path, workers: Pool) -> None:
    job = compared, Manual(dp=2), "net.2.weight", str(tmp_path)
    for (said_by_each,), is_saved in workers(2).run(*job):
        assert "`net.2.weight`: rank 0 has" in said_by_each and ", rank 1 has" in said_by_each
        assert "net.0" not in said_by_each and not is_saved


def test_parity_shards_that_one_rank_has_alone(tmp_path: Path, workers: Pool) -> None:
    job = compared, Manual(dp=2, zero=3), "net.2.weight", str(tmp_path)
    assert [said_by_each for said_by_each, _ in workers(2).run(*job)] == [{""}, {""}]


def test_parity_buffers_that_steps_change(workers: Pool) -> None:
    for check in workers(2).run(buffers_apart):
        assert "`net.1.running_mean`: rank 0 has" in check


@pytest.mark.parametrize("n", [1, 3, 8191, 8192, 100_001])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_hash_sees_each_bit_and_place(n: int, dtype: torch.dtype) -> None:
    value = torch.randn(n, generator=torch.Generator().manual_seed(n)).to(dtype)
    found = fingerprint(value)
    assert found == fingerprint(value.clone())
    assert found == fingerprint(torch.cat([value[:1], value])[1:])  # at another alignment
    assert found == fingerprint(torch.stack([value, value], dim=1)[:, 0])  # strided
    width = 8 * value.itemsize
    for at in {0, n // 2, n - 1}:
        for bit in (0, width // 2, width - 1):
            changed = bytearray(value.clone().view(torch.uint8).numpy().tobytes())
            changed[at * value.itemsize + bit // 8] ^= 1 << bit % 8
            assert fingerprint(torch.frombuffer(changed, dtype=dtype)) != found
        other = (at + 1) % n
        swapped = value.clone()
        swapped[at], swapped[other] = value[other], value[at]
        assert (fingerprint(swapped) == found) == (n == 1)
