"""Cutting a program into stages: every operator once, names unchanged, roles per stage."""

from __future__ import annotations

import itertools
import operator
import random

import pytest
from torch import Tensor, nn

from autopar.capture import capture
from autopar.errors import OptionError
from autopar.passes.analysis import cut
from autopar.program.graph import Program
from tests.helpers.harness import MODELS, model_case
from tests.helpers.models.pipeline_models import SideOutput, Tied, analysis_of, batch_of
from tests.helpers.pipeline_harness import ends_before, random_ends


def names(program: Program) -> list[str]:
    return [node.name for node in program.operators]


@pytest.mark.parametrize("model", MODELS)
def test_stages_are_the_whole(model: str) -> None:
    """Stages hold all operators once, in order, with their keys; ranks run what they compute
    (`tests/runtime/test_pipeline_runtime.py`)."""
    case = model_case(model)
    whole = case.analysis.program
    for seed in range(4):
        rng = random.Random(seed)
        ends = random_ends(whole, rng.choice((2, 3, 5)), rng)
        stages = cut(whole, ends)
        assert [name for stage in stages for name in names(stage)] == names(whole)
        assert [len(names(s)) for s in stages] == [
            end - first for first, end in itertools.pairwise((0, *ends))
        ]
        for stage in stages:
            for node in stage.graph.nodes:
                if node.op != "output":
                    original = whole.node(node.name)
                    assert node.meta["val"] is original.meta["val"]
                    assert stage.value_key(node.name) == whole.value_key(node.name)


def test_what_crosses() -> None:
    """A value goes from its stage once to each reader; inputs and constants never cross."""
    case = model_case("llama")
    whole = case.analysis.program
    stages = cut(whole, random_ends(whole, 4, random.Random(1)))
    made_on = {name: k for k, stage in enumerate(stages) for name in names(stage)}
    for k, stage in enumerate(stages):
        assert len(set(stage.received)) == len(stage.received)
        for value in stage.received:
            source = made_on[whole_source(whole, value)]
            assert source < k
            assert value in stages[source].sent
        for value in stage.sent:
            assert any(value in later.received for later in stages[k + 1 :])
        assert set(stage.inputs) <= set(whole.inputs)
        assert set(stage.constants) <= set(whole.constants)


def whole_source(program: Program, value: str) -> str:
    """The operator that makes a value."""
    node = program.node(value)
    return node.all_input_nodes[0].name if node.target is operator.getitem else value


class Halves(nn.Module):
    """An operator with two results, read on two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 16), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.a(x).chunk(2, -1)
        return (self.c(self.b(left)) * right).pow(2).mean()


def test_results_of_one_operator_cross_one_by_one() -> None:
    whole = capture(Halves(), batch_of(Tied, 0), precision="fp64")
    stages = cut(whole, ends_before(whole, "b", "c"))
    left, right = stages[0].sent
    assert stages[1].received == (left,)
    assert right in stages[2].received
    assert [whole.node(v).target for v in (left, right)] == [operator.getitem] * 2


def test_the_first_user_owns_a_tied_parameter() -> None:
    """Later stages mirror it under the name that their module has for it."""
    whole = analysis_of(Tied).program
    stages = cut(whole, ends_before(whole, "b", "c", "d"))
    ties = [[p for n, p in s.parameters.items() if n == "p_a_weight"] for s in stages]
    assert [[(p.name, p.aliases, p.mirror_of) for p in found] for found in ties] == [
        [("a.weight", (), None)],
        [("b.weight", (), "a.weight")],
        [],
        [("d.weight", (), "a.weight")],
    ]
    first, last = cut(whole, ends_before(whole, "d"))
    assert first.parameters["p_a_weight"].aliases == ("b.weight",)
    assert last.parameters["p_a_weight"].name == "d.weight"


class Idle(nn.Module):
    """A parameter that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.idle = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x)).pow(2).mean()


def test_unread_parameters_stay_with_the_first_stage() -> None:
    whole = capture(Idle(), batch_of(Tied, 0), precision="fp64")
    first, last = cut(whole, ends_before(whole, "b"))
    assert {p.name for p in first.parameters.values()} == {
        "a.weight", "a.bias", "idle.weight", "idle.bias",
    }  # fmt: skip
    assert {p.name for p in last.parameters.values()} == {"b.weight", "b.bias"}


def test_the_prologue_is_on_the_stage_that_divides() -> None:
    """It counts the labels that are not ignored, so the labels are on that stage too."""
    whole = model_case("gpt2").analysis.program
    assert whole.prologue is not None
    *others, last = cut(whole, ends_before(whole, "transformer.h", "lm_head"))
    assert last.prologue is whole.prologue
    assert last.loss == whole.loss
    for stage in others:
        assert stage.prologue is None
        assert stage.loss is None
        assert not set(whole.prologue.outputs) & set(stage.inputs)
    paths = [sorted(i.path for i in s.inputs.values()) for s in (*others, last)]
    assert paths == [["input_ids"], [], ["labels"]]


def test_outputs_are_received_by_the_last_stage() -> None:
    whole = analysis_of(SideOutput).program
    ends = ends_before(whole, "b", "c")
    first, middle, last = cut(whole, ends, with_outputs=True)
    (extra,) = (v for v in first.sent if v not in middle.received)
    assert extra in last.received
    assert last.outputs == whole.outputs
    assert (first.outputs, middle.outputs) == ((), ())


@pytest.mark.parametrize("ends", [[], [0, 12], [4, 4, 12], [7, 4, 12], [4, 11], [4, 13]])
def test_ends_that_do_not_cover_the_operators(ends: list[int]) -> None:
    whole = analysis_of(SideOutput).program
    assert len(names(whole)) == 12
    with pytest.raises(OptionError, match="do not cover 12 in order"):
        cut(whole, ends)


class LateOutput(nn.Module):
    """Makes an output after its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.late = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.a(x)
        loss = h.pow(2).mean()
        return {"loss": loss, "late": self.late(h)}


def test_the_loss_is_made_on_the_last_stage() -> None:
    whole = capture(LateOutput(), batch_of(Tied, 0), precision="fp64")
    with pytest.raises(OptionError, match="the loss is made on stage 0 of 2"):
        cut(whole, ends_before(whole, "late"))
