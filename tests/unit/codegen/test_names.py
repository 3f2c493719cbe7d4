"""Names from outside become safe variables of generated programs."""

from __future__ import annotations

import itertools
import keyword
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import autopar
from autopar import Manual, MeshError
from autopar.program.lines import free_name, group_name, identifier, reserved_names
from tests.helpers.jobs import machine
from tests.helpers.nightly import nightly

# Words that a generated file uses, Python's own, and texts that end a comment or a string.
ODD = (
    *(
        "torch env parameters delivered received saved cotangents ready phase taped forward "
        "backward prologue kept carried i range float _ __ class def import None True match self "
        "input saved_1 one_1 dp tp dp_tp r_to_s i_to_r aten aten_relu aten_mul_Tensor weight 0 1st "
        "é ﬁ ² 模型 up_forward block_forward h_backward h__5 dtype getattr"
    ).split(),
    *("a b", "x\nimport os", 'q"""q', "x\\", "a#b", "{x}", "\u2028", "\x00", "\U0001f600", "-"),
)

NAMES = st.sampled_from(ODD) | st.text(min_size=1, max_size=8).filter(lambda t: "." not in t)


@nightly
@settings(max_examples=30)
@given(st.text(max_size=20))
@example("²")
@example("")
@example("class")
def test_any_text_is_an_identifier(text: str) -> None:
    word = identifier(text)
    assert word.isidentifier()
    assert word.isascii()


@given(NAMES)
def test_a_variable_is_no_word_of_the_file(text: str) -> None:
    taken = reserved_names(("dp", "tp"))
    name = free_name(identifier(text), taken)
    assert name not in taken
    assert not keyword.iskeyword(name)
    assert {"torch", "env", "dp", "dp_tp", "class", "_"} <= taken


@pytest.mark.parametrize(
    "name", ["class", "a b", "a-b", "", "1st", "é", "ﬁ", "x\nimport os", "a.b", 3]
)
def test_a_mesh_refuses_names_that_are_no_variables(name: Any) -> None:
    message = (
        "axis name .*[\\s\\S]*hint: take ASCII letters" if name != 3 else "axis_names are texts"
    )
    with pytest.raises(MeshError, match=message):
        autopar.Mesh((1, 2), axis_names=("node", name))


AXES = st.sampled_from("torch torch_2 env i _ a a_a a_b b saved_1 r_to_s float dp".split())


@given(st.lists(AXES, min_size=1, max_size=2, unique=True))
def test_groups_have_names_of_their_own(axis_names: list[str]) -> None:
    every = range(len(axis_names))
    subsets = [s for n in range(1, 3) for s in itertools.combinations(every, n)]
    groups = [group_name(axis_names, axes) for axes in subsets]
    assert len(set(groups)) == len(groups)
    assert set(groups).isdisjoint({"torch", "env", "i", "_", "saved_1", "r_to_s", "float"})
    assert set(groups) <= reserved_names(axis_names)


class Odd(nn.Module):
    """Three equal blocks in a list, and a linear layer, each called as it is given."""

    def __init__(self, blocks: str, layer: str, parameter: str) -> None:
        super().__init__()
        self.blocks, self.layer, self.parameter = blocks, layer, parameter
        self.add_module(blocks, nn.ModuleList(nn.Linear(8, 8) for _ in range(3)))
        self.add_module(layer, nn.Linear(8, 8))
        self.register_parameter(parameter, nn.Parameter(torch.ones(8)))

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        (x,) = (*args, *kwargs.values())
        scale = self._parameters[self.parameter]
        assert scale is not None
        for block in self._modules[self.blocks]:  # type: ignore[union-attr]
            x = torch.relu(block(x) * scale)
        layer = self._modules[self.layer]
        assert layer is not None
        out: Tensor = layer(x + scale).square().mean()
        return out


def checked(blocks: str, layer: str, parameter: str, given_input: str | None, axis: str) -> None:
    torch.manual_seed(0)
    model, x = Odd(blocks, layer, parameter), torch.randn(4, 8)
    batch: Any = (x,) if given_input is None else {given_input: x}
    mesh = autopar.Mesh(
        (1, 2), ("node", axis), links=machine((1, 2)).links, device=machine((1, 2)).device
    )
    options: dict[str, Any] = {"precision": "fp64", "stages": 1}
    plan = autopar.plan(model, mesh, batch, mesh_shape="as-given", **options)
    for name, source in plan.code().items():
        compile(source, name, "exec")
    assert autopar.verify(model, mesh, batch, manual=Manual(tp=2), **options).ok


# Names that `nn.Module` takes, and inputs that torch.export takes.
INPUTS = NAMES.filter(lambda n: not keyword.iskeyword(n) and n != "self")
FIELDS = st.tuples(NAMES, NAMES, NAMES).filter(
    lambda names: (
        len(set(names)) == 3
        and not any(hasattr(nn.Module(), n) or n in ("blocks", "layer", "parameter") for n in names)
    )
)


@nightly
@settings(max_examples=1)
@given(FIELDS, st.none() | INPUTS, st.sampled_from(["device", "torch", "env", "i", "aten_relu"]))
@example(("h", "aten_relu", "h_forward"), "forward_", "device")
@example(("²", "é", "x\nimport os"), 'q"""q', "i")
def test_programs_of_models_with_odd_names(
    names: tuple[str, str, str], given_input: str | None, axis: str
) -> None:
    checked(*names, given_input, axis)


def test_a_gathered_parameter_with_the_name_of_a_word_of_the_file() -> None:
    """ZeRO-3 gathers the variable that the parameter has, not the one that it would like."""
    torch.manual_seed(0)
    model, x = Odd("torch", "env", "ready"), torch.randn(4, 8)
    options: dict[str, Any] = {"precision": "fp64", "stages": 1, "manual": Manual(dp=2, zero=3)}
    assert autopar.verify(model, machine((1, 2)), (x,), **options).ok
