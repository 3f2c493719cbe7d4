"""A parallel module shows plain data of the user's model, refuses hooks, reports its capture."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar import NotSupportedError
from autopar.module.surface import Surface

X = {"x": torch.arange(32.0, dtype=torch.float64).view(8, 4) / 32}


class Net(nn.Module):
    gain = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.beta = 0.5
        self.stream = "the model's own"
        self.config = SimpleNamespace(hidden_size=4)
        self.act = torch.tanh

    @property
    def device(self) -> torch.device:
        return self.linear.weight.device

    def helper(self) -> int:
        return 1

    def forward(self, x: Tensor) -> Tensor:
        out = self.act(self.linear(x)) * self.beta * self.gain
        return (out * getattr(self, "extra", 1.0)).sum()


def made() -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = Net().double()
    return model, autopar.parallelize(model, (1, 1), X)


def test_plain_data_is_the_models_and_parts_are_not_shown() -> None:
    model, module = made()
    assert module.config is model.config
    assert (module.beta, module.gain) == (0.5, 2.0)
    assert module.stream is not model.stream
    assert not hasattr(module, "unknown")
    with pytest.raises(NotSupportedError, match="part or method of"):
        hasattr(module, "helper")
    for name in ("act", "device"):
        with pytest.raises(AttributeError, match=f"has no `{name}`: it is a part or method of"):
            getattr(module, name)


@pytest.mark.filterwarnings("ignore:.*captured again")
@pytest.mark.parametrize(("name", "value"), [("beta", 0.25), ("gain", 3.0), ("extra", 5.0)])
def test_setting_changes_the_next_step(name: str, value: float) -> None:
    """`extra` is not there, but forward asks for it."""
    model, module = made()
    before = module.step(**X)
    setattr(module, name, value)
    assert getattr(model, name) == value
    torch.testing.assert_close(module.step(**X), model(**X).detach(), rtol=1e-12, atol=1e-12)
    assert module.step(**X) != before


def test_other_names_stay_here_and_parts_cannot_be_set() -> None:
    model, module = made()
    module.my_note = 1
    assert module.my_note == 1
    assert not hasattr(model, "my_note")
    with pytest.raises(NotSupportedError, match="a new module `head` in a parallel module"):
        module.head = nn.Linear(4, 4)


def test_before_a_plan_and_in_a_bare_copy() -> None:
    module: Any = autopar.parallelize(Net(), (1, 1))
    assert module.beta == 0.5
    bare: Any = Surface.__new__(Surface)
    with pytest.raises(AttributeError):
        _ = bare.beta
    with pytest.raises(NotSupportedError, match="saving a parallel module itself"):
        copy.copy(module)


WAYS_OUT = {
    "outputs=": ("forward", "forward_pre"),
    ".grad": ("full_backward", "full_backward_pre", "backward"),
    "pm.state_dict()": ("state_dict_pre", "state_dict_post"),
    "pm.load_state_dict": ("load_state_dict_pre", "load_state_dict_post"),
}


@pytest.mark.parametrize("way_out", WAYS_OUT)
def test_hooks_are_refused(way_out: str) -> None:
    _, module = made()
    for kind in WAYS_OUT[way_out]:
        with pytest.raises(NotSupportedError, match=r"would not run in pm.step") as caught:
            getattr(module, f"register_{kind}_hook")(print)
        assert way_out in str(caught.value)


def test_a_short_report_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    made()
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["autopar captured Net: read as constants: `beta` of the model, `gain` of "
                     "the model, `extra` of the model"]  # fmt: skip


def test_nothing_to_report(capsys: pytest.CaptureFixture[str]) -> None:
    class Plain(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).sum()

    autopar.parallelize(Plain(nn.Linear(4, 4), nn.LayerNorm(4)).double(), (1, 1), X)
    assert capsys.readouterr().err == ""


def test_parameters_have_no_memory_of_their_own() -> None:
    """torch would end the process where it reads memory that is not there."""
    _, module = made()
    module.step(**X)
    parameter = module.linear.weight
    for tensor in (parameter, parameter.grad, parameter.data):
        for call in ("share_memory_", "untyped_storage", "storage"):
            with pytest.raises(NotSupportedError, match=rf"{call}\(\) of `linear.weight`"):
                getattr(tensor, call)()
    assert parameter.to_local().untyped_storage().nbytes() == 16 * 8
