"""Bias fusion: which additions are fused into their matmul, and that values do not change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.passes.lowering.fusion import fuse_bias
from autopar.placement import R, Spec
from autopar.program.lines import (
    CallLine,
    Line,
    Local,
    ParameterUse,
    Ref,
    StoredParameter,
    Workspace,
)

Step = tuple[str, str, tuple[Any, ...]]  # variable, operator, arguments
ADD, MM, LINEAR = "aten.add.Tensor", "aten.mm.default", "aten.linear.default"
X, W, B = Ref("x"), Ref("w"), Ref("b")


def parameters() -> dict[str, Tensor]:
    """w: i o (square, so that it serves `mm` and `linear`), biases of three kinds."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"w": (4, 4), "b": (4,), "row": (1, 4), "one": (1,)}
    return {n: torch.randn(s, generator=generator) for n, s in shapes.items()}


def inputs() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    values = {n: torch.randn(3, 4, generator=generator) for n in ("x", "y")}
    return values | {"v": torch.randn(4, generator=generator)}


def operator(target: str) -> Any:
    _, name, overload = target.split(".")
    return getattr(getattr(torch.ops.aten, name), overload)


def value_of(line: CallLine, values: dict[str, Tensor]) -> Tensor:
    args = [values[a.name] if isinstance(a, Ref) else a for a in line.args]
    out: Tensor = operator(line.target)(*args, **line.kwargs)
    return out


def local(name: str, value: Tensor) -> Local:
    return Local(name, tuple(value.shape), value.dtype, Spec((R,)), has_grad=True)


def body_of(steps: Sequence[Step]) -> list[Line]:
    values, body = parameters() | inputs(), list[Line]()
    for name, target, args in steps:
        kwargs = {"alpha": args[2]} if target == ADD and len(args) == 3 else {}
        line = CallLine(
            (), target, args[: 3 - len(kwargs)], kwargs, f"m/{name}", "", None, (), (),
            flops=1.0, forward_s=2.0, backward_s=3.0, keeps=("x",),
            workspace=Workspace(4.0, 5.0, ("x",)),
        )  # fmt: skip
        values[name] = value_of(line, values)
        body.append(replace(line, outs=(local(name, values[name]),)))
    return body


def stored() -> list[StoredParameter]:
    found = []
    for name, value in parameters().items():
        at = local(name, value)
        use = ParameterUse(at, ())
        found.append(
            StoredParameter(name, (), at.shape, (), at, "step", (use,), requires_grad=True)
        )
    return found


def calls(body: Sequence[Line]) -> list[CallLine]:
    return [line for line in body if isinstance(line, CallLine)]


FUSED: dict[str, tuple[list[Step], list[str]]] = {
    "mm": ([("p", MM, (X, W)), ("s", ADD, (Ref("p"), B))], ["s = addmm(b, x, w)"]),
    "linear": ([("p", LINEAR, (X, W)), ("s", ADD, (Ref("p"), B))], ["s = linear(x, w, b)"]),
    "bias first": ([("p", MM, (X, W)), ("s", ADD, (B, Ref("p")))], ["s = addmm(b, x, w)"]),
    "at the bias's place": (
        [("p", MM, (X, W)), ("q", MM, (Ref("y"), W)), ("s", ADD, (Ref("p"), B))],
        ["q = mm(y, w)", "s = addmm(b, x, w)"],
    ),
    "two layers": (
        [
            ("p", MM, (X, W)), ("s", ADD, (Ref("p"), B)),
            ("q", LINEAR, (Ref("s"), W)), ("t", ADD, (Ref("q"), B)),
        ],
        ["s = addmm(b, x, w)", "t = linear(s, w, b)"],
    ),
}  # fmt: skip
KEPT: dict[str, list[Step]] = {
    "read twice": [
        ("p", MM, (X, W)), ("s", ADD, (Ref("p"), B)), ("t", ADD, (Ref("s"), Ref("p"))),
    ],
    "added to itself": [("p", MM, (X, W)), ("s", ADD, (Ref("p"), Ref("p")))],
    "not a parameter": [("p", MM, (X, W)), ("s", ADD, (Ref("p"), Ref("v")))],
    "scaled": [("p", MM, (X, W)), ("s", ADD, (Ref("p"), B, 2))],
    "a row": [("p", MM, (X, W)), ("s", ADD, (Ref("p"), Ref("row")))],
    "broadcast": [("p", MM, (X, W)), ("s", ADD, (Ref("p"), Ref("one")))],
    "has a bias": [("p", LINEAR, (X, W, B)), ("s", ADD, (Ref("p"), B))],
    "not a product": [("p", ADD, (X, Ref("y"))), ("s", ADD, (Ref("p"), B))],
    "a number": [("p", MM, (X, W)), ("s", ADD, (Ref("p"), 1.0))],
}  # fmt: skip


def text(line: CallLine) -> str:
    return f"{line.outs[0].name} = {line.target.split('.')[1]}({', '.join(map(repr, line.args))})"


@pytest.mark.parametrize("name", FUSED)
def test_products_take_their_bias(name: str) -> None:
    steps, expected = FUSED[name]
    body = body_of(steps)
    fused = calls(fuse_bias(body, stored(), set()))
    assert [text(line) for line in fused] == expected
    values, alone = parameters() | inputs(), parameters() | inputs()
    for lines, held in ((fused, values), (calls(body), alone)):
        for line in lines:
            held[line.outs[0].name] = value_of(line, held)
    torch.testing.assert_close(values[steps[-1][0]], alone[steps[-1][0]])
    for what in ("flops", "forward_s", "backward_s"):
        assert sum(getattr(c, what) for c in fused) == sum(getattr(c, what) for c in calls(body))


@pytest.mark.parametrize("name", KEPT)
def test_other_sums_stay(name: str) -> None:
    body = body_of(KEPT[name])
    assert fuse_bias(body, stored(), set()) == body


def test_a_product_that_is_read_after_the_body_stays() -> None:
    body = body_of(FUSED["mm"][0])
    assert fuse_bias(body, stored(), {"p"}) == body


def test_a_product_does_not_move_past_a_change_of_its_arguments() -> None:
    first, again, last = body_of([("p", MM, (X, W)), ("x", MM, (Ref("y"), W)),
                                  ("s", ADD, (Ref("p"), B))])  # fmt: skip
    assert fuse_bias([first, again, last], stored(), set()) == [first, again, last]


def test_the_fused_line_is_the_product_in_the_model() -> None:
    (line,) = calls(fuse_bias(body_of(FUSED["mm"][0]), stored(), set()))
    assert line.key == "m/p"
    assert line.keeps == ("x",)
    assert line.workspace == Workspace(4.0, 5.0, ("x",))
