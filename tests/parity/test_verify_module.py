"""`verify` says which is wrong: sharding, or the capture of the user's own module."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar import Manual
from autopar.errors import BatchError, NotSupportedError, VerificationError
from autopar.parity import Report, tolerance_of
from autopar.runtime.launch import WorkerPool
from tests.helpers.captures import captured
from tests.helpers.models import dropout_models
from tests.helpers.nightly import one_in
from tests.parity.zoo.entries import tokens
from tests.parity.zoo.text import gpt2_with_dropout

Pool = Callable[[int], WorkerPool]
MESH, TP = (1, 2), Manual(tp=2)
WIDTH, ROWS = 8, 4
FP64 = partial(autopar.verify, precision="fp64")


class Net(nn.Module):
    """Two linear layers and a batch norm; `frozen` puts the norm in eval mode."""

    def __init__(self, norm: str = "", dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(2 * WIDTH) if norm else nn.Identity()
        self.dropout = nn.Dropout(dropout)
        if norm == "frozen":
            self.norm.eval()

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.norm(self.up(x)).relu()
        return self.down(self.dropout(h))


class Scored(nn.Module):
    """Returns its loss."""

    def __init__(self, norm: str = "", dropout: float = 0.0) -> None:
        super().__init__()
        self.net = Net(norm, dropout)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.net(x), y)


def is_traced(x: Tensor) -> bool:
    return isinstance(x, torch._subclasses.FakeTensor)


class Doubled(Scored):
    """Its trace is not what it computes."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x, y) * (2 if is_traced(x) else 1)


class Small(Scored):
    """The same, with a small loss."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x, y) * (2e-7 if is_traced(x) else 1e-7)


class Cumulated(torch.autograd.Function):
    """Sums over the rows up to each: none of them may be on another rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.cumsum(0)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0].flip(0).cumsum(0).flip(0)


class Summed(Scored):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(Cumulated.apply(self.net(x)), y)


class Student(nn.Module):
    """Learns from a copy of itself, so its gradients are 0 but for rounding; `wrong`: not in its
    trace."""

    def __init__(self, wrong: float = 0.0) -> None:
        super().__init__()
        self.net, self.wrong = Net(), wrong
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        own, given = self.net(x), self.teacher(x)
        more = self.wrong * own.sum() if is_traced(x) else 0.0
        return F.cross_entropy(own, given.softmax(-1)) + more


class Centred(nn.Module):
    """The mean of what is normalised is 0 whatever the weights, and so are all gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.net = nn.Conv2d(4, 4, 3, padding=1), nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        return F.instance_norm(self.net(self.conv(x).narrow(1, 0, 2))).mean()


def batch(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {"x": torch.randn(ROWS, WIDTH, dtype=dtype), "y": torch.randn(ROWS, WIDTH, dtype=dtype)}


def squares(outputs: Tensor, given: dict[str, Tensor]) -> Tensor:
    return (outputs - given["y"]).square().mean()


def both_equal(report: Report) -> None:
    report.raise_if_wrong()
    assert report.sharding_ok and report.capture_ok and report.not_compared is None
    assert set(report.capture_errors) >= set(report.errors)
    assert report.text().count(": equal, worst error") == 2


def test_a_wrong_capture() -> None:
    """Sharding agrees with the captured program, which is not the module."""
    report = FP64(Doubled(), MESH, batch(), manual=TP)
    assert report.sharding_ok and not report.capture_ok and not report.ok
    sharding, capture, *names = report.text().splitlines()
    assert sharding.startswith("sharding: equal") and capture.startswith("capture: NOT equal")
    assert any(line.startswith("  loss: ") for line in names)
    assert report.worst == max(report.capture_errors.values()) > 1e-3
    with pytest.raises(VerificationError, match="capture: NOT equal"):
        report.raise_if_wrong()


def test_small_gradients_are_compared_with_each_other() -> None:
    """They differ by less than the tolerance."""
    report = FP64(Small(), MESH, batch(), manual=TP)
    assert report.capture_errors["loss"] <= report.capture_tolerance
    assert report.sharding_ok and not report.capture_ok


@one_in(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_that_are_0_but_for_rounding(dtype: torch.dtype) -> None:
    def verified(model: nn.Module) -> Report:
        given = {"x": batch(dtype)["x"]}
        return autopar.verify(model.to(dtype), MESH, given, manual=TP, batch_dims={"x": 0})

    both_equal(verified(Student()))
    wrong = verified(Student(wrong=1e-3))
    assert wrong.sharding_ok and not wrong.capture_ok


def test_gradients_of_a_mean_that_are_0_but_for_rounding() -> None:
    """All that backward computes is small, but for the mean's own gradient, which it expands."""
    both_equal(FP64(Centred(), MESH, {"x": torch.randn(8, 4, 6, 4)}, manual=TP))


@pytest.mark.usefixtures("registry")
def test_a_wrong_sharding() -> None:
    """The user's rule claims that rows do not depend on each other."""
    autopar.register_rule(Cumulated, "row feature -> row feature")
    report = FP64(Summed(), MESH, batch(), manual=Manual(dp=2), microbatches=1)
    assert not report.sharding_ok and report.capture_ok and not report.ok
    assert report.text().startswith("sharding: NOT equal")
    assert "\ncapture: equal" in report.text()


RANDOM: dict[str, tuple[Callable[[], nn.Module], Callable[[int], dict[str, Tensor]]]] = {
    "gpt2": (gpt2_with_dropout, tokens),
    "every draw": (lambda: dropout_models.Noisy().double(), dropout_models.rows),
}


@one_in(3)
@pytest.mark.parametrize("name", RANDOM)
def test_models_that_draw_random_numbers(name: str) -> None:
    make, rows = RANDOM[name]
    torch.manual_seed(0)
    both_equal(FP64(make().train(), MESH, rows(0), manual=Manual(dp=2)))


def test_in_the_models_own_dtypes() -> None:
    report = autopar.verify(Scored(dropout=0.3), MESH, batch(), manual=TP)
    both_equal(report)
    assert report.tolerance == report.capture_tolerance == 1e-6


def test_a_float64_model() -> None:
    report = autopar.verify(Scored().double(), MESH, batch(torch.float64), manual=TP)
    both_equal(report)
    assert report.capture_tolerance == 1e-10


def test_tolerance_of_half_precision() -> None:
    half = captured(Scored().bfloat16(), batch(torch.bfloat16))
    assert tolerance_of(half) == 1e-6 * 2**16
    assert tolerance_of(captured(Scored(), batch())) == 1e-6


@pytest.mark.parametrize("norm", ["trained", "frozen"])
def test_batch_norm_and_a_loss_function(norm: str) -> None:
    """The loss needs inputs that the model does not take; a frozen norm stays in eval mode."""
    model = Net(norm)
    report = FP64(model, MESH, batch(), loss_fn=squares, manual=TP)
    both_equal(report)
    assert ("norm.running_mean" in report.capture_errors) == (norm == "trained")


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_accumulated_microbatches(dropout: float) -> None:
    with pytest.warns(UserWarning, match="gradient accumulation"):
        report = FP64(Scored("trained", dropout), MESH, batch(), microbatches=2, manual=TP)
    both_equal(report)
    assert report.plan.data.accumulates


def test_hooks_that_change_outputs() -> None:
    model = Scored()
    model.net.up.register_forward_hook(lambda module, args, output: output * 1.5)
    model.net.down.register_forward_pre_hook(lambda module, args: (args[0].tanh(),))
    both_equal(FP64(model, MESH, batch(), manual=TP))


class Sequence(nn.Module):
    """Its dropout is inside an operator that stays whole and draws from torch's generator."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.LSTM(WIDTH, WIDTH, 2, dropout=0.5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x[:, None])[0].square().mean()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_random_numbers_that_cannot_be_paired() -> None:
    report = FP64(Sequence(), MESH, {"x": batch()["x"]}, fallback="replicate", microbatches=1)
    assert not report.capture_ok and not report.ok and not report.capture_errors
    last = report.text().splitlines()[-1]
    assert last.startswith("capture: not compared: the model draws random numbers with `aten.")


class Seeded(Scored):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        torch.manual_seed(3)
        return super().forward(x, y)


def test_a_seed_set_in_forward_is_refused() -> None:
    with pytest.raises(NotSupportedError, match=r"torch\.manual_seed"):
        FP64(Seeded(dropout=0.5), MESH, batch(), manual=TP)


def test_the_users_objects_stay_as_they_are() -> None:
    model = Scored("trained", 0.3)
    x, y = batch().values()
    model(x, y).backward()
    model.net.up.bias.grad = None
    held = [(p.grad, None if p.grad is None else p.grad.clone()) for p in model.parameters()]
    state = {k: v.clone() for k, v in model.state_dict().items()}
    keys = set(vars(model))
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    FP64(model, MESH, batch(), manual=TP, microbatches=1).raise_if_wrong()
    torch.manual_seed(1)  # `batch` sets it
    batch()
    found = torch.rand(3), random.random(), np.random.rand()
    torch.manual_seed(1)
    batch()
    random.seed(5)
    np.random.seed(5)
    assert torch.equal(found[0], torch.rand(3))
    assert found[1:] == (random.random(), np.random.rand())
    assert set(vars(model)) == keys and model.training
    for p, (gradient, values) in zip(model.parameters(), held, strict=True):
        assert p.grad is gradient
        assert gradient is None or (values is not None and torch.equal(gradient, values))
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]), name


def test_inputs_on_meta_are_refused() -> None:
    inputs = {name: value.to("meta") for name, value in batch().items()}
    with pytest.raises(BatchError, match=r"input `x` is on meta[\s\S]*real tensors"):
        autopar.verify(Scored(), MESH, inputs)


def test_a_model_on_meta() -> None:
    with torch.device("meta"):
        model = Scored("trained", 0.2)
    both_equal(FP64(model, MESH, batch(), manual=TP, microbatches=1))
    assert all(p.is_meta for p in model.parameters())


class Failing(Scored):
    """Only its trace runs."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if not is_traced(x):
            raise IndexError("not a trace")
        return super().forward(x, y)


def test_a_model_that_fails_itself() -> None:
    with pytest.raises(
        VerificationError,
        match=r"Failing itself fails on these inputs[\s\S]*Index[\s\S]*at .*_module\.py",
    ):
        FP64(Failing(), MESH, batch(), manual=Manual(dp=2))


def verify_in_job() -> list[tuple[bool, str, set[str]]]:
    found = []
    for model in (Scored("trained", 0.3), Scored(dropout=0.3).double()):
        dtype = next(model.parameters()).dtype
        report = FP64(model, MESH, batch(dtype), manual=TP, microbatches=1)
        found.append((report.capture_ok, report.text(), set(report.capture_errors)))
    return found


def fail_in_job() -> str:
    with pytest.raises(VerificationError) as refusal:
        FP64(Failing(), MESH, batch(), manual=TP)
    return str(refusal.value)


def test_in_a_job(workers: Pool) -> None:
    """Every rank has both comparisons, or the error of the module."""
    for with_norm, plain in workers(2).run(verify_in_job):
        for is_ok, text, _ in (with_norm, plain):
            assert is_ok, text
        assert "net.norm.running_var" in with_norm[2]
    for text in workers(2).run(fail_in_job):
        assert "Failing itself fails" in text
