"""Operator notation: parsing, printing, meaning, and where errors point."""

from __future__ import annotations

import pytest
from hypothesis import given

from autopar.errors import NotationError
from autopar.placement import ELLIPSIS, Notation
from tests.conftest import Golden
from tests.helpers.strategies import notations


@given(notations())
def test_parse_is_the_inverse_of_str(notation: Notation) -> None:
    assert Notation.parse(str(notation)) == notation


@pytest.mark.parametrize(
    ("text", "inputs", "outputs"),
    [
        ("m k, k n -> m n", ((("m",), ("k",)), (("k",), ("n",))), ((("m",), ("n",)),)),
        ("b (k g) d -> b k", ((("b",), ("k", "g"), ("d",)),), ((("b",), ("k",)),)),
        ("... 1 -> ...", ((ELLIPSIS, ()),), ((ELLIPSIS,),)),
        ("n v, n ->", ((("n",), ("v",)), (("n",),)), ((),)),
        ("a -> a, a", ((("a",),),), ((("a",),), (("a",),))),
        ("  a->b ", ((("a",),),), ((("b",),),)),
    ],
)
def test_terms(text: str, inputs: object, outputs: object) -> None:
    notation = Notation.parse(text)
    assert (notation.inputs, notation.outputs) == (inputs, outputs)


def test_a_name_is_frozen_wherever_it_is_marked() -> None:
    notation = Notation.parse("b s!, s -> b s")
    assert notation.frozen == {"s"}
    assert str(notation) == "b s!, s -> b s"
    assert Notation.parse("b s, s! -> b s") == notation


def test_a_size_is_written_once() -> None:
    notation = Notation.parse("b (g=4! c) -> b (c g)")
    assert notation.sizes == {("g", 4)}
    assert str(notation) == "b (g=4! c) -> b (c g)"


def test_names_are_in_order_of_first_appearance() -> None:
    assert Notation.parse("b s h, f h -> b s f x").names == ("b", "s", "h", "f", "x")


def test_an_ellipsis_is_the_same_dims_wherever_written() -> None:
    notation = Notation.parse("... i, o i -> ... o").expanded(2)
    assert str(notation) == "_0 _1 i, o i -> _0 _1 o"
    assert str(Notation.parse("... i! -> ...").expanded(0)) == "i! ->"


MALFORMED = (
    "",
    "b s h",
    "b s h, h f b s f",
    "b s h -> b -> s",
    "b s h -> b, ) s",
    "b (s h -> b",
    "b (s (h)) -> b",
    "b s b -> b",
    "b (s b) -> b",
    "b ... s ... -> b",
    "(... s) -> s",
    "b s% -> b",
    "b 2 -> b",
    "b ! -> b",
    "b (s 1) -> b",
    "b s=2 -> s=3 b",
    "b s= -> b",
)


def test_errors_point_at_the_fault(golden: Golden) -> None:
    messages = []
    for text in MALFORMED:
        with pytest.raises(NotationError) as error:
            Notation.parse(text)
        messages.append(f"{error.value}\n")
    golden("notation_errors.txt", "\n".join(messages))
