"""Options: defaults, refused values and their messages, and the text form of pins."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from autopar.errors import NotSupportedError, OptionError
from autopar.manual import Manual
from autopar.options import FORBIDDABLE, Options, StageOption
from autopar.placement import I, Pin, Placement, R, S

WEIGHT = "h.0.mlp.c_fc.weight"

shards = st.builds(S, st.integers(0, 9), st.integers(0, 3))
sides = st.tuples(
    st.none() | shards | st.just(I), st.none() | shards | st.sampled_from([R, I])
).filter(lambda pair: pair != (None, None))


def loss_of(outputs: Any, batch: Any) -> Any:
    return outputs.loss


STAGES = (StageOption(("wte", "h.0"), (1, 2)), StageOption(("h.1",), (2, 4)))


ALLOWED: dict[str, list[Any]] = {
    "microbatches": [4],
    "schedule": ["auto", "gpipe", "1f1b"],
    "stages": [1, 4, "auto", STAGES],
    "mesh_shape": ["as-given"],
    "optimizer": ["sgd", "adam"],
    "precision": ["fp64"],
    "memory_limit": [2**30],
    "memory_margin": [0.25],
    "recompute": ["none", "selective", "attention-core", "full"],
    "manual": [Manual(dp=2, tp=4, sp=True, zero=1), Manual(dp=2, pp=2, microbatch_size=1)],
    "solver": ["ilp"],
    "time_limit_s": [0.5],
    "batch_dims": [{"input_ids": 0, "temperature": None}],
    "loss_fn": [loss_of],
    "progress": [True, print],
}


@pytest.mark.parametrize("name", ALLOWED)
def test_allowed_values_are_kept(name: str) -> None:
    for value in ALLOWED[name]:
        assert getattr(Options.of(**{name: value}), name) == value


def test_every_option_has_a_default_that_is_allowed() -> None:
    for option in dataclasses.fields(Options):
        default = getattr(Options(), option.name)
        if option.name != "force":
            assert getattr(Options.of(**{option.name: default}), option.name) == default
    assert type(Options.of(memory_limit=40e9).memory_limit) is int  # whole bytes
    assert Options.of(memory_limit="40GiB").memory_limit == 40 * 2**30


def test_what_is_no_option_is_sent_where_it_belongs() -> None:
    with pytest.raises(
        OptionError, match=r"no option 'hardware'(.|\n)*autopar.Mesh\(\(2, 8\), hard"
    ):
        Options.of(hardware="h100-sxm")
    with pytest.raises(OptionError, match=r"no option 'tp'(.|\n)*mesh_shape"):
        Options.of(tp=2)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("microbatches", 0, "microbatches is a whole number of at least 1, not 0"),
        ("microbatches", True, "whole number"),
        ("microbatches", 2.0, "whole number"),
        ("microbatches", "all", "one of 'auto', not 'all'"),
        ("schedule", "1fb1", r"not '1fb1'(.|\n)*hint: did you mean '1f1b'"),
        ("schedule", None, "schedule is one of"),
        ("stages", 0, "at least 1"),
        ("stages", True, "whole number"),
        ("stages", "two", "stages is one of 'auto', not 'two'"),
        ("mesh_shape", (2, 2), "mesh_shape is one of 'auto', 'as-given', not"),
        ("mesh_shape", "as_given", "did you mean 'as-given'"),
        ("optimizer", "AdamW", "optimizer is one of"),
        ("precision", "fp32", "precision is one of 'model', 'bf16-mixed'"),
        ("memory_limit", "40", r"'40' is a size without a unit(.|\n)*write 40GiB"),
        ("memory_limit", "40 apples", "is not a number of bytes"),
        ("memory_limit", -1, "positive"),
        ("memory_limit", 0.5, r"less than one byte(.|\n)*memory_limit=\"40GiB\""),
        ("memory_limit", float("inf"), "positive number"),
        (
            "imbalance",
            0.9,
            r"imbalance=0.9: the fullest expert has at least the mean",
        ),
        ("imbalance", float("inf"), "imbalance is a positive number"),
        ("memory_margin", 1, "share of the device's memory, from 0 to below 1, not 1"),
        ("recompute", True, "recompute is one of"),
        ("manual", {"dp": 2}, r"manual is an autopar.Manual(.|\n)*hint: manual="),
        ("solver", "cbc", "solver is one of 'auto', 'ilp'"),
        ("time_limit_s", 0, "positive number of seconds, not 0"),
        ("time_limit_s", float("nan"), "positive number of seconds"),
        ("batch_dims", [0], "batch_dims maps input paths to dims"),
        ("batch_dims", {0: 0}, r"keyed by input paths, not 0(.|\n)*positional"),
        ("batch_dims", {"x": -1}, "counted from 0, or None, not -1"),
        ("loss_fn", "mse", "loss_fn is a function, not 'mse'"),
        ("loss_fn", nn.MSELoss(), r"loss_fn=MSELoss takes outputs and(.|\n)*lambda outputs, batch"),
        ("loss_fn", nn.functional.mse_loss, r"=mse_loss takes outputs and(.|\n)*lambda outputs, b"),
        (
            "loss_fn",
            lambda out: out,
            r"takes \(out\); autopar calls it(.|\n)*lambda outputs, batch",
        ),
        ("loss_fn", lambda out, y, w: out, r"takes \(out, y, w\); .*missing a required argument"),
        ("progress", 1, "progress is True, False or a function, not 1"),
        ("forbid", "tensors", "forbid is one of .* not 'tensors'(.|\n)*did you mean 'tensor'"),
        ("forbid", "tp", "not 'tp'(.|\n)*did you mean 'tensor'"),
        ("forbid", ["data", 3], "forbid is one of .* not 3"),
        ("forbid", 3, "forbid is a word or several, not 3"),
        ("stages", [], r"stages=\[\] holds no stage(.|\n)*hint: stages=\["),
        ("stages", ["h.0"], r"a stage is \(module names, submesh shape\), not 'h.0'"),
        ("stages", [(["h.0"],)], r"a stage is \(module names, submesh shape\)"),
        ("stages", [([], (1, 2))], r"a stage needs names of modules, not \[\]"),
        ("stages", [("", (1, 2))], "a stage needs names of modules, not ''"),
        ("stages", [(["h.0", 1], (1, 2))], "a stage needs names of modules"),
        ("stages", [(3, (1, 2))], "a stage needs names of modules, not 3"),
        ("stages", [("h.0", (1, 2, 1))], r"\(1, 2, 1\) is no submesh \(nodes, devices per node\)"),
        ("stages", [("h.0", (0, 2))], r"\(0, 2\) is no submesh"),
        ("stages", [("h.0", 0)], "0 is no submesh"),
        ("stages", [("h.0", (1, True))], r"\(1, True\) is no submesh"),
        ("stages", [("h.0", None)], "None is no submesh"),
        ("stages", [("h.0", 2.5)], "2.5 is no submesh"),
        ("stages", [("h.0", 1), (["h.1", "h.0"], 1)], "stages= names 'h.0' twice"),
        ("force", "S(0)@1", "force maps parameter names to pins"),
        ("force", {1: "S(0)@1"}, "keyed by parameter names, not 1"),
        ("force", {WEIGHT: "S(0)"}, r"'S\(0\)' is not a pin(.|\n)*at force\['h.0(.|\n)*hint: w"),
        ("force", {WEIGHT: "@1"}, "not a pin"),
        ("force", {WEIGHT: "S(0)->@1"}, "not a pin"),
        ("force", {WEIGHT: "S(0)@"}, "not a pin"),
        ("force", {WEIGHT: "S(0)@-1"}, "not a pin"),
        ("force", {WEIGHT: "S(0)@1.5"}, "not a pin"),
        ("force", {WEIGHT: "S0@1"}, r"'S0' is not a placement(.|\n)*use I or S\(dim\)"),
        ("force", {WEIGHT: "R@1"}, r"stored I or S\(dim\), not R"),
        ("force", {WEIGHT: "P@1"}, r"stored I or S\(dim\), not P"),
        ("force", {WEIGHT: "S(0)->P@1"}, r"used R or I or S\(dim\), not P"),
        ("force", {WEIGHT: "S(0)@1; I@1"}, r"axis 1 is pinned twice: S\(0\)@1 and I@1"),
        ("force", {WEIGHT: ""}, "pins nothing"),
        ("force", {WEIGHT: []}, "pins nothing"),
        ("force", {WEIGHT: S(0)}, "a pin is a text, or a list of texts"),
        ("force", {WEIGHT: [S(0)]}, "a pin is a text, or a list of texts"),
    ],
)
def test_refused(name: str, value: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Options.of(**{name: value})


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Options.of, {"schedule": "pipedream"}),
        (Options.of, {"schedule": "terapipe"}),
        (Options.of, {"optimizer": "adafactor"}),
    ],
)
def test_not_built_names_option_and_value(kind: Any, options: dict[str, Any]) -> None:
    ((name, value),) = options.items()
    with pytest.raises(NotSupportedError, match="is not supported yet") as refusal:
        kind(**options)
    assert f"{name}={value!r}" in str(refusal.value)
    assert (refusal.value.hint or "").startswith(("use ", "leave manual out"))


def test_unknown_option_lists_the_valid_ones() -> None:
    with pytest.raises(OptionError, match="no option 'microbatch'") as caught:
        Options.of(microbatch=4)
    message = str(caught.value)
    assert all(f.name in message for f in dataclasses.fields(Options))
    assert "did you mean 'microbatches'?" in message


def test_batch_dims_are_copied() -> None:
    given_dims = {"x": 0}
    options = Options.of(batch_dims=given_dims)
    given_dims["y"] = 1
    assert options.batch_dims == {"x": 0}


def test_one_word_or_several() -> None:
    assert Options.of(forbid="data").forbid == {"data"}
    assert Options.of(forbid=iter(["data", "zero3"])).forbid == {"data", "zero3"}
    assert Options.of(forbid=FORBIDDABLE).forbid == frozenset(FORBIDDABLE)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dp": 0}, "Manual.dp is a whole number of at least 1, not 0"),
        ({"tp": 2.0}, "Manual.tp is a whole number"),
        ({"tp": True}, "Manual.tp is a whole number"),
        ({"pp": 0}, "Manual.pp"),
        ({"zero": 4}, "ZeRO stage, 0 to 3, not 4"),
        ({"zero": True}, "ZeRO stage"),
        ({"sp": 1}, "Manual.sp is True or False, not 1"),
        ({"cp": 2, "tp": 2}, r"cuts sequences over cp(.|\n)*hint: give sp=True"),
        ({"microbatch_size": 0}, "Manual.microbatch_size is a whole number"),
        ({"recompute": "auto"}, "Manual.recompute is one of"),
    ],
)
def test_refused_recipes(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Manual(**arguments)


@pytest.mark.parametrize("word", ["selective", "attention-core", "full"])
def test_recompute_is_the_users_or_the_recipes(word: str) -> None:
    assert Options.of(recompute=word).recompute_mode == word
    assert Options.of(manual=Manual(recompute=word)).recompute_mode == word
    assert Options.of(manual=Manual(), recompute=word).recompute_mode == word
    assert Options.of(manual=Manual(recompute=word), recompute=word).recompute_mode == word
    other = "full" if word == "selective" else "selective"
    for contradiction in (other, "none"):
        with pytest.raises(OptionError, match="both say what runs again"):
            Options.of(manual=Manual(recompute=word), recompute=contradiction)
    with pytest.raises(OptionError, match=f"recompute='{word}' asks for what forbid"):
        Options.of(recompute=word, forbid="recompute")


def test_no_recompute() -> None:
    for options in ({}, {"recompute": "none"}, {"manual": Manual()}, {"forbid": "recompute"}):
        assert Options.of(**options).recompute_mode is None


TWO_STAGES = [("h.0", 1), ("h.1", 1)]
FORBIDDEN = "asks for what forbid='{}' forbids"
TWO_CUTS = r"Manual\.pp=\d and stages=.* both cut the model"
CONTRADICTIONS: list[tuple[dict[str, Any], str]] = [
    ({"memory_limit": 2**30, "memory_margin": 0.1}, "give one of them"),
    (
        {"manual": Manual(microbatch_size=2), "microbatches": 4},
        "microbatch_size=2 and microbatches=4 both",
    ),
    ({"manual": Manual(dp=2), "forbid": "data"}, FORBIDDEN.format("data")),
    ({"manual": Manual(tp=2), "forbid": "tensor"}, FORBIDDEN.format("tensor")),
    ({"manual": Manual(tp=2, sp=True), "forbid": "sequence"}, FORBIDDEN.format("sequence")),
    ({"manual": Manual(dp=2, zero=1), "forbid": "zero1"}, FORBIDDEN.format("zero1")),
    ({"manual": Manual(dp=2, zero=3), "forbid": "zero3"}, FORBIDDEN.format("zero3")),
    ({"manual": Manual(pp=2), "forbid": "pipeline"}, FORBIDDEN.format("pipeline")),
    ({"stages": 2, "forbid": "pipeline"}, FORBIDDEN.format("pipeline")),
    ({"stages": TWO_STAGES, "forbid": "pipeline"}, FORBIDDEN.format("pipeline")),
    ({"manual": Manual(), "stages": 3}, TWO_CUTS),
    ({"manual": Manual(pp=2), "stages": 3}, TWO_CUTS),
    ({"manual": Manual(pp=2), "stages": TWO_STAGES}, TWO_CUTS),
]


@pytest.mark.parametrize(("options", "message"), CONTRADICTIONS)
def test_options_that_contradict(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Options.of(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"manual": Manual(), "microbatches": 4},
        {
            "manual": Manual(dp=2, sp=True, zero=1),
            "forbid": {"tensor", "sequence", "zero2", "zero3", "pipeline"},
        },
        {"manual": Manual(pp=1), "stages": 1},
        {"manual": Manual(pp=2), "stages": 2},
        {"stages": "auto", "forbid": {"pipeline"}},
        {"stages": 1, "forbid": {"pipeline"}},
        {"stages": STAGES[:1], "forbid": {"pipeline"}},
    ],
)
def test_options_that_agree(options: dict[str, Any]) -> None:
    read = Options.of(**options)
    assert {name: getattr(read, name) for name in options} == options


@pytest.mark.parametrize(
    "value",
    [
        [(["wte", "h.0"], (1, 2)), (["h.1"], (2, 4))],
        ((("wte", "h.0"), [1, 2]), ["h.1", (2, 4)]),
        [(iter(["wte", "h.0"]), 2), ("h.1", (2, 4))],
    ],
    ids=["a list of pairs", "tuples and lists", "one name, one number"],
)
def test_ways_to_write_a_list(value: Any) -> None:
    assert Options.of(stages=value).stages == STAGES


@pytest.mark.parametrize(
    ("text", "pin"),
    [
        ("S(0)@1", Pin(WEIGHT, S(0), None, 1)),
        ("S(0)->R@0", Pin(WEIGHT, S(0), R, 0)),
        (" S(1.2) -> S(0) @ tp ", Pin(WEIGHT, S(1, 2), S(0), "tp")),
        ("I@dp", Pin(WEIGHT, I, None, "dp")),
        ("->I@dp", Pin(WEIGHT, None, I, "dp")),
    ],
)
def test_one_pin(text: str, pin: Pin) -> None:
    assert Options.of(force={WEIGHT: text}).force == (pin,)


@pytest.mark.parametrize(
    "value", ["S(0)@0;S(1)->R@1", " S(0)@0 ; S(1)->R@1; ", ["S(0)@0", "S(1)->R@1"]]
)
def test_several_pins(value: Any) -> None:
    expected = (Pin(WEIGHT, S(0), None, 0), Pin(WEIGHT, S(1), R, 1))
    assert Options.of(force={WEIGHT: value}).force == expected


@given(sides, st.integers(0, 5) | st.sampled_from(["dp", "tp", "node"]))
def test_parse_is_the_inverse_of_str(
    pair: tuple[Placement | None, Placement | None], axis: int | str
) -> None:
    pin = Pin(WEIGHT, *pair, axis)
    assert Pin.parse(WEIGHT, str(pin)) == pin


def test_axis_of_a_logical_mesh() -> None:
    names = ("dp", "tp")
    assert Pin.parse(WEIGHT, "S(0)@1").axis_index(names) == 1
    assert Pin.parse(WEIGHT, "S(0)@dp").axis_index(names) == 0
    for text in ("S(0)@2", "S(0)@node"):
        with pytest.raises(OptionError, match=r"there is no axis .* 0 \(dp\), 1 \(tp\)"):
            Pin.parse(WEIGHT, text).axis_index(names)


@pytest.mark.parametrize(
    ("recipe", "axes", "expert_axes"),
    [
        ({"dp": 4, "ep": 2}, {"dp": 2, "ep": 2, "tp": 1}, ("ep",)),
        ({"dp": 4, "ep": 4, "tp": 2}, {"dp": 1, "ep": 4, "tp": 2}, ("ep",)),
        ({"dp": 2, "tp": 2, "ep": 2, "etp": 1}, {"dp": 2, "tp": 2}, ("tp",)),
        (
            {"dp": 4, "tp": 2, "ep": 4, "etp": 1, "sp": True},
            {"dp": 2, "ep": 2, "tp": 2},
            ("ep", "tp"),
        ),
        ({"dp": 2, "cp": 4, "ep": 4}, {"dp": 2, "cp": 4, "tp": 1}, ("cp",)),
        ({"dp": 2, "cp": 4, "ep": 8}, {"dp": 2, "cp": 4, "tp": 1}, ("dp", "cp")),
        ({"dp": 2, "tp": 4, "etp": 4}, {"dp": 2, "tp": 4}, ()),
    ],
)
def test_axes_of_experts(
    recipe: dict[str, Any], axes: dict[str, int], expert_axes: tuple[str, ...]
) -> None:
    manual = Manual(**recipe)
    assert (manual.axes, manual.expert_axes) == (axes, expert_axes)
    assert manual.n_ranks == math.prod(axes.values())


@pytest.mark.parametrize(
    ("kind", "recipe", "message"),
    [
        (OptionError, {"dp": 4, "ep": 3}, r"over 3 of dp x cp = 4 ranks(.|\n)*hint: ep divides"),
        (OptionError, {"ep": 0}, "Manual.ep"),
        (NotSupportedError, {"tp": 4, "etp": 2}, "divides tp in two axes(.|\n)*hint: give etp=1"),
        (NotSupportedError, {"tp": 2, "etp": 1}, "over all ranks of tp(.|\n)*make ep a multiple"),
        (NotSupportedError, {"tp": 4, "ep": 2, "etp": 1}, "over all ranks of tp(.|\n)*multiple"),
        (
            NotSupportedError,
            {"dp": 4, "cp": 2, "ep": 4},
            r"four axes(.|\n)*hint: make ep 2 \(cp\) or 8 \(dp x cp\), or leave cp out",
        ),
        (OptionError, {"dp": 2, "tp": 2, "ep": 4, "etp": 1}, "same rows(.|\n)*hint: give sp=True"),
    ],
)
def test_refused_axes_of_experts(
    kind: type[Exception], recipe: dict[str, Any], message: str
) -> None:
    with pytest.raises(kind, match=message):
        Manual(**recipe)
