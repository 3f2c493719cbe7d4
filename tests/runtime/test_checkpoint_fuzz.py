"""Mutated checkpoints: refused by a `StateError`, with nothing changed, or loaded right."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from torch.optim import AdamW

from autopar.errors import AutoparError
from tests.helpers.checkpoint_jobs import Rank, assert_same
from tests.helpers.state_model import ONE

LONGEST_S = 5.0
Mutation = Callable[[random.Random, Path], None]


def _edit(change: Callable[[random.Random, bytearray], bytearray]) -> Mutation:
    def mutate(draw: random.Random, folder: Path) -> None:
        file = draw.choice(sorted(folder.iterdir()))
        file.write_bytes(change(draw, bytearray(file.read_bytes())))

    return mutate


def _span(draw: random.Random, content: bytearray) -> slice:
    begin = draw.randrange(len(content))
    return slice(begin, begin + draw.randrange(1, 200))


def _zeros(draw: random.Random, content: bytearray) -> bytearray:
    span = _span(draw, content)
    content[span] = bytes(len(content[span]))
    return content


def _noise(draw: random.Random, content: bytearray) -> bytearray:
    span = _span(draw, content)
    content[span] = draw.randbytes(len(content[span]))
    return content


def _flip(draw: random.Random, content: bytearray) -> bytearray:
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    return content


def _inserted(draw: random.Random, content: bytearray) -> bytearray:
    begin = draw.randrange(len(content) + 1)
    return content[:begin] + draw.randbytes(draw.randrange(1, 50)) + content[begin:]


def _digit(draw: random.Random, content: bytearray) -> bytearray:
    places = [k for k, c in enumerate(content[:4000]) if chr(c).isdigit()]
    content[draw.choice(places)] = ord(draw.choice("0123456789"))
    return content


def _nested(_: random.Random, content: bytearray) -> bytearray:
    return bytearray(b"[" * 100_000) + content


def _swapped(draw: random.Random, folder: Path) -> None:
    one, two = draw.sample(sorted(folder.iterdir()), 2)
    content = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(content)


def _removed(draw: random.Random, folder: Path) -> None:
    draw.choice(sorted(folder.iterdir())).unlink()


def _beside(draw: random.Random, folder: Path) -> None:
    (folder / draw.choice([".metadata", "rank-00009-0.safetensors", "x"])).write_bytes(b"\x80\x04")


def _directory(draw: random.Random, folder: Path) -> None:
    file = draw.choice(sorted(folder.iterdir()))
    file.unlink()
    file.mkdir()


MUTATIONS: tuple[Mutation, ...] = (
    _edit(_flip),
    _edit(_zeros),
    _edit(_noise),
    _edit(_inserted),
    _edit(_digit),
    _edit(_nested),
    _edit(lambda draw, content: content[: draw.randrange(len(content))]),
    _edit(lambda draw, content: content[_span(draw, content).stop :]),
    _swapped,
    _removed,
    _beside,
    _directory,
)


def run_mutants(n_mutants: int, tmp_path: Path) -> int:
    """Load mutants; returns how many were refused."""
    saved, mutant = tmp_path / "saved", tmp_path / "mutant"
    trained = Rank(ONE, 0, AdamW)
    trained.train(0, 2)
    trained.save(str(saved), 2, {"epoch": 1})
    rank, draw, n_refused = Rank(ONE, 5, AdamW), random.Random(n_mutants), 0
    before = rank.whole()
    for k in range(n_mutants):
        shutil.rmtree(mutant, ignore_errors=True)
        shutil.copytree(saved, mutant)
        MUTATIONS[k % len(MUTATIONS)](draw, mutant)
        began_s = time.monotonic()
        try:
            loaded = rank.load(str(mutant))
        except AutoparError:
            n_refused += 1
            assert_same(rank.whole(), before)
        else:
            assert loaded == (2, {"epoch": 1})
            assert_same(rank.whole(), trained.whole())
            rank = Rank(ONE, 5, AdamW)
        assert time.monotonic() - began_s < LONGEST_S
    return n_refused


def test_some_mutants(tmp_path: Path) -> None:
    assert run_mutants(240, tmp_path) > 180


@pytest.mark.nightly
def test_many_mutants(tmp_path: Path) -> None:
    assert run_mutants(2000, tmp_path) > 1500
