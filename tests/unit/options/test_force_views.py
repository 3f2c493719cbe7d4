"""`force` is honoured or refused: a pin that shards needs an axis of several ranks."""

from __future__ import annotations

from typing import Any

import pytest

import autopar
from autopar import InfeasibleError
from tests.helpers.jobs import gpt2, machine, tokens

TABLE, INNER = "transformer.wte.weight", "transformer.h.0.mlp.c_fc.weight"


def plan(shape: tuple[int, int], pins: dict[str, str], **options: Any) -> autopar.Plan:
    return autopar.plan(gpt2(1), machine(shape), tokens(0), force=pins, **options)


HONOURED: dict[str, tuple[tuple[int, int], dict[str, str], dict[str, Any]]] = {
    "tp": ((1, 2), {TABLE: "S(0)@tp"}, {}),
    "dp": ((1, 2), {TABLE: "S(0)@dp"}, {}),
    "by index": ((1, 2), {TABLE: "S(1)@1"}, {}),
    "two": ((1, 2), {TABLE: "S(0)@tp", INNER: "S(1)@tp"}, {}),
    "both axes": ((2, 2), {TABLE: "S(0)@tp", INNER: "S(0)@dp"}, {}),
    "stages": ((1, 4), {TABLE: "S(0)@tp"}, {"stages": 2}),
    "as given": ((1, 2), {TABLE: "S(0)@device"}, {"mesh_shape": "as-given"}),
    "the parameter's stage has it": (
        (1, 3), {INNER: "S(1)@tp"},
        {"stages": [("transformer.wte", 1), ("transformer.h.0.mlp", 2)]},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HONOURED)
def test_a_pin_chooses_the_view(name: str) -> None:
    shape, pins, options = HONOURED[name]
    made = plan(shape, pins, **options)
    for parameter, pin in pins.items():
        placement, axis = pin.split("@")
        (stage,) = [s for s in made.data.stages if parameter in s.parameters][:1]
        index = int(axis) if axis.isdigit() else list(stage.axes).index(axis)
        assert list(stage.axes.values())[index] > 1
        assert made.placements[parameter][index] == placement


def test_what_is_not_sharded_needs_no_axis() -> None:
    made = plan((1, 2), {TABLE: "I@tp"})
    axes = list(made.stages[0].axes)
    assert made.placements[TABLE][axes.index("tp")] == "I"


REFUSED: dict[str, tuple[tuple[int, int], dict[str, str], dict[str, Any], str]] = {
    "one rank": (
        (1, 1), {TABLE: "S(0)@dp"}, {},
        r"axis dp has one rank, so nothing can be sharded over it; a stage is seen as dp=1 x tp=1\n"
        r"  at force\['transformer\.wte\.weight'\] = 'S\(0\)@dp'",
    ),
    "stages of one rank": ((1, 2), {TABLE: "->S(0)@tp"}, {"stages": 2}, "axis tp has one rank"),
    "an axis of one rank as given": (
        (1, 2), {TABLE: "S(0)@node"}, {"mesh_shape": "as-given", "stages": 1},
        "axis node has one rank",
    ),
    "its stage has one rank": (
        (1, 3), {TABLE: "S(0)@tp"},
        {"stages": [("transformer.wte", 1), ("transformer.h.0.mlp", 2)]},
        r"no view of the mesh honours transformer\.wte\.weight=S\(0\)@tp and fits",
    ),
    "its stage has one rank to use it": (
        (1, 3), {TABLE: "I->S(0)@tp"},
        {"stages": [("transformer.wte", 1), ("transformer.h.0.mlp", 2)]},
        r"no view of the mesh honours transformer\.wte\.weight=I->S\(0\)@tp and fits",
    ),
    "two views": (
        (1, 2), {TABLE: "S(0)@tp", INNER: "S(0)@dp"}, {},
        r"no view of the mesh honours transformer\.wte\.weight=S\(0\)@tp, .*c_fc\.weight=S\(0\)@dp"
        " together",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_pin_that_no_view_honours(name: str) -> None:
    shape, pins, options, message = REFUSED[name]
    with pytest.raises(InfeasibleError, match=message):
        plan(shape, pins, **options)
