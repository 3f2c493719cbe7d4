"""Options: defaults, refused values and their messages, and the text form of pins."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import NotSupportedError, OptionError
from autopar.options import FORBIDDABLE, Manual, Options, StageOption
from autopar.placement import I, Pin, Placement, R, S

WEIGHT = "h.0.mlp.c_fc.weight"

shards = st.builds(S, st.integers(0, 9), st.integers(0, 3))
sides = st.tuples(
    st.none() | shards | st.just(I), st.none() | shards | st.sampled_from([R, I])
).filter(lambda pair: pair != (None, None))


def loss_of(outputs: Any, batch: Any) -> Any:
    return outputs.loss


class TestValues:
    def test_defaults_are_the_contracts(self) -> None:
        options = Options.of()
        assert options == Options()
        words = (options.microbatches, options.schedule, options.stages, options.mesh_shape)
        assert words == ("auto",) * 4
        assert (options.optimizer, options.precision) == ("adamw", "model")
        assert (options.recompute, options.solver) == ("auto", "auto")
        assert (options.memory_limit, options.manual, options.loss_fn) == (None, None, None)
        assert (options.force, options.forbid, options.batch_dims) == ((), frozenset(), {})
        assert (options.time_limit_s, options.progress) == (None, False)

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("microbatches", 4),
            ("schedule", "auto"),
            ("schedule", "gpipe"),
            ("schedule", "1f1b"),
            ("stages", 1),
            ("stages", 4),
            ("stages", "auto"),
            ("mesh_shape", "as-given"),
            ("optimizer", "sgd"),
            ("optimizer", "adam"),
            ("precision", "fp64"),
            ("memory_limit", 2**30),
            ("memory_margin", 0.25),
            ("recompute", "none"),
            ("recompute", "selective"),
            ("recompute", "attention-core"),
            ("recompute", "full"),
            ("manual", Manual(dp=2, tp=4, sp=True, zero=1)),
            ("manual", Manual(dp=2, tp=2, pp=2, microbatch_size=1)),
            ("solver", "ilp"),
            ("time_limit_s", 0.5),
            ("batch_dims", {"input_ids": 0, "temperature": None}),
            ("loss_fn", loss_of),
            ("progress", True),
            ("progress", print),
        ],
    )
    def test_allowed_values_are_kept(self, name: str, value: Any) -> None:
        assert getattr(Options.of(**{name: value}), name) == value

    def test_every_option_has_a_default_that_is_allowed(self) -> None:
        for option in dataclasses.fields(Options):
            default = getattr(Options(), option.name)
            if option.name != "force":
                assert getattr(Options.of(**{option.name: default}), option.name) == default

    def test_a_margin_beside_a_limit_is_refused(self) -> None:
        with pytest.raises(OptionError, match="give one of them"):
            Options.of(memory_limit=2**30, memory_margin=0.1)

    def test_memory_limit_is_whole_bytes(self) -> None:
        assert Options.of(memory_limit=40e9).memory_limit == 40_000_000_000

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
            ("memory_limit", "40GB", "positive number of bytes per device, not '40GB'"),
            ("memory_limit", -1, "positive"),
            ("memory_limit", 0.5, r"less than one byte(.|\n)*2\*\*30"),
            ("memory_limit", float("inf"), "positive number"),
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
            ("progress", 1, "progress is True, False or a function, not 1"),
        ],
    )
    def test_refused(self, name: str, value: Any, message: str) -> None:
        with pytest.raises(OptionError, match=message):
            Options.of(**{name: value})

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("schedule", "interleaved"),
            ("schedule", "zero-bubble"),
            ("optimizer", "adafactor"),
        ],
    )
    def test_not_built_names_option_and_value(self, name: str, value: Any) -> None:
        with pytest.raises(NotSupportedError, match="is not supported yet") as caught:
            Options.of(**{name: value})
        assert f"{name}={value!r}" in str(caught.value)
        assert "hint: use " in str(caught.value)

    def test_unknown_option_lists_the_valid_ones(self) -> None:
        with pytest.raises(OptionError, match="no option 'microbatch'") as caught:
            Options.of(microbatch=4)
        message = str(caught.value)
        assert all(f.name in message for f in dataclasses.fields(Options))
        assert "did you mean 'microbatches'?" in message

    def test_options_are_frozen(self) -> None:
        with pytest.raises(dataclasses.FrozenInstanceError):
            Options().solver = "ilp"  # type: ignore[misc]

    def test_batch_dims_are_copied(self) -> None:
        given_dims = {"x": 0}
        options = Options.of(batch_dims=given_dims)
        given_dims["y"] = 1
        assert options.batch_dims == {"x": 0}


class TestForbid:
    def test_one_word_or_several(self) -> None:
        assert Options.of(forbid="data").forbid == {"data"}
        assert Options.of(forbid=iter(["data", "zero3"])).forbid == {"data", "zero3"}
        assert Options.of(forbid=FORBIDDABLE).forbid == frozenset(FORBIDDABLE)

    @pytest.mark.parametrize(
        ("value", "message"),
        [
            ("tensors", "forbid is one of .* not 'tensors'(.|\n)*did you mean 'tensor'"),
            (["data", 3], "forbid is one of .* not 3"),
            (3, "forbid is a word or several, not 3"),
        ],
    )
    def test_refused(self, value: Any, message: str) -> None:
        with pytest.raises(OptionError, match=message):
            Options.of(forbid=value)


class TestManual:
    def test_defaults(self) -> None:
        manual = Manual()
        assert (manual.dp, manual.tp, manual.n_ranks) == (1, 1, 1)
        assert (manual.sp, manual.zero, manual.microbatch_size) == (False, 0, None)
        assert (manual.interleave, manual.recompute) == (1, "none")

    def test_ranks(self) -> None:
        assert Manual(dp=2, tp=4).n_ranks == 8
        assert Manual(dp=2, tp=4, pp=3).n_ranks == 24

    def test_zero_without_data_parallelism_is_allowed(self) -> None:
        assert Manual(zero=3).dp == 1

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
            ({"microbatch_size": 0}, "Manual.microbatch_size is a whole number"),
            ({"recompute": "auto"}, "Manual.recompute is one of"),
        ],
    )
    def test_refused(self, arguments: dict[str, Any], message: str) -> None:
        with pytest.raises(OptionError, match=message):
            Manual(**arguments)

    @pytest.mark.parametrize("name", ["cp", "ep", "interleave"])
    def test_not_built(self, name: str) -> None:
        arguments: dict[str, Any] = {name: 2}
        with pytest.raises(NotSupportedError, match=f"Manual.{name}=2 is not supported"):
            Manual(**arguments)

    @pytest.mark.parametrize("word", ["selective", "attention-core", "full"])
    def test_recompute_is_the_users_or_the_recipes(self, word: str) -> None:
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

    def test_no_recompute(self) -> None:
        for options in ({}, {"recompute": "none"}, {"manual": Manual()}, {"forbid": "recompute"}):
            assert Options.of(**options).recompute_mode is None

    def test_two_counts_of_microbatches(self) -> None:
        with pytest.raises(OptionError, match="microbatch_size=2 and microbatches=4 both"):
            Options.of(manual=Manual(microbatch_size=2), microbatches=4)
        assert Options.of(manual=Manual(), microbatches=4).microbatches == 4

    @pytest.mark.parametrize(
        ("manual", "word"),
        [
            (Manual(dp=2), "data"),
            (Manual(tp=2), "tensor"),
            (Manual(tp=2, sp=True), "sequence"),
            (Manual(dp=2, zero=1), "zero1"),
            (Manual(dp=2, zero=3), "zero3"),
            (Manual(pp=2), "pipeline"),
        ],
    )
    def test_a_recipe_that_is_forbidden(self, manual: Manual, word: str) -> None:
        with pytest.raises(OptionError, match=f"asks for what forbid='{word}' forbids"):
            Options.of(manual=manual, forbid=word)

    def test_a_recipe_beside_what_it_does_not_use(self) -> None:
        manual = Manual(dp=2, sp=True, zero=1)
        forbid = {"tensor", "sequence", "zero2", "zero3", "pipeline"}
        assert Options.of(manual=manual, forbid=forbid).forbid == forbid

    @pytest.mark.parametrize("stages", [1, 2])
    def test_a_recipe_that_says_the_same(self, stages: int) -> None:
        assert Options.of(manual=Manual(pp=stages), stages=stages).stages == stages

    @pytest.mark.parametrize("stages", [3, [("h.0", 1), ("h.1", 1)]])
    @pytest.mark.parametrize("manual", [Manual(), Manual(pp=2)])
    def test_two_cuts_of_the_model(self, manual: Manual, stages: Any) -> None:
        with pytest.raises(OptionError, match=r"Manual\.pp=\d and stages=.* both cut the model"):
            Options.of(manual=manual, stages=stages)


class TestStages:
    WANTED = (StageOption(("wte", "h.0"), (1, 2)), StageOption(("h.1",), (2, 4)))

    @pytest.mark.parametrize(
        "value",
        [
            [(["wte", "h.0"], (1, 2)), (["h.1"], (2, 4))],
            ((("wte", "h.0"), [1, 2]), ["h.1", (2, 4)]),
            [(iter(["wte", "h.0"]), 2), ("h.1", (2, 4))],
            WANTED,
        ],
        ids=["a list of pairs", "tuples and lists", "one name, one number", "what was read"],
    )
    def test_ways_to_write_a_list(self, value: Any) -> None:
        assert Options.of(stages=value).stages == self.WANTED

    def test_ranks_of_a_stage(self) -> None:
        assert [stage.n_ranks for stage in self.WANTED] == [2, 8]

    @pytest.mark.parametrize(
        ("value", "message"),
        [
            ([], r"stages=\[\] holds no stage(.|\n)*hint: stages=\["),
            (["h.0"], r"a stage is \(module names, submesh shape\), not 'h.0'"),
            ([(["h.0"],)], r"a stage is \(module names, submesh shape\)"),
            ([([], (1, 2))], r"a stage needs names of modules, not \[\]"),
            ([("", (1, 2))], "a stage needs names of modules, not ''"),
            ([(["h.0", 1], (1, 2))], "a stage needs names of modules"),
            ([(3, (1, 2))], "a stage needs names of modules, not 3"),
            ([("h.0", (1, 2, 1))], r"\(1, 2, 1\) is no submesh \(nodes, devices per node\)"),
            ([("h.0", (0, 2))], r"\(0, 2\) is no submesh"),
            ([("h.0", 0)], "0 is no submesh"),
            ([("h.0", (1, True))], r"\(1, True\) is no submesh"),
            ([("h.0", None)], "None is no submesh"),
            ([("h.0", 2.5)], "2.5 is no submesh"),
            ([("h.0", 1), (["h.1", "h.0"], 1)], "stages= names 'h.0' twice"),
        ],
    )
    def test_refused(self, value: Any, message: str) -> None:
        with pytest.raises(OptionError, match=message):
            Options.of(stages=value)

    @pytest.mark.parametrize("stages", [2, [("h.0", 1), ("h.1", 1)]])
    def test_stages_that_are_forbidden(self, stages: Any) -> None:
        with pytest.raises(OptionError, match=r"stages=.* asks for what forbid='pipeline' forbids"):
            Options.of(stages=stages, forbid="pipeline")

    @pytest.mark.parametrize("stages", ["auto", 1, [("h", 2)]])
    def test_one_stage_is_no_pipeline(self, stages: Any) -> None:
        assert Options.of(stages=stages, forbid="pipeline").forbid == {"pipeline"}


class TestForce:
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
    def test_one_pin(self, text: str, pin: Pin) -> None:
        assert Options.of(force={WEIGHT: text}).force == (pin,)

    @pytest.mark.parametrize(
        "value", ["S(0)@0;S(1)->R@1", " S(0)@0 ; S(1)->R@1; ", ["S(0)@0", "S(1)->R@1"]]
    )
    def test_several_pins(self, value: Any) -> None:
        expected = (Pin(WEIGHT, S(0), None, 0), Pin(WEIGHT, S(1), R, 1))
        assert Options.of(force={WEIGHT: value}).force == expected

    @given(sides, st.integers(0, 5) | st.sampled_from(["dp", "tp", "node"]))
    def test_parse_is_the_inverse_of_str(
        self, pair: tuple[Placement | None, Placement | None], axis: int | str
    ) -> None:
        pin = Pin(WEIGHT, *pair, axis)
        assert Pin.parse(WEIGHT, str(pin)) == pin

    @pytest.mark.parametrize(
        ("value", "message"),
        [
            ("S(0)@1", "force maps parameter names to pins"),
            ({1: "S(0)@1"}, "keyed by parameter names, not 1"),
            ({WEIGHT: "S(0)"}, r"'S\(0\)' is not a pin(.|\n)*at force\['h.0(.|\n)*hint: write"),
            ({WEIGHT: "@1"}, "not a pin"),
            ({WEIGHT: "S(0)->@1"}, "not a pin"),
            ({WEIGHT: "S(0)@"}, "not a pin"),
            ({WEIGHT: "S(0)@-1"}, "not a pin"),
            ({WEIGHT: "S(0)@1.5"}, "not a pin"),
            ({WEIGHT: "S0@1"}, r"'S0' is not a placement(.|\n)*use I or S\(dim\)"),
            ({WEIGHT: "R@1"}, r"stored I or S\(dim\), not R"),
            ({WEIGHT: "P@1"}, r"stored I or S\(dim\), not P"),
            ({WEIGHT: "S(0)->P@1"}, r"used R or I or S\(dim\), not P"),
            ({WEIGHT: "S(0)@1; I@1"}, r"axis 1 is pinned twice: S\(0\)@1 and I@1"),
            ({WEIGHT: ""}, "pins nothing"),
            ({WEIGHT: []}, "pins nothing"),
            ({WEIGHT: S(0)}, "a pin is a text, or a list of texts"),
            ({WEIGHT: [S(0)]}, "a pin is a text, or a list of texts"),
        ],
    )
    def test_refused(self, value: Any, message: str) -> None:
        with pytest.raises(OptionError, match=message):
            Options.of(force=value)

    def test_axis_of_a_logical_mesh(self) -> None:
        names = ("dp", "tp")
        assert Pin.parse(WEIGHT, "S(0)@1").axis_index(names) == 1
        assert Pin.parse(WEIGHT, "S(0)@dp").axis_index(names) == 0
        for text in ("S(0)@2", "S(0)@node"):
            with pytest.raises(OptionError, match=r"there is no axis .* 0 \(dp\), 1 \(tp\)"):
                Pin.parse(WEIGHT, text).axis_index(names)
