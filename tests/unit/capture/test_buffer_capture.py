"""Capture of buffers that forward changes: they are inputs and results, equal to eager's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.capture import capture
from autopar.errors import NotSupportedError
from autopar.program.graph import Program
from tests.helpers.capture_harness import Module, check, targets, x


class Changing(Module):
    """A module that runs `body` and has buffers of several shapes."""

    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__(body)
        self.register_buffer("row", torch.rand(4))
        self.register_buffer("table", torch.rand(3, 4))
        self.register_buffer("count", torch.zeros((), dtype=torch.long), persistent=False)
        self.register_buffer("fixed", torch.rand(4))

    def again(self, *batch: Tensor) -> Program:
        """Check two steps; the second starts from the buffers that the first left."""
        first = check(self, batch)
        for buffer in self.buffers():
            buffer.detach_()
        check(self, batch)
        return first


def changed(program: Program) -> set[str]:
    assert all(b.update in program.updates for b in program.buffers.values())
    assert not any(t._schema.is_mutable for t in targets(program))
    return {b.name for b in program.buffers.values()}


def _assigned(self: Any, a: Tensor) -> Tensor:
    self.row = 0.5 * self.row + self.linear(a).detach().sum(0)
    return (self.linear(a) * self.row).sum()


def _copy_with_gradient(self: Any, a: Tensor) -> Tensor:
    y = self.linear(a)
    self.table.copy_(y)
    return self.table.pow(2).sum()


def _through_views(self: Any, a: Tensor) -> Tensor:
    y = self.linear(a)
    seen = self.table[:, 1:3]
    with torch.no_grad():
        self.table[1] = y.detach()[0]
        self.table[0, 1:3].mul_(2)
    return (y[:, :2] * seen).sum()


def _out(self: Any, a: Tensor) -> Tensor:
    with torch.no_grad():
        torch.mul(self.row, a[0], out=self.row)
    return (self.linear(a) + self.row).sum()


@pytest.mark.parametrize(
    ("body", "names"),
    [
        (_assigned, {"row"}),
        (_copy_with_gradient, {"table"}),
        (_through_views, {"table"}),
        (_out, {"row"}),
    ],
)
def test_a_changed_buffer_is_an_input_and_a_result(
    body: Callable[..., Any], names: set[str]
) -> None:
    assert changed(Changing(body).again(x())) == names


def test_a_synchronised_batch_norm_is_a_batch_norm() -> None:
    plain = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).double()
    programs = [
        capture(model, (x(),), loss_fn=lambda out, batch: out.pow(2).sum())
        for model in (plain, nn.SyncBatchNorm.convert_sync_batchnorm(plain))
    ]
    assert programs[0].hash() == programs[1].hash()


def test_results_of_batch_norm_that_carry_no_gradient_are_known() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    program = capture(model, (x(),), loss_fn=lambda out, batch: out.pow(2).sum())
    assert program.has_grad.isdisjoint(program.updates)
    assert torch.ops.aten.detach.default not in targets(program)


def test_one_norm_under_two_names_and_called_twice() -> None:
    model = Module(lambda self, a: self.again(self.norm(self.linear(a))).pow(3).sum())
    model.norm = model.again = nn.BatchNorm1d(4)
    program = check(model, (x(5),))
    mean = next(b for b in program.buffers.values() if b.name == "norm.running_mean")
    assert mean.aliases == ("again.running_mean",)
    assert len(program.buffers) == 3


def test_a_program_may_read_what_another_changes() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    live = {"1.running_mean", "1.running_var"}
    program = capture(model, (x(),), training=False, live_buffers=live)
    assert {b.name for b in program.buffers.values()} == live
    assert program.updates == () and not program.constants


def test_a_buffer_that_is_part_of_another_is_refused() -> None:
    model = Changing(_out)
    model.register_buffer("part", model.get_buffer("row").view(2, 2))
    with pytest.raises(NotSupportedError, match=r"`row` changes, and shares its memory.*`part`"):
        capture(model, (x(),))
