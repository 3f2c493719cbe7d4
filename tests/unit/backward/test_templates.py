"""What stands for an operator: whole, written as its kernels, or taped.

That the kernels have the bits of autograd is `tests/parity/test_bitwise.py`'s question.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.passes.backward.recording import (
    Kernel,
    Meta,
    Recording,
    Slot,
    UntraceableError,
    filled,
    record,
)
from autopar.passes.backward.templates import OCCURRENCE, Call, template

aten = torch.ops.aten
ROWS, WIDTH = 6, 8


def meta(*shape: int, dtype: torch.dtype = torch.float32, has_grad: bool = True) -> Meta:
    return Meta.of(torch.empty(shape, dtype=dtype, device="meta"), has_grad)._replace(device="cpu")


OUTSIDE = torch.ones(WIDTH)
X, WEIGHT, VECTOR = meta(ROWS, WIDTH), meta(WIDTH, WIDTH), meta(WIDTH)
LABELS = meta(ROWS, dtype=torch.int64, has_grad=False)
HEADS = meta(2, 4, ROWS, WIDTH)

# Operator, arguments, tensors -> what stands for it, and how many tensors it hands on.
CASES: dict[str, tuple[tuple[Any, ...], Sequence[Meta], str, int]] = {
    "aten.linear.default": ((Slot(0), Slot(1), Slot(2)), (X, WEIGHT, VECTOR), "whole", 0),
    "aten.relu.default": ((Slot(0),), (X,), "whole", 0),
    "aten.softmax.int": ((Slot(0), -1), (X,), "whole", 0),
    "aten.mul.Tensor": ((Slot(0), Slot(1)), (X, VECTOR), "whole", 0),
    "aten.embedding.default": ((Slot(0), Slot(1)), (WEIGHT, LABELS), "whole", 0),
    "aten.layer_norm.default": (
        (Slot(0), [WIDTH], Slot(1), Slot(2), 1e-5), (X, VECTOR, VECTOR), "written", 2
    ),
    "aten.cross_entropy_loss.default": ((Slot(0), Slot(1)), (X, LABELS), "written", 2),
    "aten.scaled_dot_product_attention.default": (
        (Slot(0), Slot(1), Slot(2), None, 0.0, True), (HEADS, HEADS, HEADS), "written", 1
    ),
}  # fmt: skip


@pytest.mark.parametrize("target", CASES)
def test_what_stands_for_an_operator(target: str) -> None:
    args, metas, kind, n_kept = CASES[target]
    call = Call(target, args, {}, tuple(metas))
    with torch.device("meta"):
        given = [torch.empty_strided(m.shape, m.stride, dtype=m.dtype) for m in metas]
        result = call.operator(*filled(args, given.__getitem__))
    found = template(call, [Meta.of(result)._replace(device="cpu")])
    assert found is not None
    assert (found.forward is not None) == (kind == "written")
    assert len(found.kept) == n_kept
    # Backward reads arguments, results, what is handed on, and views that it makes again.
    made = found.recording
    known = {*range(len(call.metas)), *made.outs, *made.cotangents, *found.kept}
    for kernel in (*found.again, *made.backward):
        assert set(kernel.reads) <= known
        known |= set(kernel.outs)


def recorded(function: Callable[..., Tensor], *metas: Meta) -> Recording:
    slots = tuple(Slot(i) for i in range(len(metas)))
    with torch.device("meta"):
        out = function(*(torch.empty_strided(m.shape, m.stride, dtype=m.dtype) for m in metas))
    return record(function, slots, {}, metas, [Meta.of(out)._replace(device="cpu")])


def names(kernels: Sequence[Kernel]) -> list[str]:
    return [str(kernel.target) for kernel in kernels]


def test_a_view_that_is_a_known_tensor_again_is_no_kernel() -> None:
    made = recorded(lambda x, w: x @ w.t().t(), X, WEIGHT)
    assert names(made.forward).count("aten.t.default") == 1
    complex_ = meta(ROWS, WIDTH, dtype=torch.complex64)
    made = recorded(lambda x, y: x * y, complex_, complex_)
    assert "aten._conj.default" in names(made.backward), "the conjugate is another tensor"


def test_a_tensor_that_is_passed_twice_has_two_gradients() -> None:
    made = record(aten.mul.Tensor, (Slot(0), Slot(1)), {}, [X, X], [X._replace(has_grad=False)])
    assert None not in made.gradients and len(set(made.gradients)) == 2


def test_a_write_makes_a_new_tensor() -> None:
    made = recorded(lambda x: (x * 2).add_(1).exp(), X)
    product, total = made.forward[0].outs, made.forward[1].outs
    assert names(made.forward)[1] == "aten.add_.Tensor" and product != total
    assert made.forward[2].reads == total


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * x.sum().item(),
        lambda x: x + OUTSIDE,
        lambda x: read_after_a_write(x),
        # Its backward asks for the device of a stale view, where torch's C++ takes no exception.
        lambda x: nn.functional.pad(x[None], (1, 1), mode="circular")[0, :, 1:-1],
        lambda x: raises_in_backward(x),
    ],
    ids=["values", "a tensor from outside", "a stale view", "circular padding", "raises"],
)
def test_what_cannot_be_recorded(function: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(UntraceableError):
        record(function, (Slot(0),), {}, [X], [X._replace(has_grad=False)])


class Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise LookupError("no such row")


def raises_in_backward(x: Tensor) -> Tensor:
    found: Tensor = Raises.apply(x)
    return found


def read_after_a_write(x: Tensor) -> Tensor:
    y = x * 2
    view = y[0]
    y.add_(1)
    return y + view


def test_an_operator_that_looks_at_values_is_taped() -> None:
    @torch.library.custom_op("autopar_tests::by_value", mutates_args=())
    def by_value(x: Tensor) -> Tensor:
        return x * x.sum()

    @by_value.register_fake
    def _(x: Tensor) -> Tensor:
        return torch.empty_like(x)

    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * float(gradient.sum())

    by_value.register_autograd(backward)
    call = Call("autopar_tests.by_value.default", (Slot(0),), {}, (X,))
    assert template(call, [X._replace(has_grad=False)]) is None


def test_a_matmul_that_folds_its_rows_is_written() -> None:
    """With a gradient it folds, without one it does not: bits differ."""
    metas = (meta(128, 4), meta(8, 4, 8))
    call = Call("aten.matmul.default", (Slot(0), Slot(1)), {}, metas)
    found = template(call, [meta(8, 128, 8, has_grad=False)])
    assert found is not None and found.forward is not None
    assert "aten.bmm.default" not in names(found.forward)


def test_draws_of_other_layers_share_a_template() -> None:
    """The number of a draw is put in when the line is printed."""
    positions = [meta(n, dtype=torch.int64, has_grad=False) for n in (ROWS, WIDTH)]
    seed = meta(dtype=torch.int64, has_grad=False)
    args = (Slot(0), Slot(1), [Slot(2), Slot(3)], 0.1, OCCURRENCE)
    call = Call("autopar.dropout.default", args, {}, (X, seed, *positions))
    first, again = (template(call, [X._replace(has_grad=False)]) for _ in range(2))
    assert first is not None and first is again
    other = replace(call, args=(*args[:3], 0.2, OCCURRENCE))
    assert template(other, [X._replace(has_grad=False)]) is not first
