"""A Python value that changes during training has the effect that it has on one process."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar import CaptureError, PlanError
from tests.helpers.jobs import Batch, gradient
from tests.unit.module import settings

ALPHA = 1.0
TABLE: dict[str, Any] = {"a": 1.0, "inner": [1.0, 2.0]}


class Net(nn.Module):
    """Linear, dropout-free batch norm, and a scale."""

    gain = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.beta = 0.5
        self.config = SimpleNamespace(scale=1.0, nested={"k": [1.0]})
        self.gelu = False

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm(self.linear(x))
        if self.gelu:
            out = nn.functional.gelu(out)
        return out * self.beta * self.config.scale * self.config.nested["k"][0] * self.gain


def squares(out: Tensor, batch: Any) -> Tensor:
    return out.pow(2).sum()


def batch() -> Batch:
    return {"x": torch.randn(8, 4, generator=torch.Generator().manual_seed(1)).double()}


def made(kind: Callable[[], nn.Module] = Net) -> Any:
    torch.manual_seed(0)
    return kind().double()


Loss = Callable[[Any, Any], Tensor]
Changes = list[Callable[[Any], object]]


def check(changes: Changes, loss_fn: Loss = squares, kind: Callable[[], Any] = Net) -> Any:
    """Train by both ways with a change before each step; returns the parallel module."""
    model, own = made(kind), made(kind)
    module = autopar.parallelize(model, (1, 1), batch(), loss_fn=loss_fn)
    for change in [lambda m: None, *changes]:
        change(model)
        change(own)
        own.zero_grad()
        module.zero_grad()
        wanted = loss_fn(own(**batch()), batch())
        wanted.backward()
        torch.testing.assert_close(module.step(**batch()), wanted.detach(), rtol=1e-12, atol=1e-12)
        gradients = module.full_gradients()
        for name, parameter in own.named_parameters():
            torch.testing.assert_close(gradients[name], gradient(parameter), rtol=1e-10, atol=1e-12)
    return module


def setting(path: str, value: object) -> Callable[[Any], object]:
    *parts, name = path.split(".")

    def change(model: Any) -> None:
        for part in parts:
            model = getattr(model, part)
        setattr(model, name, value)

    return change


ATTRIBUTES: dict[str, Changes] = {
    "a number": [setting("beta", 0.25), setting("beta", 0.5), setting("beta", 0.25)],
    "of a part": [setting("norm.eps", 1e-2), setting("norm.momentum", 0.5)],
    "of a config": [setting("config.scale", 3.0)],
    "inside a config": [lambda m: m.config.nested["k"].__setitem__(0, 2.0)],
    "another config": [setting("config", SimpleNamespace(scale=2.0, nested={"k": [4.0]}))],
    "of the class, hidden": [setting("gain", 2.0)],
}


@pytest.mark.filterwarnings("ignore:.*captured again")
@pytest.mark.parametrize("name", ATTRIBUTES)
def test_attributes_change(name: str) -> None:
    check(ATTRIBUTES[name])


def test_a_notice_once_for_each_name() -> None:
    with pytest.warns(UserWarning, match=r"`beta` of the model changed from 0.5 to 0.25") as caught:
        check([setting("beta", 0.25), setting("beta", 0.125)])
    assert len([w for w in caught if "captured again" in str(w.message)]) == 1
    assert caught[0].filename == __file__


class Loud(Net):
    """Prints while it is traced: a compiled step is silent."""

    def forward(self, x: Tensor) -> Tensor:
        print("traced")  # noqa: T201
        return super().forward(x)


@pytest.mark.filterwarnings("ignore:.*captured again")
def test_earlier_values_reuse_what_was_compiled(capsys: pytest.CaptureFixture[str]) -> None:
    model = made(Loud)
    module = autopar.parallelize(model, (1, 1), batch(), loss_fn=squares)
    capsys.readouterr()
    is_traced = []
    for beta in (0.5, 0.25, 0.5, 0.5 * float(torch.ones(())), 0.25):
        model.beta = beta
        module.step(**batch())
        is_traced.append("traced" in capsys.readouterr().out)
    assert is_traced == [False, True, False, False, False]


def test_unread_attributes_are_not_watched() -> None:
    model = made()
    model.n_steps = 0
    module = autopar.parallelize(model, (1, 1), batch(), loss_fn=squares)
    model.n_steps = 1
    module.step(**batch())  # a warning would be an error


@pytest.mark.filterwarnings("ignore:.*captured again")
def test_a_constant_tensor_made_of_a_value() -> None:
    """The graph is equal, its constant is not."""

    class Shifted(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) + torch.full((4,), self.beta, dtype=x.dtype)

    check([setting("beta", 2.0)], kind=Shifted)


@pytest.mark.filterwarnings("ignore:.*captured again")
def test_closures_globals_and_what_they_call() -> None:
    weights, shift = {"a": 1.0}, torch.ones(4, dtype=torch.float64)
    factor = 1.0

    @lru_cache
    def factor_of(power: int) -> float:
        return settings.DELTA

    def helper(out: Tensor) -> Tensor:
        return out * settings.GAMMA * factor_of(2) + shift

    def forget(model: object) -> None:
        factor_of.cache_clear()
        settings.DELTA = 1.25

    def loss(out: Tensor, batch: Any, power: int = 2) -> Tensor:
        scaled = helper(out) * ALPHA * TABLE["inner"][1] * settings.Choice.weight
        return (scaled.pow(power) * weights["a"] * factor).sum()

    def assign(model: object, **values: float) -> None:
        globals().update(values)

    def nonlocal_(model: object) -> None:
        nonlocal factor
        factor = 3.0

    changes: Changes = [
        lambda m: weights.update(a=2.0),
        nonlocal_,
        partial(assign, ALPHA=0.5),
        lambda m: TABLE["inner"].__setitem__(1, 5.0),
        lambda m: setattr(settings, "GAMMA", 0.75),
        lambda m: setattr(settings.Choice, "weight", 1.5),
        lambda m: shift.fill_(2.0),
        forget,
    ]
    check(changes, loss)


@pytest.mark.filterwarnings("ignore:.*captured again")
@pytest.mark.parametrize("how", ["partial", "object", "method", "module"])
def test_losses_that_hold_values(how: str) -> None:
    class Weighted:
        weight = 1.0

        def scaled(self, out: Tensor) -> Tensor:
            return out.pow(2).sum() * self.weight * settings.GAMMA

        def __call__(self, out: Tensor, batch: Any) -> Tensor:
            return self.scaled(out)

    class Criterion(nn.Module):
        weight = 1.0

        def forward(self, out: Tensor, batch: Any) -> Tensor:
            return out.pow(2).sum() * self.weight

    table = {"w": 1.0}
    held: Any = {"object": Weighted(), "method": Weighted(), "module": Criterion()}.get(how)

    def with_table(table: dict[str, float], out: Tensor, batch: Any) -> Tensor:
        return out.pow(2).sum() * table["w"]

    loss: Any = held.__call__ if how == "method" else held or partial(with_table, table)

    def change(model: object) -> None:
        table["w"] = 2.0
        if held is not None:
            held.weight = 2.0

    check([change, lambda m: setattr(settings, "GAMMA", 2.5)], loss)


NO_GRADIENT = "`requires_grad` of `linear.weight` changed from True"


@pytest.mark.filterwarnings("ignore:.*captured again")
@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (setting("gelu", True), PlanError, "`gelu` of the model changed from False to True; the"),
        (setting("norm.training", False), PlanError, "`training` of `norm` changed from True to"),
        (setting("norm", nn.Identity()), CaptureError, "class of `norm` changed"),
        (setting("linear.weight.requires_grad", False), CaptureError, NO_GRADIENT),
    ],
)
def test_changes_that_the_plan_does_not_fit(
    change: Any, kind: type[Exception], message: str
) -> None:
    model = made()
    module = autopar.parallelize(model, (1, 1), batch(), loss_fn=squares)
    change(model)
    with pytest.raises(kind, match=message):
        module.step(**batch())


def test_a_part_in_eval_mode_stays_there_beside_a_loss() -> None:
    """Statistics of `norm` are fixed: wrapping the model with its loss changes no mode."""

    def partly_fixed() -> Net:
        net = Net()
        net.norm.eval()
        return net

    check([], kind=partly_fixed)


def test_modes_of_the_capture_stay() -> None:
    """`model.eval()` after capture is the model's own; new shapes are captured in training mode."""
    model = made()
    module = autopar.parallelize(model, (1, 1), batch(), loss_fn=squares)
    model.eval()
    with pytest.warns(UserWarning, match="original model does not change the parallel module"):
        module.step(**batch())
    half = {"x": batch()["x"][:4]}
    with pytest.warns(UserWarning, match="captured a batch unlike the planned one"):
        loss = module.step(**half)
    torch.testing.assert_close(loss, squares(made()(**half), half).detach())


class Acting(Net):
    """Its output is scaled by what `act` returns."""

    def __init__(self, act: Callable[[Any, Tensor], float]) -> None:
        super().__init__()
        self.act, self.n_calls, self.rows = act, 0, None
        self.shapes: list[int] = []
        self.config.problem = None

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.act(self, x)


def counting(model: Any, x: Tensor) -> float:
    model.n_calls += 1
    return 1.0


def remembering(model: Any, x: Tensor) -> float:
    model.shapes.append(len(x))
    return 1.0


def settling(model: Any, x: Tensor) -> float:
    """The first call finds a setting, as of transformers' classifiers, and later calls keep it."""
    if model.rows is None:
        model.rows = 2
    if model.config.problem is None:
        model.config.problem = "regression"
    return float(model.rows)


def deciding(model: Any, x: Tensor) -> Any:
    """It sets something once, and does another thing while it is traced."""
    return x.abs() if settling(model, x) and torch.compiler.is_exporting() else x.square()


def first(model: Any, x: Tensor) -> float:
    scale = 3.0 if model.rows is None else 1.0
    model.rows = 2
    return scale


def writing(model: Any, x: Tensor) -> float:
    model.last_rows = len(x)
    model.gelu, before = True, model.gelu
    model.gelu = before
    return 1.0


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (counting, "reads and changes `n_calls` of the model"),
        (first, "reads and changes `rows` of the model"),
        (remembering, "reads and changes `shapes` of the model"),
        (lambda model, x: 2 if random.random() < 0.5 else 3, "draws from Python's `random`"),
        (lambda model, x: float(np.random.rand()), "draws from Python's `numpy.random`"),
    ],
)
def test_state_that_forward_changes_is_refused(act: Any, message: str) -> None:
    model, drawn = made(partial(Acting, act)), random.getstate()
    with pytest.raises(CaptureError, match=message) as caught:
        autopar.plan(model, (1, 1), batch(), loss_fn=squares)
    assert f"{__file__}:" in str(caught.value)
    assert "hint" in str(caught.value)
    assert random.getstate() == drawn
    assert (model.n_calls, model.shapes) == (0, [])


def test_an_attribute_that_is_only_written_is_harmless() -> None:
    model = made(partial(Acting, writing))
    autopar.plan(model, (1, 1), batch(), loss_fn=squares)
    assert not hasattr(model, "last_rows")


def test_state_that_is_set_once() -> None:
    """A second run says that nothing else changes; the user's model is as it was."""
    seen: list[Any] = []
    check(
        [lambda m: None, lambda m: seen.append((m.rows, m.config.problem))],
        kind=partial(Acting, settling),
    )
    assert seen == [(None, None), (2, "regression")]


@pytest.mark.parametrize(("act", "n_traces"), [(writing, 1), (settling, 1), (deciding, 2)])
def test_what_is_set_once_is_traced_once(
    act: Any, n_traces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless forward alone calls something else of torch than while it is traced."""
    export, n = torch.export.export, 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal n
        n += 1
        return export(*args, **kwargs)

    monkeypatch.setattr(torch.export, "export", counted)
    rows = {"x": torch.randn(12, 4).double()}  # of no other test: captures are cached
    autopar.plan(made(partial(Acting, act)), (1, 1), rows, loss_fn=squares)
    assert n == n_traces


@pytest.mark.parametrize("kind", [list, torch.stack])
def test_caches_that_the_first_call_fills(kind: Callable[[Any], Any]) -> None:
    """The refusal says what to do: the trace reads what the cache holds."""

    def cached(model: Any, x: Tensor) -> Any:
        if model.rows is None:
            model.rows = kind([torch.linspace(0.0, 1.0, x.shape[1]).to(x.dtype)])
        return model.rows[0]

    model = made(partial(Acting, cached))
    with pytest.raises(CaptureError, match=r"call the model once before autopar\.parallelize"):
        autopar.plan(model, (1, 1), batch(), loss_fn=squares)
    assert model.rows is None
    wanted = squares(model(**batch()), batch())
    module = autopar.parallelize(model, (1, 1), batch(), loss_fn=squares)
    for _ in range(2):
        torch.testing.assert_close(module.step(**batch()), wanted.detach(), rtol=0, atol=1e-12)


def test_containers_that_grow_are_refused_and_put_back() -> None:
    kept: list[Tensor] = []
    model = made()
    handle = model.linear.register_forward_hook(lambda module, inputs, out: kept.append(out))
    with pytest.raises(CaptureError, match=r"changes length of `kept` in .*: from 0 to 1"):
        autopar.plan(model, (1, 1), batch(), loss_fn=squares)
    assert kept == []
    handle.remove()

    def loss(out: Tensor, batch: Any) -> Tensor:
        TABLE["n"] = TABLE.get("n", 0) + 1
        return squares(out, batch)

    with pytest.raises(CaptureError, match=r"`TABLE` of test_frozen_values.py: from 2 to 3"):
        autopar.plan(model, (1, 1), batch(), loss_fn=loss)
    assert "n" not in TABLE


@pytest.mark.parametrize("kind", ["list", "generator", "count", "numpy"])
def test_iterators_and_generators_that_a_trace_draws_from_are_refused(kind: str) -> None:
    source: Any = {
        "list": iter([1.0, 2.0]),
        "generator": (float(i) for i in range(3)),
        "count": itertools.count(),
        "numpy": np.random.default_rng(0),
    }[kind]

    def loss(out: Tensor, batch: Any) -> Tensor:
        return squares(out, batch) * (source.random() if kind == "numpy" else next(source))

    with pytest.raises(CaptureError, match=r"changes state of `source` in"):
        autopar.plan(made(), (1, 1), batch(), loss_fn=loss)


def test_parameters_read_from_a_closure_are_refused() -> None:
    model = made()

    def loss(out: Tensor, batch: Any) -> Tensor:
        return squares(out, batch) + sum(p.pow(2).sum() for p in model.parameters())

    with pytest.raises(CaptureError, match=r"parameter `linear.weight` is read from outside"):
        autopar.plan(model, (1, 1), batch(), loss_fn=loss)


def test_the_audit_lists_what_is_frozen() -> None:
    module = autopar.parallelize(made(), (1, 1), batch(), loss_fn=squares)
    notes = {note.what: note.why for note in module.captured().frozen}
    assert notes["`beta` of the model"] == "0.5"
    assert notes["`config.scale` of the model"] == "1.0"
    assert notes["`eps` of `norm`"] == "1e-05"
    assert "`beta` of the model" in module.captured().text()
    assert "`eps`" not in module.captured().text()
    assert "`eps` of `norm`: 1e-05" in module.captured().text(full=True)


def test_a_notice_where_the_capture_was_in_eval_mode() -> None:
    module = autopar.parallelize(made().eval(), (1, 1), batch(), loss_fn=squares)
    with pytest.warns(UserWarning, match="captured in evaluation mode") as caught:
        module.train()
    assert caught[0].filename == __file__
    module = autopar.parallelize(made(), (1, 1), batch(), loss_fn=squares)
    module.eval().train()
