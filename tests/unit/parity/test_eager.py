"""A step of the user's own module: what belongs to it takes part, and stays as it was."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from autopar.parity.eager import ModuleStep, module_step
from autopar.program.graph import Accumulation

ROWS, WIDTH = 4, 6


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(self.up(x)).relu())

    def own_loss(self, outputs: Tensor, given: Any) -> Tensor:
        """Reads parameters of the model."""
        return outputs.square().mean() + self.up.weight.square().sum()


def squares(outputs: Tensor, given: Any) -> Tensor:
    return outputs.square().mean()


def net() -> Net:
    torch.manual_seed(0)
    return Net().double()


def rows() -> tuple[Tensor]:
    torch.manual_seed(1)
    return (torch.randn(ROWS, WIDTH, dtype=torch.float64),)


def step(model: nn.Module, loss_fn: Any = squares, n: int = 1) -> ModuleStep:
    accumulation = Accumulation(n, {"0": 0}) if n > 1 else None
    parameters = dict(model.named_parameters())
    return module_step(model, rows(), loss_fn, parameters, {}, accumulation, 0)


def trained(model: Net, loss_fn: Any = squares) -> dict[str, Tensor]:
    """The gradients of a step of the model itself."""
    loss_fn(model(*rows()), rows()).backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def same_step(found: ModuleStep, wanted: dict[str, Tensor]) -> None:
    assert found.result.gradients.keys() == wanted.keys()
    for name, gradient in found.result.gradients.items():
        torch.testing.assert_close(gradient, wanted[name], rtol=0, atol=1e-14)


def tripled(module: nn.Module, inputs: Any, outputs: Any) -> Any:
    return (inputs[0] * 3,)


def halved(model: Net) -> Net:
    model.up.weight.register_hook(lambda gradient: gradient / 2)
    model.down.register_full_backward_hook(tripled)
    return model


def test_gradient_hooks_take_part() -> None:
    wanted = trained(halved(net()))
    same_step(step(halved(net())), wanted)
    assert not torch.equal(wanted["up.weight"], trained(net())["up.weight"])


def reaching(model: Net) -> Net:
    """A hook that holds the user's own module."""
    model.up.register_forward_hook(lambda m, args, output: output + model.down.bias)
    return model


def test_gradients_through_the_users_own_module_count() -> None:
    model = reaching(net())
    found = step(model)
    assert all(p.grad is None for p in model.parameters())
    same_step(found, trained(reaching(net())))


def test_a_loss_that_is_a_method_of_the_model() -> None:
    model, own = net(), net()
    wanted = trained(own, own.own_loss)
    for loss_fn in (model.own_loss, functools.partial(model.own_loss)):
        same_step(step(model, loss_fn), wanted)


def test_microbatches_add_up_and_change_buffers_in_turn() -> None:
    model = net()
    found = step(model, n=2)
    (x,) = rows()
    total = torch.zeros((), dtype=torch.float64)
    for part in x.chunk(2):
        loss = squares(model(part), ()) / 2
        loss.backward()
        total = total + loss.detach()
    torch.testing.assert_close(found.result.loss, total, rtol=0, atol=1e-14)
    same_step(found, {n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    for name, value in model.named_buffers():
        assert torch.equal(found.result.buffers[name], value), name
    assert found.before["norm.num_batches_tracked"] == 0


def test_a_synchronised_norm_is_a_norm_of_one_process() -> None:
    wanted = trained(net())
    same_step(step(nn.SyncBatchNorm.convert_sync_batchnorm(net())), wanted)
