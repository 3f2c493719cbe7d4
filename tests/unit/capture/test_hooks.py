"""Hooks on the user's model: traced, or refused by name; never left out in silence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.utils.flop_counter import FlopCounterMode

import autopar
from autopar import NotSupportedError
from autopar.capture import capture

X: dict[str, Any] = {"x": torch.arange(32.0, dtype=torch.float64).view(8, 4) / 32}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).pow(2).sum()


def made() -> Net:
    torch.manual_seed(0)
    return Net().double()


def watching(*args: Any) -> None:
    """A hook that computes nothing."""


def doubled(module: nn.Module, inputs: Any, out: Tensor) -> Tensor:
    return out * 2


BACKWARD: dict[str, tuple[Callable[[Net], Any], str]] = {
    "module": (
        lambda m: m.linear.register_full_backward_hook(watching),
        "backward hook `watching` of `linear`",
    ),
    "module, before": (
        lambda m: m.register_full_backward_pre_hook(watching),
        "backward pre hook `watching` of the model",
    ),
    "gradient": (
        lambda m: m.linear.weight.register_hook(watching),
        "gradient hook `watching` of parameter `linear.weight`",
    ),
    "after": (
        lambda m: m.linear.bias.register_post_accumulate_grad_hook(watching),
        "post-accumulate-grad hook `watching` of parameter `linear.bias`",
    ),
}


@pytest.mark.parametrize("name", BACKWARD)
def test_hooks_on_gradients_are_refused(name: str) -> None:
    """Also those that come when the plan is made."""
    register, message = BACKWARD[name]
    model = made()
    handle = register(model)
    with pytest.raises(NotSupportedError, match=message) as caught:
        autopar.plan(model, (1, 1), X)
    assert f"{__file__}:{watching.__code__.co_firstlineno}" in str(caught.value)
    assert "pm.parameters() after pm.step" in str(caught.value)
    capture(model, X, training=False)  # evaluation has no gradients
    handle.remove()
    module = autopar.parallelize(model, (1, 1), X)
    module.step(**X)
    register(model)
    with (
        pytest.raises(NotSupportedError, match=message),
        pytest.warns(UserWarning, match="from 0 to"),
    ):
        module.step(**X)


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
def test_hooks_of_all_modules_are_refused(kind: str) -> None:
    handle = getattr(torch_module, f"register_module_{kind}_hook")(watching)
    name = f"global {kind.removeprefix('full_').replace('_', ' ')} hook"
    try:
        with pytest.raises(NotSupportedError, match=f"{name} `watching` for all modules"):
            autopar.plan(made(), (1, 1), X)
    finally:
        handle.remove()


def test_forward_hooks_are_noted_and_traced() -> None:
    model = made()
    model.linear.register_forward_hook(doubled)
    module = autopar.parallelize(model, (1, 1), X)
    torch.testing.assert_close(module.step(**X), model(**X).detach(), rtol=1e-12, atol=1e-12)
    (note,) = module.captured().kept
    assert note.what == "forward hook `doubled` of `linear`"
    assert note.where == f"{__file__}:{doubled.__code__.co_firstlineno}"


@pytest.mark.filterwarnings("ignore:.*captured again")
def test_a_forward_hook_that_comes_later_is_not_left_out() -> None:
    """It adds an operator, which the plan does not have."""
    model = made()
    module = autopar.parallelize(model, (1, 1), X)
    module.step(**X)
    model.linear.register_forward_hook(doubled)
    with pytest.raises(autopar.PlanError, match=r"forward hooks of `linear` changed from 0 to"):
        module.step(**X)


@pytest.mark.parametrize("name", ["weight_norm", "spectral_norm"])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_norms_in_hooks_are_refused(name: str) -> None:
    model = made()
    getattr(nn.utils, name)(model.linear)
    with pytest.raises(NotSupportedError, match=f"{name} of `linear` assigns a tensor") as caught:
        autopar.plan(model, (1, 1), X)
    assert f"torch.nn.utils.parametrizations.{name}" in str(caught.value)


def test_what_cannot_be_copied() -> None:
    model: Any = made()
    model.lines = (line for line in "ab")
    with pytest.raises(autopar.CaptureError, match="Net cannot be copied for the trace"):
        autopar.plan(model, (1, 1), X)


class Keeping(Net):
    """Keeps what forward computed; `reads` what is kept, of the forward before."""

    def __init__(self, reads: Callable[[Any], Any] | None = None) -> None:
        super().__init__()
        self.kept: Any = None
        self.all: list[Any] = []
        self.reads = reads

    def forward(self, x: Tensor) -> Tensor:
        scale = self.reads(self) if self.reads else 1.0
        self.kept = self.linear(x)
        self.all = [self.kept * 2]
        return (self.kept * scale + self.all[0]).pow(2).sum()


def test_a_model_that_ran_before_keeps_results_of_that() -> None:
    model = Keeping().double()
    loss = model(**X)
    loss.backward()
    module = autopar.parallelize(model, (1, 1), X)
    assert torch.equal(module.step(**X), loss.detach())
    for name, value in module.full_gradients().items():
        wanted = model.get_parameter(name).grad
        assert wanted is not None
        assert torch.allclose(value, wanted, rtol=0, atol=1e-12)
    assert model.kept.grad_fn is not None
    assert autopar.verify(model, (1, 1), X, precision="fp64").ok


READS: dict[str, Callable[[Any], Any]] = {
    "kept": lambda m: m.kept.sum(),
    "all": lambda m: m.all[0].sum(),
    "kept as a number": lambda m: m.kept.sum().item(),
}


@pytest.mark.parametrize("how", READS)
def test_results_of_an_earlier_forward_that_forward_reads(how: str) -> None:
    model: Any = Keeping(READS[how]).double()
    model.kept = model.linear(*X.values())
    model.all = [model.kept]
    with pytest.raises(
        autopar.CaptureError, match=f"`{how.split()[0]}` was computed from parameters"
    ):
        autopar.plan(model, (1, 1), X)


def test_a_flop_counter_is_named() -> None:
    counter = FlopCounterMode(display=False)
    with counter, pytest.raises(NotSupportedError, match=r"FlopCounterMode[\s\S]*leave it out"):
        capture(made(), X)
