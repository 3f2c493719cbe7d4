"""Damaged texts of programs: passes run on them, or refuse them by name."""

from __future__ import annotations

import re
from pathlib import Path
from random import Random

import pytest

from autopar.errors import AutoparError
from autopar.passes.on_text import run_passes
from tests.helpers.nightly import nightly

GOLDEN = Path(__file__).parents[1] / "golden" / "passes"
WORD = re.compile(r"'[^']*'|\b\w+\b|[(),=\[\]{}]")
OTHERS = ("", "None", "-1", "0", "'x'", "()", "[1]", "1.5", "10**9", "True")


def damaged(text: str, rng: Random) -> str:
    """One word is another: of this text and of its kind, or of any."""
    words = list(WORD.finditer(text))
    word = rng.choice(words)
    alike = [w.group() for w in words if w.group().isidentifier() == word.group().isidentifier()]
    new = rng.choice(alike if rng.random() < 0.5 else OTHERS)
    return text[: word.start()] + new + text[word.end() :]


@pytest.mark.parametrize("n", [20, pytest.param(2000, marks=nightly)])
def test_no_raw_error(n: int) -> None:
    texts, rng = [path.read_text() for path in sorted(GOLDEN.glob("*_lowered.txt"))], Random(n)
    assert texts
    n_refused = 0
    for _ in range(n):
        try:
            run_passes(damaged(rng.choice(texts), rng), ["verify", "differentiate", "emit"])
        except AutoparError:
            n_refused += 1
    assert n / 2 < n_refused < n
