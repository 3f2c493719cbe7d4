"""Traps in which a capture would be silently wrong, one test each."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autopar.capture import capture, reference_step
from autopar.errors import BatchError, CaptureError
from autopar.operators import DROPOUT, UNIFORM
from autopar.program.graph import flatten_inputs
from tests.helpers.capture_harness import Module, check, dtypes_of_floats, targets, x

aten = torch.ops.aten


def test_the_users_model_is_left_untouched() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    model[1].eval()
    before = copy.deepcopy(model.state_dict())
    ids = [id(p) for p in model.parameters()]
    capture(model, (torch.randn(2, 4),), loss_fn=lambda out, batch: out.sum())
    program = capture(model, (torch.randn(2, 4),), training=False)
    assert program.loss is None and not program.training
    assert DROPOUT not in targets(program) and program.seed is None
    assert [id(p) for p in model.parameters()] == ids
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert model.training and not model[1].training
    assert all(p.grad is None for p in model.parameters())


def test_inputs_that_are_one_object_stay_two() -> None:
    model = Module(lambda self, a, b: (self.linear(a) * b).sum())
    same = torch.randn(2, 4)
    program = capture(model, {"a": same, "b": same})
    assert [i.path for i in program.inputs.values()] == ["a", "b"]
    check(model, {"a": x(), "b": x()})


def test_unused_inputs_and_parameters_stay() -> None:
    model = Module(lambda self, a, unused: self.linear(a).sum())
    model.idle = nn.Parameter(torch.ones(2))
    program = capture(model, {"a": torch.randn(2, 4), "unused": torch.randn(3)})
    assert {i.path for i in program.inputs.values()} == {"a", "unused"}
    assert {p.name for p in program.parameters.values()} == {"linear.weight", "linear.bias", "idle"}


def test_other_inputs_are_baked_in_and_nested_ones_have_paths() -> None:
    def body(self: Any, pair: Any, flag: bool, scale: float, none: None) -> torch.Tensor:
        assert none is None
        return (self.linear(pair[0]) * (scale if flag else 1.0) + pair[1]).sum()

    batch = {"pair": [x(), x()], "flag": True, "scale": 3.0, "none": None}
    program = check(Module(body), batch)
    assert [i.path for i in program.inputs.values()] == ["pair.0", "pair.1"]


def test_the_output_structure_comes_back() -> None:
    def body(self: Any, a: torch.Tensor) -> dict[str, Any]:
        y = self.linear(a)
        return {"n": None, "y": y, "three": 3, "input": a, "loss": y.sum(), "again": y}

    check(Module(body), (x(),))


def test_a_dead_random_operator_does_not_shift_the_others() -> None:
    def body(self: Any, a: torch.Tensor) -> torch.Tensor:
        F.dropout(a, 0.5)
        return F.dropout(self.linear(a), 0.5).sum()

    program = capture(Module(body), (torch.randn(2, 4),))
    (drawn,) = (n for n in program.operators if n.target == DROPOUT)
    assert drawn.args[-1] == 1  # the second operator of the trace that draws


def test_reference_step_names_a_missing_or_misshapen_input() -> None:
    model = Module(lambda self, a: self.linear(a).sum())
    program = capture(model, {"a": torch.randn(2, 4)})
    parameters = dict(model.named_parameters())
    with pytest.raises(BatchError, match="`a` is missing"):
        reference_step(program, parameters, {})
    with pytest.raises(BatchError, match=r"\(3, 4\)"):
        reference_step(program, parameters, {"a": torch.randn(3, 4)})


def test_loss_fn_is_part_of_the_graph_and_sees_the_batch() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    batch = (x(), x())
    program = capture(model.double(), batch, loss_fn=lambda out, batch: F.l1_loss(out, batch[1]))
    assert {p.name for p in program.parameters.values()} == set(dict(model.named_parameters()))
    assert [i.path for i in program.inputs.values()] == ["0", "1"]
    assert "0/linear#0" in program.keys.values() and "/abs#0" in program.keys.values()
    got, outputs = reference_step(program, dict(model.named_parameters()), flatten_inputs(batch))
    want = model(batch[0])
    torch.testing.assert_close(outputs, want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(got, F.l1_loss(want, batch[1]), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("ignored", ["some", "all", "none"])
def test_label_counts_come_from_the_prologue(ignored: str, smoothing: float) -> None:
    def body(self: Any, a: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.linear(a), labels, label_smoothing=smoothing)

    labels = torch.tensor([0, 1, 2, 3, 1, 0])
    if ignored != "none":
        labels[2 if ignored == "some" else 0 :] = -100
    model = Module(body).double()
    batch = {"a": x(6), "labels": labels}
    program = capture(model, batch)
    assert program.prologue is not None and len(program.prologue.outputs) == 1
    (count,) = program.prologue.graph(labels)
    assert count == (labels != -100).sum() and count.dtype == torch.float64
    got, _ = reference_step(program, dict(model.named_parameters()), batch)
    torch.testing.assert_close(got, model(**batch), rtol=1e-12, atol=0, equal_nan=True)


LABELS = torch.tensor([0, 1, 2, 0, 3, 1])
WEIGHTS = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
# What is divided by, and whether it is computed from inputs before the step.
DIVIDED: dict[str, tuple[Callable[..., torch.Tensor], dict[str, torch.Tensor], bool]] = {
    "labels, some ignored": (
        lambda self, a, y: F.nll_loss(self.linear(a).log_softmax(-1), y, ignore_index=0),
        {"y": LABELS},
        True,
    ),
    "a mask": (
        lambda self, a, y: (self.linear(a).sum(-1) * y).sum() / y.sum(), {"y": LABELS.sign()}, True
    ),
    "probabilities": (
        lambda self, a, y: F.cross_entropy(self.linear(a), y),
        {"y": F.one_hot(LABELS, 4).double()},
        False,
    ),
    "class weights": (
        lambda self, a, y: F.cross_entropy(self.linear(a), y, WEIGHTS),
        {"y": LABELS},
        False,
    ),
    "constants": (
        lambda self, a: F.cross_entropy(self.linear(a), torch.arange(len(a)) % 4), {}, False
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DIVIDED)
def test_what_is_computed_before_the_step(name: str) -> None:
    body, batch, has_prologue = DIVIDED[name]
    assert (check(Module(body), {"a": x(6), **batch}).prologue is not None) == has_prologue


def test_biases_are_added_apart() -> None:
    def body(self: Any, a: torch.Tensor) -> torch.Tensor:
        w, b = self.linear.weight, self.linear.bias
        y = torch.addmm(b, self.linear(a), w, beta=2, alpha=3)
        return torch.baddbmm(y[None], y[None], w[None]).sum()

    found = targets(check(Module(body), {"a": x()}))
    assert not {aten.addmm.default, aten.baddbmm.default} & set(found)
    assert {aten.mm.default, aten.bmm.default, aten.linear.default} <= set(found)


def test_no_ops_disappear_and_views_survive_lost_copies() -> None:
    def body(self: Any, a: torch.Tensor) -> torch.Tensor:
        y = self.linear(a).to(a.dtype).type_as(a).clone()[:, :].expand(3, -1).reshape(3, 4)
        return y.transpose(0, 1).contiguous().view(-1).flatten().square().mean()

    found = targets(check(Module(body), {"a": x()}))
    kept = [aten.linear, aten.add, aten.transpose, aten.reshape, aten.square, aten.sum, aten.div]
    assert [t.overloadpacket for t in found] in (kept, [*kept[:4], aten.pow, *kept[5:]])


def test_no_grad_regions_cut_gradients() -> None:
    def body(self: Any, a: torch.Tensor) -> torch.Tensor:
        y = self.linear(a)
        with torch.no_grad():
            viewed = y.view(3, 4)
            scale = 1 / (1 + y.square().sum() + self.linear.weight.sum().square())
            with torch.enable_grad():
                again = (self.linear(a) * 2).sum()
        return (y * scale).sum() + viewed.sum() + y.detach().sum() + again

    program = check(Module(body), {"a": x()})
    detached = [n for n in program.operators if n.target == aten.detach.default]
    assert detached and not any(n.name in program.has_grad for n in detached)


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_a_trace_is_one_of_training_whatever_is_around_it(around: Callable[[], Any]) -> None:
    def body(self: Any, a: torch.Tensor) -> torch.Tensor:
        y = self.linear(a)
        with torch.no_grad():
            scale = y.square().sum()
            with torch.enable_grad():
                again = self.linear(a).sum()
        return y.sum() * scale + again

    with around():
        found = capture(Module(body), {"a": x()})
    assert found.has_grad == capture(Module(body), {"a": x()}).has_grad


def test_buffers_that_nothing_changes_are_constants() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    batch = (torch.randn(3, 4),)
    program = capture(model, batch, training=False)
    assert len(program.constants) == 2 and not program.buffers
    _, out = reference_step(program, dict(model.named_parameters()), {"0": batch[0]})
    torch.testing.assert_close(out, copy.deepcopy(model).eval()(*batch))


def test_constants_are_lazy_shared_and_follow_buffers() -> None:
    def body(self: Any, a: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(4).expand(3, 4) * self.scale
        mask = torch.ones(4, 4).tril() + torch.tensor([0.0, 1.0, 2.0, 3.0])
        return ((self.linear(a) + positions) @ mask.double() * self.plain).sum()

    model = Module(body).double()
    model.register_buffer("scale", torch.tensor(2.0, dtype=torch.float64))
    model.plain = torch.tensor(3.0, dtype=torch.float64)
    program = capture(model, {"a": x()})
    assert len(program.constants) == 3 and not program.buffers
    model.get_buffer("scale").fill_(5.0)  # read when first asked for
    first = {name: compute() for name, compute in program.constants.items()}
    assert all(first[name] is compute() for name, compute in program.constants.items())
    for name, value in first.items():
        assert value.shape == program.node(name).meta["val"].shape
    check(model, {"a": x()})


def test_equal_constants_are_one() -> None:
    def body(self: Any, a: torch.Tensor) -> torch.Tensor:
        table = torch.arange(4.0, dtype=torch.float64)
        y = self.linear(a) * table.unsqueeze(0)
        return (y * table.unsqueeze(0) * torch.full((), 1) * torch.full((), 1.0)).sum()

    assert len(check(Module(body), {"a": x()}).constants) == 3


def test_random_tensors_are_not_constants() -> None:
    program = capture(
        Module(lambda self, a: (self.linear(a) * torch.rand(4)).sum()), (torch.randn(2, 4),)
    )
    assert UNIFORM in targets(program)
    assert [compute().tolist() for compute in program.constants.values()] == [[0, 1, 2, 3]]


def test_a_buffer_on_meta_that_nothing_initialises_is_named() -> None:
    with torch.device("meta"):
        model = Module(lambda self, a: (self.linear(a) * self.table).sum())
        model.register_buffer("table", torch.ones(4))
    program = capture(model, (torch.empty(2, 4, device="meta"),))
    (compute,) = program.constants.values()
    with pytest.raises(CaptureError, match="`table` has no value"):
        compute()


def test_fp64_lifts_casts_factories_and_integer_arithmetic() -> None:
    def body(self: Any, a: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        y = self.linear(a).float().softmax(-1, dtype=torch.float32).half().float()
        drawn = torch.zeros(4, dtype=torch.bfloat16) + torch.full((4,), 0.5)
        return (y * (n / 3) * (n + 0.5).sqrt() + drawn * n.sum().sqrt()).mean()

    model = Module(body)
    batch = {"a": torch.randn(3, 4), "n": torch.tensor([1, 2, 3, 4])}
    program = capture(model, batch, precision="fp64")
    assert dtypes_of_floats(program) == {torch.float64}
    parameters = {n: p.double() for n, p in model.named_parameters()}
    inputs = {i.path: batch[i.path].to(i.dtype) for i in program.inputs.values()}
    loss, _ = reference_step(program, parameters, inputs)
    assert loss is not None and loss.dtype == torch.float64
