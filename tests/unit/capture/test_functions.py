"""`torch.autograd.Function`s: each is one operator with its own backward, or refused by name."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.capture import capture
from autopar.errors import AutoparError, NotSupportedError
from autopar.operators import function_call, function_of
from autopar.program.graph import Program
from tests.helpers import functions
from tests.helpers.capture_harness import Module, check, dtypes_of_floats, x


def names(program: Program) -> list[str]:
    found = (function_of(str(node.target)) for node in program.operators)
    return [function.cls.__name__ for function in found if function is not None]


def test_a_bound_method_that_was_kept_early_is_seen() -> None:
    program = capture(functions.model("reverse"), functions.batch())
    assert names(program) == ["Reverse"]
    assert "/Reverse#0" in program.keys.values()  # no hash: plans outlive other arguments


def test_each_result_carries_gradient_or_not_as_autograd_says() -> None:
    program = capture(functions.model("gated"), functions.batch())
    node = next(n for n in program.operators if function_of(str(n.target)) is not None)
    taken = {n.args[1]: n.name in program.has_grad for n in node.users}
    assert node.name in program.has_grad
    assert taken == {0: True, 1: False, 2: False}


def test_the_audit_says_what_a_function_costs_and_the_way_out() -> None:
    program = capture(functions.model("rounded"), functions.batch())
    (note,) = program.audit.kept
    assert note.what == "autograd.Function RoundStraight"
    assert 'autopar.register_rule(RoundStraight, "a! b! -> a b")' in note.why
    assert note.where is not None and "tests/helpers/functions.py" in note.where


def test_float64_reaches_the_results() -> None:
    program = capture(functions.model("gated").float(), functions.batch(), precision="fp64")
    assert dtypes_of_floats(program) == {torch.float64}


def function(
    forward: Callable[..., Any], backward: Callable[..., Any] = lambda ctx, grad: grad
) -> type[torch.autograd.Function]:
    """A class of these, whose gradient is by default its argument's."""
    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type("Named", (torch.autograd.Function,), {"__module__": __name__, **methods})


def test_a_function_that_casts_keeps_its_cast_but_its_result_is_lifted() -> None:
    def body(self: Any, a: Tensor) -> Tensor:
        return function(lambda ctx, x: x.float()).apply(self.linear(a)).sum()

    program = capture(Module(body), (torch.randn(2, 4),), precision="fp64")
    assert program.loss is not None
    assert program.node(program.loss).meta["val"].dtype == torch.float64


def test_a_device_is_that_of_the_tensors() -> None:
    def forward(ctx: Any, x: Tensor, device: torch.device) -> Tensor:
        return x + torch.ones(x.shape[-1], device=device, dtype=x.dtype)

    on_device = function(forward, lambda ctx, grad: (grad, None))
    call = function_call(on_device, (torch.randn(2, 4), torch.device("cpu")), {})
    assert call.function.op(torch.empty(2, 4, device="meta")).device.type == "meta"


def test_names_are_equal_in_every_process_and_differ_with_plain_arguments() -> None:
    named = function(lambda ctx, x, argument: x.clone(), lambda ctx, grad: (grad, None))

    def name(*args: Any) -> str:
        return function_call(named, (torch.randn(2), *args), {}).function.name

    assert name(0.5) == name(0.5) == "Named_bf94b48f"
    assert len({name(0.5), name(2.0), name(2), name("2.0"), name([2.0]), name((2.0,))}) == 6


def test_classes_of_one_name_are_one_operator_only_if_they_do_the_same() -> None:
    def scaled_gradient(scale: float) -> type[torch.autograd.Function]:
        return function(lambda ctx, x: x.clone(), lambda ctx, grad: scale * grad)

    x = torch.randn(2)
    ops = [function_call(scaled_gradient(s), (x,), {}).function.op for s in (2.0, 3.0, 2.0)]
    assert ops[0] == ops[2] != ops[1]
    leaf = x.requires_grad_()
    assert torch.autograd.grad(ops[1](leaf).sum(), leaf)[0].tolist() == [3.0, 3.0]


# -- what is refused -------------------------------------------------------------------------------


class Chosen(torch.autograd.Function):
    """What forward does is the first argument."""

    @staticmethod
    def forward(ctx: Any, kind: str, x: Tensor, *more: Any) -> Any:
        if kind == "dirty":
            ctx.mark_dirty(x)
            return x.add_(1)
        if kind == "writes":
            x.mul_(2)
        if kind == "random":
            return x * torch.rand_like(x)
        if kind == "global":
            return x * HELD
        if kind == "number":
            return x * 2, 3
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, grads[0], *[None] * 1


HELD = torch.randn(4)


@pytest.mark.parametrize(
    ("arguments", "reason", "hint"),
    [
        (lambda x: ("dirty", x), "changes an argument in place", "return a new tensor"),
        (lambda x: ("writes", x), "changes an argument in place", "return a new tensor"),
        (lambda x: ("random", x), "draws random numbers", "pass them as an argument"),
        (lambda x: ("global", x), "not among its arguments", "pass the tensor"),
        (lambda x: ("number", x), "result 1 of Chosen is a int", "return tensors"),
        (lambda x: ("", x, nn.Linear(1, 1)), "argument 2 .* is a Linear", "call the module"),
        (lambda x: ("", x, [x]), "argument 2 .* holds tensors", "argument of its own"),
        (lambda x: ("", x, object()), "argument 2 .* is a object", "plain values"),
    ],
)
def test_what_no_operator_can_stand_for_is_refused(arguments: Any, reason: str, hint: str) -> None:
    def body(self: Any, a: Tensor) -> Tensor:
        out = Chosen.apply(*arguments(self.linear(a) + 0))
        return (out[0] if isinstance(out, tuple) else out).sum()

    with pytest.raises(NotSupportedError, match=reason) as error:
        capture(Module(body), (torch.randn(2, 4),))
    assert hint in str(error.value)
    assert f"{__file__}:" in str(error.value)


# -- the exchange of `Function.apply` --------------------------------------------------------------


def test_apply_is_what_it_was_after_a_trace_and_after_an_error() -> None:
    code = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]
    capture(functions.model("reverse"), functions.batch())
    with pytest.raises(AutoparError):
        capture(Module(lambda self, a: self.missing(a)), (torch.randn(2, 4),))
    assert torch.autograd.Function.apply.__func__.__code__ is code  # type: ignore[attr-defined]


def test_other_threads_are_not_traced() -> None:
    found: queue.SimpleQueue[Tensor] = queue.SimpleQueue()

    def elsewhere() -> None:
        leaf = torch.ones(2, requires_grad=True)
        found.put(torch.autograd.grad(functions.reverse(leaf, 0.5).sum(), leaf)[0])

    def body(self: Any, a: Tensor) -> Tensor:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        return functions.reverse(self.linear(a), 0.5).sum()

    program = capture(Module(body), (torch.randn(2, 4),))
    assert names(program) == ["Reverse"]
    assert found.get().tolist() == [-0.5, -0.5]


Nested = function(lambda ctx, x: functions.reverse(x, 2.0) * 3, lambda ctx, grad: 5 * grad)


def test_a_function_inside_a_function_is_its_own_affair() -> None:
    program = check(Module(lambda self, a: Nested.apply(self.linear(a)).sum()), (x(2),))
    assert names(program) == ["Named"]


# -- rules -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("registry")
def test_a_rule_holds_for_every_call_of_a_class() -> None:
    autopar.register_rule(functions.Clipped, "... -> ...")
    for most in (0.1, 0.2):
        report = autopar.check_rule(functions.Clipped, torch.randn(4, 8), most)
        assert report.ok and any("S(0)" in line.strategies for line in report.lines)
        # A gradient in parts would be clipped in parts.
        assert not any("R" in line.strategies for line in report.lines)


@pytest.mark.usefixtures("registry")
def test_a_wrong_rule_is_found() -> None:
    autopar.register_rule(functions.Gated, "b w, b w, w -> b w, b w, b")
    inputs = torch.randn(4, 4), torch.randn(4, 4), torch.randn(4)
    assert not autopar.check_rule(functions.Gated, *inputs).ok
    autopar.register_rule(functions.Gated, functions.RULES[functions.Gated])
    assert autopar.check_rule(functions.Gated, *inputs).ok


def test_arguments_of_a_function_cannot_be_lowered() -> None:
    with pytest.raises(autopar.OptionError, match="lower= cannot change arguments of Named"):
        autopar.register_rule(Nested, "... -> ...", lower=lambda *_: {})


def test_a_function_without_a_rule_cannot_be_checked() -> None:
    with pytest.raises(autopar.MissingRuleError, match=r"autograd\.Function Named") as error:
        autopar.check_rule(Nested, torch.randn(4, 4))
    assert 'autopar.register_rule(Named, "a! b! -> a b")' in str(error.value)
