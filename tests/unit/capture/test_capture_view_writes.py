"""Writes in place and through views: the base and its other views read what was written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.errors import NotSupportedError
from tests.helpers.capture_harness import Module, check, targets, x


def _in_place_in_another_dtype(self: Any, a: Tensor) -> Tensor:
    y = self.linear(a).float()
    y += a  # float64 into float32
    return y.sum()


def _the_value_returned(self: Any, a: Tensor) -> Tensor:
    y = self.linear(a)
    row = y[1].mul_(3)  # is y[1]
    y.add_(1)
    row.mul_(2)
    return row.pow(2).sum() + y.pow(3).sum()


def _a_step_and_a_cast(self: Any, a: Tensor) -> Tensor:
    y = self.linear(a).float()
    y[:, ::2] = a[:, 1].unsqueeze(1)  # float64 into float32, broadcast
    y[:] = y * 2
    return y.sum().double()


def _dead_views_do_not_matter(self: Any, a: Tensor) -> Tensor:
    y = self.linear(a)
    total = y.t().sum() + y.reshape(-1).sum()
    y.t().mul_(2)  # y is not read again
    return total


def _gates(self: Any, a: Tensor) -> Tensor:
    """As torch's recurrent cells: parts of one tensor, each written."""
    first, second = self.linear(a).unsafe_chunk(2, -1)
    first.sigmoid_()
    second.add_(1).tanh_()
    left, right = a.clone().split(2, -1)
    left.mul_(2)
    right.t().exp()
    right[0].add_(1)
    return (first * left).sum() + (second * right).sum()


def _turned_in_place(self: Any, a: Tensor) -> Tensor:
    y = self.linear(a)
    y.transpose_(0, 1).unsqueeze_(0)
    return (y.squeeze_(0) @ a).pow(2).sum()


def _copies(self: Any, a: Tensor) -> Tensor:
    """In another dtype, and broadcast beside others."""
    marks, weight = (a > 0).float(), self.linear.weight.float()
    marks.masked_fill_(marks == 0, -2.0)
    weight *= 0.5
    y = self.linear(a)
    near = F.mse_loss(a, y.detach())
    places = (a * 3).long().clamp_(0, 2)
    y += 1
    return near + (y * marks + places).sum() + F.linear(a.float(), weight).sum().double()


def _parts_written_in_turn(self: Any, a: Tensor) -> Tensor:
    z, y = a.clone(), self.linear(a)
    for row in z:
        row.mul_(0.5)
    left, right = z.chunk(2, -1)
    right.t()[0].add_(1)
    left.view(3, 2)[1].mul_(3)
    right.sub_(left)
    first, rest = z[1:].tensor_split([1])
    first.exp_()
    rest.unsqueeze(0).neg_()
    return (y * z).sum() + (y[:, :2] * right).exp().sum() + (y[1] * first).sum()


def _in_another_order(self: Any, a: Tensor) -> Tensor:
    y = self.linear(a).unflatten(1, (2, 2))  # [3, 2, 2]
    y.permute(2, 0, 1)[0].mul_(2)
    y.movedim(0, -1).transpose(0, 1)[:, 1, ::2].add_(a[0, :2, None])
    y.mT.mul_(a.view(3, 2, 2))
    y[0].T.fill_(0.5)
    return y.pow(2).sum()


def _in_another_shape(self: Any, a: Tensor) -> Tensor:
    y = self.linear(a)
    y.view(-1)[3:6] = 0.5
    y.flatten().mul_(2)
    y.view(3, 2, 2)[0, 1].add_(1)
    y.unsqueeze(1).squeeze(1).sub_(a)
    y.reshape(-1)[torch.tensor([1, 5])] = -1.0
    y.ravel().unflatten(0, (6, 2)).select(1, 0).neg_()
    y.unsqueeze(0)[:, a > 0.5] = 0.0
    return y.pow(2).sum()


def _diagonals(self: Any, a: Tensor) -> Tensor:
    y = self.linear(a) @ a.T
    y.diagonal().mul_(2)
    y.diagonal(1).copy_(a[0, :2])
    y.diagonal(-2, 1, 0).add_(1)
    logits = a @ a.T
    logits.fill_diagonal_(float("-inf"))
    pairs = y.view(1, 3, 3).expand(2, -1, -1).clone()
    pairs.diagonal(dim1=-2, dim2=-1).zero_()
    return (y * logits.softmax(-1)).sum() + pairs.exp().sum()


def _writes_one_of_equal_parts(self: Any, a: Tensor) -> Tensor:
    first, second = a[:1].clone().expand(2, -1).chunk(2)
    first.mul_(2)  # second is the same memory
    return (self.linear(a[:1]) * second).sum()


def _writes_through_windows(self: Any, a: Tensor) -> Tensor:
    base = a.clone()
    base.unfold(0, 2, 1).mul_(2)
    return (self.linear(a) * base).sum()


def _writes_what_detach_hides(self: Any, a: Tensor) -> Tensor:
    y = self.linear(a)
    y.detach().mul_(2)
    return y.pow(2).sum()


def _writes_a_diagonal_of_no_square(self: Any, a: Tensor) -> Tensor:
    y = self.linear(a)
    y.diagonal().mul_(2)
    return y.pow(2).sum()


@pytest.mark.parametrize(
    "body",
    [
        _writes_one_of_equal_parts,
        _writes_through_windows,
        _writes_what_detach_hides,
        _writes_a_diagonal_of_no_square,
    ],
)
def test_writes_that_other_views_read_are_refused(body: Callable[..., Any]) -> None:
    with pytest.raises(NotSupportedError, match="reads through another view"):
        check(Module(body), {"a": x()})


def _parts_read_apart(self: Any, a: Tensor) -> Tensor:
    y = self.linear(a)
    y[:, :2].add_(y[:, 2:])
    y[:, ::2].sub_(y[:, 1::2])
    y[..., 0].sub_(y[..., 3])
    y.add_(y)
    y[:, :1].add_(y[:, 0:1])
    return y.pow(2).sum()


@pytest.mark.parametrize(
    "write",
    [
        lambda y: y.add_(y[:, :1], alpha=0.5),
        lambda y: y[:, 1:].add_(y[:, :-1]),
        lambda y: y[:, 1:].copy_(y[:, :-1]),
        lambda y: y[:, ::2].mul_(y[:, 1:3]),
        lambda y: y[1:].addcmul_(y[:-1], y[:-1]),
        lambda y: torch.mul(y[:, :3], 2.0, out=y[:, 1:]),
    ],
)
def test_reads_of_what_is_written_elsewhere_are_refused(write: Callable[[Tensor], Tensor]) -> None:
    """Eager's result is of the order in which it writes, which torch leaves open."""

    def body(self: Any, a: Tensor) -> Tensor:
        y = self.linear(a).detach()
        write(y)
        return (y * self.linear(a)).sum()

    with pytest.raises(NotSupportedError, match=r"reads elements that it writes(.|\n)*clone"):
        check(Module(body), {"a": x()})


@pytest.mark.parametrize(
    "body",
    [
        _parts_read_apart,
        _in_place_in_another_dtype,
        _the_value_returned,
        _a_step_and_a_cast,
        _dead_views_do_not_matter,
        _gates,
        _turned_in_place,
        _copies,
        _parts_written_in_turn,
        _in_another_order,
        _in_another_shape,
        _diagonals,
    ],
)
def test_writes_equal_eager(body: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    program = check(Module(body), {"a": x()})
    assert not any(t._schema.is_mutable for t in targets(program))


@pytest.mark.parametrize(
    "view",
    [
        lambda y: torch.meshgrid(y.flatten(), y.flatten(), indexing="ij")[0],
        lambda y: torch.einsum("ij->ji", y),
        lambda y: torch.broadcast_tensors(y, y[None])[1],
        lambda y: torch.cartesian_prod(y.flatten()),
    ],
)
def test_views_that_no_schema_names_are_not_missed(view: Callable[[Tensor], Tensor]) -> None:
    def body(self: Any, a: Tensor) -> Tensor:
        y = self.linear(a)
        seen = view(y)
        y.add_(1)
        return seen.pow(2).sum()

    with pytest.raises(NotSupportedError, match="reads through another view"):
        check(Module(body), {"a": x()})
