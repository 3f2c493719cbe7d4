"""Layers with parameters of one pipeline stage only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from autopar.errors import NotSupportedError
from autopar.module.layers import Shown


def layers(*absent: str) -> Any:
    """The layers of a model on a rank that lacks the parameters so named."""
    model = nn.Module()
    model.q = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model.k = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    held = {n: p for n, p in model.named_parameters() if n not in absent}
    return Shown(model, held, dict(model.named_buffers())).children


PAIRS: dict[str, Callable[[Any], list[Any]]] = {
    "parameters": lambda m: list(zip(m["q"].parameters(), m["k"].parameters(), strict=False)),
    "names": lambda m: list(
        zip(m["k"].named_parameters(), m["q"].named_parameters(), strict=False)
    ),
}


@pytest.mark.parametrize("how", PAIRS)
def test_pairs_that_are_on_this_rank(how: str) -> None:
    assert len(PAIRS[how](layers())) == 4
    assert len(PAIRS[how](layers("q.0.weight", "k.0.weight"))) == 3


@pytest.mark.parametrize("how", PAIRS)
def test_pairs_of_which_other_stages_have_some(how: str) -> None:
    with pytest.raises(NotSupportedError, match="paired by position"):
        PAIRS[how](layers("k.0.weight", "k.0.bias"))


def test_one_after_the_other() -> None:
    m = layers("k.0.weight", "k.0.bias")
    first = next(m["q"].parameters())
    groups = [list(m[name].parameters()) for name in ("q", "k")]
    assert [len(group) for group in groups] == [4, 2]
    assert groups[0][0] is first
    inner = [p for p in m["k"].parameters() for _ in m["k"][1].parameters()]
    assert len(inner) == 4, "a layer and one inside of it are no pair"
