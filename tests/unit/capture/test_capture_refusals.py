"""What capture refuses, and the line it points to."""

from __future__ import annotations

import dataclasses
import enum
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DataParallel, DistributedDataParallel

from autopar.capture import capture
from autopar.errors import AutoparError, CaptureError, NotSupportedError, OptionError
from tests.helpers.capture_harness import Module


def _branches(self: Any, a: torch.Tensor) -> torch.Tensor:
    y = self.linear(a)
    if y.sum() > 0:
        return y.sum()
    return y.mean()


def _reads_a_number(self: Any, a: torch.Tensor) -> torch.Tensor:
    return self.linear(a).sum() * a.sum().item()


def _keeps_a_tensor(self: Any, a: torch.Tensor) -> torch.Tensor:
    self.kept = self.linear(a)
    return self.kept.sum()


def _fails(self: Any, a: torch.Tensor) -> torch.Tensor:
    return self.no_such_thing(a)


def _mutates_input(self: Any, a: torch.Tensor) -> torch.Tensor:
    a.add_(1)
    return self.linear(a).sum()


def _mutates_a_copy_or_not(self: Any, a: torch.Tensor) -> torch.Tensor:
    y = self.linear(a)
    maybe_a_view = y.t().reshape(-1)
    y.mul_(2)
    return maybe_a_view.sum()


def _mutates_without_gradient(self: Any, a: torch.Tensor) -> torch.Tensor:
    y = self.linear(a)
    y.detach().mul_(2)
    return y.sum()


def _writes_a_parameter(self: Any, a: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        self.linear.weight.mul_(0.5)
    return self.linear(a).sum()


def _writes_where_gradient_flows(self: Any, a: torch.Tensor) -> torch.Tensor:
    y = self.linear(a)
    with torch.no_grad():
        y.mul_(2)
    return y.sum()


def _writes_a_part_where_gradient_flows(self: Any, a: torch.Tensor) -> torch.Tensor:
    y = self.linear(a)
    with torch.no_grad():
        y[0] = 0.0
    return y.sum()


def _writes_all_of_a_view_where_gradient_flows(self: Any, a: torch.Tensor) -> torch.Tensor:
    y = self.linear(a)
    with torch.no_grad():
        y.view(-1).fill_(1.0)
        y.T.zero_()
    return y.sum() + self.linear(a).sum()


def _packs(self: Any, a: torch.Tensor) -> torch.Tensor:
    y = self.linear(a)[None]
    return nn.utils.rnn.pack_padded_sequence(y, torch.tensor([2]), batch_first=True).data.sum()


def _draws_what_it_seeded(self: Any, a: torch.Tensor) -> torch.Tensor:
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        noise = torch.randn_like(a)
    return self.linear(a + noise).sum()


# The reason; the file of the line that is named: the body's here, or that of forward.
HERE, FORWARD = __file__, "capture_harness.py"


@pytest.mark.parametrize(
    ("body", "reason", "file"),
    [
        (_branches, "depend", HERE),
        (_reads_a_number, "depends on the data", ""),
        (_keeps_a_tensor, "self.kept", ""),
        (_fails, "no_such_thing", HERE),
        (_mutates_input, "in-place", FORWARD),
        (_mutates_a_copy_or_not, "in-place", FORWARD),
        (_mutates_without_gradient, "in-place", FORWARD),
        (_writes_a_parameter, "parameter `linear.weight`", FORWARD),
        (_draws_what_it_seeded, "set torch's generator", FORWARD),
        (_writes_where_gradient_flows, "without gradients", FORWARD),
        (_writes_a_part_where_gradient_flows, "without gradients", FORWARD),
        (_writes_all_of_a_view_where_gradient_flows, "without gradients", FORWARD),
    ],
)
def test_what_cannot_be_captured_names_the_line(
    body: Callable[..., Any], reason: str, file: str
) -> None:
    kind = NotSupportedError if file == FORWARD else CaptureError
    with pytest.raises(kind, match=reason) as error:
        capture(Module(body), (torch.randn(2, 4),))
    assert "hint: " in str(error.value)
    if file == HERE:
        first = body.__code__.co_firstlineno
        assert any(f"{HERE}:{line}\n" in str(error.value) for line in range(first + 1, first + 4))
    elif file:
        assert f"{file}:" in str(error.value)


def test_a_packed_sequence_is_refused_with_advice() -> None:
    with pytest.raises(NotSupportedError, match="packed sequence") as error:
        capture(Module(_packs), (torch.randn(2, 4),))
    assert f"{__file__}:{_packs.__code__.co_firstlineno + 2}\n" in str(error.value)
    assert "hint: run the RNN over the padding" in str(error.value)


class Selects(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input)[input[:, 0] > 0].sum()


def test_a_shape_that_depends_on_data_names_the_line_of_forward() -> None:
    with pytest.raises(CaptureError, match=r"aten\.index\.Tensor") as error:
        capture(Selects(4, 4), (torch.randn(2, 4),))
    line = Selects.forward.__code__.co_firstlineno + 1
    assert f"{__file__}:{line}\n" in str(error.value)


def _loss(out: torch.Tensor, batch: Any) -> torch.Tensor:
    return out.square().mean()


def test_operators_of_the_loss_function_point_to_it() -> None:
    program = capture(nn.Sequential(nn.Linear(4, 4)), (torch.randn(2, 4),), loss_fn=_loss)
    assert program.loss is not None
    assert program.sources[program.loss] == f"{__file__}:{_loss.__code__.co_firstlineno}"


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({}, CaptureError, "no scalar loss, but: a float32 tensor of shape (2, 4)"),
        ({"loss_fn": lambda out, batch: out}, CaptureError, "loss_fn of Sequential returned"),
        ({"loss_fn": lambda out, batch: out}, CaptureError, "return the loss of the batch: .mean"),
        ({"loss_fn": lambda out, batch: out.sum()[None]}, CaptureError, "with .squeeze() or .mean"),
        ({"loss_fn": lambda out, batch: batch[0].sum()}, CaptureError, "no trainable parameter"),
        ({"precision": "fp8"}, OptionError, "fp8"),
    ],
)
def test_misuse_is_explained(
    options: dict[str, Any], kind: type[AutoparError], message: str
) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(kind) as error:
        capture(model, (torch.randn(2, 4),), **options)
    assert message in str(error.value)


def test_a_module_before_its_first_call() -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.ReLU())
    with pytest.raises(CaptureError, match="run one batch first") as error:
        capture(model, (torch.ones(2, 3),), loss_fn=lambda out, batch: out.sum())
    assert "`0` is a LazyLinear" in str(error.value)


class Keys(dict[str, float]):
    """As many configurations are: attributes are keys, and others raise `KeyError`."""

    __getattr__ = dict.__getitem__


KINDS: dict[str, tuple[Callable[[], Any], str]] = {
    "a function": (lambda: len, "is a builtin_function_or_method, not a torch.nn.Module"),
    "a class": (lambda: nn.Linear, r"the class Linear, not a module\n  hint: pass an instance"),
    "DataParallel": (
        lambda: DataParallel(nn.Linear(4, 4)), r"wrapped in DataParallel\n  hint: .*`\.module`",
    ),
    "DDP in a part": (
        lambda: nn.Sequential(_uninitialised(DistributedDataParallel)),
        r"`0` is wrapped in DistributedDataParallel\n  hint: .*`\.module`",
    ),
    "FSDP": (
        lambda: _uninitialised(FullyShardedDataParallel),
        r"the model is wrapped in FullyShardedDataParallel\n  hint: .*`\.module`",
    ),
    "attributes that are keys": (
        lambda: set_attributes(nn.Linear(4, 4), cfg=Keys(beta=1.0)),
        r"KeyError: '__deepcopy__'\n  hint: let `__getattr__` .* raise AttributeError",
    ),
    "a lock": (
        lambda: set_attributes(nn.Linear(4, 4), lock=threading.Lock()),
        r"cannot be copied .*lock[^\n]*\n  hint: keep what cannot be copied outside",
    ),
}  # fmt: skip


def set_attributes(model: nn.Module, **attributes: Any) -> nn.Module:
    vars(model).update(attributes)
    return model


def _uninitialised(kind: type[nn.Module]) -> nn.Module:
    """A wrapper of this class around nothing, which needs no process group."""
    made = kind.__new__(kind)
    nn.Module.__init__(made)
    return made


@pytest.mark.parametrize("name", KINDS)
def test_what_is_no_model_or_is_wrapped(name: str) -> None:
    make, message = KINDS[name]
    with pytest.raises(AutoparError, match=message):
        capture(make(), (torch.randn(2, 4),), loss_fn=_loss)


class Word(enum.Enum):
    ONE = 1


@dataclasses.dataclass
class Rows:
    a: torch.Tensor


INPUTS: dict[str, tuple[Any, str]] = {
    "ndarray": (np.ones(4), r"torch\.as_tensor"),
    "device": (torch.device("cpu"), r"`x\.device`"),
    "Word": (Word.ONE, "attribute of the model"),
    "Rows": (Rows(torch.ones(2)), r"register_dataclass\(Rows\)"),
    "Generator": (torch.Generator(), "leave it out"),
}


@pytest.mark.parametrize("kind", INPUTS)
def test_inputs_of_no_graph(kind: str) -> None:
    value, hint = INPUTS[kind]
    with pytest.raises(OptionError, match=rf"input `1\.k` is a {kind};[^\n]*\n  hint: .*{hint}"):
        capture(nn.Linear(4, 4), (torch.randn(2, 4), {"k": value}), loss_fn=_loss)


def test_a_generator_of_the_model() -> None:
    def draws(self: Any, a: torch.Tensor) -> torch.Tensor:
        return (self.linear(a) * torch.rand(a.shape, generator=self.own)).sum()

    model = set_attributes(Module(draws), own=torch.Generator())
    with pytest.raises(NotSupportedError, match=r"torch\.Generator[^\n]*\n  hint: leave gen"):
        capture(model, (torch.randn(2, 4),))


def test_a_seed_that_forward_sets_is_taken_back() -> None:
    def seeds(self: Any, a: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(0)
        return self.linear(a).sum()

    model, batch = Module(seeds), (torch.randn(2, 4),)
    before = torch.get_rng_state()
    capture(model, batch)
    assert torch.equal(before, torch.get_rng_state())


LOSSES: dict[str, Callable[[Any, Any], torch.Tensor]] = {
    "takes the label": lambda out, label: (out - label).mean(),
    "reads a name": lambda out, batch: (out - batch["label"]).mean(),
    "reads a place": lambda out, batch: (out - batch[1]).mean(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_reads_the_batch_wrongly(name: str) -> None:
    with pytest.raises(CaptureError, match=r"hint: .*\(outputs, batch\); batch is the tuple of"):
        capture(nn.Linear(4, 4), (torch.randn(2, 4),), loss_fn=LOSSES[name])
