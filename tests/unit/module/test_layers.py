"""Layers with parameters of one pipeline stage only."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
from torch import nn

from autopar.errors import NotSupportedError
from autopar.module.layers import OtherStageError, Shown


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


class Register(type):
    """A metaclass that lists the classes it makes, each under a word of its own."""

    made: ClassVar[list[str]] = []

    def __new__(cls, name: str, bases: Any, own: Any, *, word: str) -> Any:
        return super().__new__(cls, name, bases, own)

    def __init__(cls, name: str, bases: Any, own: Any, *, word: str) -> None:
        super().__init__(name, bases, own)
        Register.made.append(word)


class Factorized(nn.Module):
    """A base that knows its subclasses by a word of their own."""

    kinds: ClassVar[dict[str, type]] = {}

    def __init_subclass__(cls, word: str, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        Factorized.kinds[word] = cls


class Dense(Factorized, word="dense"):
    pass


class Listed(nn.Module, metaclass=Register, word="listed"):
    pass


class Abstract(nn.Module, ABC):
    pass


@pytest.mark.parametrize("kind", [Dense, Listed, Abstract])
def test_classes_that_know_their_subclasses(kind: type[nn.Module]) -> None:
    """A layer has its user's class, and the user's tables know nothing of it."""
    children = Shown(nn.ModuleDict({"one": kind()}), {}, {}).children
    assert isinstance(children["one"], kind)
    assert type(children["one"]).__name__ == kind.__name__
    assert Factorized.kinds == {"dense": Dense}
    assert Register.made == ["listed"]


def test_by_name_as_by_attribute() -> None:
    k = layers("k.0.weight")["k"]
    assert k.get_parameter("0.bias") is k[0].bias
    assert k.get_buffer("1.running_mean") is k[1].running_mean
    for ask in (k.get_parameter, k.get_buffer):
        with pytest.raises(OtherStageError, match=r"`k\.0\.weight` is not on this rank"):
            ask("0.weight")
        with pytest.raises(AttributeError, match="no_such"):
            ask("0.no_such")
