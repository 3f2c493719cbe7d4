"""`explain NAME`: whole, starred and shortened names, equal layers once, near names in errors."""

from __future__ import annotations

import pytest

import autopar
from autopar import Manual, OptionError, Plan
from autopar.report import matching_names
from tests.helpers.jobs import CASES, gpt2

NAMES = [
    *(f"transformer.h.{i}.mlp.{name}.weight" for i in range(3) for name in ("c_fc", "c_proj")),
    *(f"transformer.h.{i}.attn.c_proj/mm#0" for i in range(3)),
    "transformer.wte.weight",
    "transformer.wte/embedding#0",
]


@pytest.fixture(scope="module")
def plan() -> Plan:
    return autopar.plan(gpt2(4), (2, 2), CASES["gpt2"].batch(0), manual=Manual(dp=4, zero=3))


@pytest.fixture(scope="module")
def staged() -> Plan:
    return autopar.plan(gpt2(4), (2, 2), CASES["gpt2"].batch(0), manual=Manual(pp=2, tp=2))


def test_whole_names_come_first() -> None:
    assert matching_names("transformer.wte", NAMES) == ("transformer.wte",)
    assert matching_names("transformer.h.1.mlp", NAMES) == ("transformer.h.1.mlp",)
    assert matching_names("transformer.wte/embedding#0", NAMES) == (NAMES[-1],)


def test_stars_and_ends() -> None:
    all_fc = tuple(f"transformer.h.{i}.mlp.c_fc.weight" for i in range(3))
    assert matching_names("transformer.h.*.mlp.c_fc.weight", NAMES) == all_fc
    assert matching_names("h.*.mlp.c_fc.weight", NAMES) == all_fc
    assert matching_names("mlp.c_fc.weight", NAMES) == all_fc
    assert matching_names("h.2.mlp.c_fc", NAMES) == ("transformer.h.2.mlp.c_fc",)
    assert matching_names("wte", NAMES) == ("transformer.wte",)
    with pytest.raises(OptionError, match="no parameter"):
        matching_names("te", NAMES)  # a part of a word is no end of a name


def test_an_ambiguous_name_says_which_there_are() -> None:
    with pytest.raises(OptionError) as refusal:
        matching_names("c_proj", NAMES)
    text = str(refusal.value)
    assert "'c_proj' is of 2 parameters, operators or modules" in text
    assert "transformer.h.*.mlp.c_proj (3)" in text and "transformer.h.*.attn.c_proj (3)" in text
    assert "hint: give more of the name" in text


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("wtee", "transformer.wte"),
        ("mlp.c_fcc", "transformer.h.*.mlp.c_fc"),
        ("transformer.h.0.mpl.c_fc.weight", "transformer.h.*.mlp.c_fc.weight"),
    ],
)
def test_an_unknown_name_suggests_near_ones(name: str, near: str) -> None:
    with pytest.raises(OptionError) as refusal:
        matching_names(name, NAMES)
    assert f"did you mean {near}" in str(refusal.value)


def test_a_name_like_nothing_has_the_general_hint() -> None:
    with pytest.raises(OptionError, match=r"model\.named_parameters"):
        matching_names("qqqqqqqq", NAMES)


def test_equal_layers_are_explained_once(plan: Plan) -> None:
    text = plan.explain("h.*.mlp.c_fc.weight")
    assert text.count("stored") == 1 and text.startswith("transformer.h.0.mlp.c_fc.weight ")
    assert text.endswith("\n4 equal ones: all 4 blocks")


def test_layers_that_differ_are_explained_apart(staged: Plan) -> None:
    text = staged.explain("mlp.c_fc.weight")
    assert text.count(", stored ") == 2
    assert "2 equal ones: blocks 0, 1 of 4 (transformer.h.*)" in text
    assert "2 equal ones: blocks 2, 3 of 4 (transformer.h.*)" in text


def test_a_module_has_its_parameters_and_operators(plan: Plan) -> None:
    text = plan.explain("transformer.h.1.mlp")
    assert "transformer.h.1.mlp.c_fc.weight [" in text
    assert "transformer.h.1.mlp.c_fc/mm#0  (" in text
    assert "transformer.h.0" not in text


def test_equal_layers_of_a_module_are_there_once(plan: Plan) -> None:
    text = plan.explain("transformer")
    assert "transformer.h.0.ln_1.weight [" in text and "transformer.h.1.ln_1" not in text
    assert "  4 equal ones: all 4 blocks" in text


def test_the_whole_name_explains_as_before(plan: Plan) -> None:
    one = plan.explain("transformer.h.2.mlp.c_fc.weight")
    assert one.startswith("transformer.h.2.mlp.c_fc.weight ") and "equal ones" not in one
    assert "no alternatives: the recipe decides it" in one
    assert plan.explain("wte") == plan.explain("transformer.wte")
