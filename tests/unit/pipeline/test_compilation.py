"""A pass runs once, when one of its facts is asked for; lists that cannot run are refused."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest

from autopar.errors import OptionError
from autopar.passes.compilation import PRINT_AFTER, Compilation, Pass, check


@dataclass(frozen=True)
class Flour:
    grams: int


@dataclass(frozen=True)
class Dough:
    grams: int


@dataclass(frozen=True)
class Bread:
    grams: int
    crust: str


@dataclass(frozen=True)
class Knead(Pass):
    """Add water."""

    requires = (Flour,)
    provides = (Dough,)

    water: int = 2

    def run(self, facts: Compilation) -> Iterable[object]:
        yield Dough(facts[Flour].grams + self.water)


@dataclass(frozen=True)
class BakeBread(Pass):
    """Heat it."""

    requires = (Dough,)
    provides = (Bread,)

    def run(self, facts: Compilation) -> Iterable[object]:
        yield Bread(facts[Dough].grams, "brown")


@dataclass(frozen=True)
class KneadAndBake(Pass):
    """Some machines do both."""

    requires = (Flour,)
    provides = (Dough,)
    may_provide = (Bread,)

    def run(self, facts: Compilation) -> Iterable[object]:
        yield Dough(facts[Flour].grams)
        yield Bread(facts[Flour].grams, "pale")


BAKERY = (Knead(), BakeBread())


def names(compilation: Compilation) -> list[str]:
    return [ran.name for ran in compilation.ran]


def test_a_fact_runs_what_leads_to_it_once() -> None:
    compilation = Compilation(BAKERY, Flour(10))
    assert names(compilation) == []
    assert compilation[Bread] == Bread(12, "brown")
    assert compilation[Bread] is compilation[Bread] and compilation[Dough] == Dough(12)
    assert names(compilation) == ["knead", "bake-bread"]


def test_what_is_given_is_not_made() -> None:
    compilation = Compilation(BAKERY, Dough(7))
    assert compilation[Bread].grams == 7
    assert names(compilation) == ["bake-bread"]
    assert Compilation((Knead(water=5), BakeBread()), Flour(1))[Bread].grams == 6


def test_what_an_earlier_pass_made_is_not_made_again() -> None:
    compilation = Compilation((KneadAndBake(), BakeBread()), Flour(3))
    assert compilation[Bread] == Bread(3, "pale")
    assert names(compilation) == ["knead-and-bake"]


def test_a_fact_of_another_process_is_given_later() -> None:
    compilation = Compilation(BAKERY)
    compilation.give(Dough(1))
    assert compilation[Bread].grams == 1
    with pytest.raises(AssertionError, match="Dough is known already"):
        compilation.give(Dough(2))


def test_what_is_forgotten_is_gone() -> None:
    compilation = Compilation(BAKERY, Flour(10))
    _ = compilation[Dough]
    compilation.forget(Flour)
    assert Flour not in compilation and compilation[Bread].grams == 12


@dataclass(frozen=True)
class Sneaky(Pass):
    """It reads what it does not declare."""

    provides = (Bread,)

    def run(self, facts: Compilation) -> Iterable[object]:
        yield Bread(facts[Flour].grams, "stolen")


@pytest.mark.parametrize(
    ("passes", "message"),
    [
        ((BakeBread(), Knead()), "bake-bread reads Dough, which knead makes later"),
        ((Knead(), KneadAndBake(), BakeBread()), "Dough is made twice, again by knead-and-bake"),
        ((KneadAndBake(),), "knead-and-bake may make Bread, which no later pass would"),
    ],
)
def test_lists_that_cannot_run_are_refused(passes: Any, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check(passes)


def test_facts_that_cannot_be_made_or_read() -> None:
    with pytest.raises(AssertionError, match="Flour is not given, and no pass makes it"):
        _ = Compilation(BAKERY)[Bread]
    with pytest.raises(AssertionError, match="sneaky reads Flour undeclared"):
        _ = Compilation((Sneaky(),), Flour(1))[Bread]


def test_facts_are_printed_after_the_pass_that_the_environment_names(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(PRINT_AFTER, "knead")
    _ = Compilation(BAKERY, Flour(1))[Bread]
    assert capsys.readouterr().err == "# Dough after knead\nDough(grams=3)\n"


def test_a_pass_that_does_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PRINT_AFTER, "toast")
    with pytest.raises(OptionError, match=r"'toast' is no pass(.|\n)*one of .*knead"):
        _ = Compilation(BAKERY, Flour(1))[Bread]
