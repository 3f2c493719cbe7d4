"""A trace leaves the user's classes and objects, and the process, as they were."""

from __future__ import annotations

import logging
import os
import random
import sys
import threading
import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch._functorch import eager_transforms
from torch._functorch.vmap import vmap_impl
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from autopar.errors import CaptureError
from tests.helpers.captures import captured


class Kind:
    scale = 1.0

    def __init__(self) -> None:
        self.own = 1.0

    @classmethod
    def unit(cls) -> float:
        return 1.0

    @property
    def twice(self) -> float:
        return 2 * self.scale


class Big(Kind):
    scale = 2.0


class Other(Kind):
    pass


KIND = Kind()


def of_backends() -> float:
    """As einops looks for its backends."""
    return sum(kind.scale for kind in Kind.__subclasses__())


def of_inherited() -> float:
    return Other.scale + Other.unit() + KIND.scale + KIND.twice


def of_changed() -> float:
    """Changes what it read, of an object and of a class that inherits it."""
    KIND.scale, KIND.own, Other.scale = KIND.scale + 1, KIND.own + 1, Other.scale + 1
    return KIND.scale + Other.scale


class Net(nn.Module):
    def __init__(self, number: Any) -> None:
        super().__init__()
        self.linear, self.number = nn.Linear(4, 4), number

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * self.number()).square().mean()


def state() -> list[dict[str, Any]]:
    return [dict(vars(holder)) for holder in (Kind, Big, Other, KIND)]


@pytest.mark.parametrize("number", [of_backends, of_inherited])
def test_a_trace_leaves_no_mark(number: Any) -> None:
    before = state()
    for _ in range(2):
        captured(Net(number), {"x": torch.ones(2, 4)})
        assert state() == before
    assert Big.__subclasses__() == []


def test_a_trace_that_is_refused_leaves_no_mark() -> None:
    before = state()
    with pytest.raises(CaptureError, match="reads and changes"):
        captured(Net(of_changed), {"x": torch.ones(2, 4)})
    assert state() == before


class Everything(nn.Module):
    """What the trace exchanges in torch: functions, regions, derivatives, transforms."""

    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.linear, self.norm, self.fails = nn.Linear(4, 4), nn.BatchNorm1d(4), fails

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        h = self.norm(torch.utils.checkpoint.checkpoint(self.linear, x, use_reentrant=False))
        rows = torch.vmap(lambda row: self.linear(row).tanh())(x)
        (slope,) = torch.autograd.grad(self.linear(x).tanh().sum(), x, create_graph=True)
        scale = 1.0 if not self.fails or rows.sum() > 0 else 2.0
        return (nn.functional.dropout(h) + rows + slope).square().mean() * scale


EXCHANGED = (
    torch.autograd.grad, torch.autograd.backward, torch.autograd.Function.apply, vmap_impl,
    torch.utils.checkpoint.checkpoint, eager_transforms.vjp, eager_transforms.grad_and_value_impl,
    torch.fx.experimental.symbolic_shapes.GuardOnDataDependentSymNode.__init__,
)  # fmt: skip
HOLDERS = (nn.Module, nn.Linear, nn.BatchNorm1d, Tensor, nn.functional, torch.autograd, torch.func)


def process() -> dict[str, Any]:
    """What a trace could leave different in the process."""
    names = [name for name in logging.root.manager.loggerDict if name.startswith("torch")]
    loggers = {name: logging.getLogger(name) for name in names}
    return {
        "code": [getattr(f, "__func__", f).__code__ for f in EXCHANGED],
        "holders": [dict(vars(holder)) for holder in HOLDERS],
        "loggers": {n: (g.level, [*g.filters], [*g.handlers]) for n, g in loggers.items()},
        "environment": dict(os.environ),
        "streams": (sys.stdout, sys.stderr, sys.gettrace(), sys.getrecursionlimit()),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "running": threading.active_count(),
        "random": (random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()),
        "dtype": (torch.get_default_dtype(), torch.get_float32_matmul_precision()),
        "modes": (
            torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"),
            torch.is_inference_mode_enabled(), torch.are_deterministic_algorithms_enabled(),
            torch.is_anomaly_enabled(), len(_get_current_dispatch_mode_stack()),
            torch._C._len_torch_function_stack(),
        ),
        "warnings": [*warnings.filters],
    }  # fmt: skip


@pytest.mark.parametrize("fails", [False, True])
def test_a_trace_leaves_the_process_as_it_was(
    fails: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    x = torch.ones(2, 4)
    captured(Net(of_inherited), {"x": x})  # torch loads what it needs at the first trace
    model = Everything(fails)
    before = process()
    if fails:
        with pytest.raises(CaptureError, match="branch depends on tensor values"):
            captured(model, {"x": x})
    else:
        captured(model, {"x": x})
    after = process()
    for name, value in before.items():
        if name == "loggers":  # others may have been made since
            assert {k: v for k, v in after[name].items() if k in value} == value
        else:
            assert after[name] == value, name
    assert not x.requires_grad and all(p.grad is None for p in model.parameters())
    assert capfd.readouterr() == ("", "")
