"""Buffers through the public calls on two processes: batch norms, a moving average, a count."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.capture import capture, reference_step, whole_buffers
from autopar.errors import StateError
from autopar.runtime.launch import WorkerPool
from tests.helpers.jobs import (
    Batch,
    Case,
    Trained,
    error,
    errors,
    machine,
    train_alone,
    train_module,
)
from tests.helpers.nightly import nightly, one_in
from tests.helpers.ranks import TOLERANCE

Pool = Callable[[int], WorkerPool]
ROWS, CHANNELS, CLASSES = 8, 4, 4
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


class Block(nn.Module):
    """A convolution and a batch norm beside a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(CHANNELS, momentum=0.2)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.norm(self.conv(x)))


class Net(nn.Module):
    """Two blocks and a head on centred features; a buffer counts the calls in training."""

    calls: Tensor
    centre: Tensor
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()
        self.head = nn.Linear(CHANNELS, CLASSES)
        self.register_buffer("centre", torch.zeros(CHANNELS))
        self.register_buffer("scale", torch.full((CHANNELS,), 2.0))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long), persistent=False)

    def forward(self, image: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        features = self.second(self.first(image)).mean((2, 3))
        if self.training:
            with torch.no_grad():
                self.calls += 1
                self.centre.lerp_(features.mean(0), 0.1)
        scores = self.head((features - self.centre) * self.scale)
        return F.cross_entropy(scores, label), scores


def images(seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    image = torch.randn(ROWS, CHANNELS, 4, 4, generator=generator)
    return {"image": image, "label": torch.randint(CLASSES, (ROWS,), generator=generator)}


CASE = Case(Net, images)
CHANGED = {f"{block}.norm.{kind}" for block in ("first", "second") for kind in STATISTICS}
LAYOUTS: dict[str, dict[str, Any]] = {
    "auto": {},
    "tensor": {"forbid": ("data",)},
    "stages": {"stages": [(["first"], (1, 1)), (["second", "head"], (1, 1))]},
}


def module_of(layout: str, model: nn.Module | None = None, **options: Any) -> Any:
    shape = (2, 1) if layout == "stages" else (1, 2)
    return autopar.parallelize(
        model or CASE.model(), machine(shape), images(0), precision="fp64",
        **LAYOUTS[layout], **options,
    )  # fmt: skip


class Found(NamedTuple):
    """What one rank has after training; `scores` are the outputs of an evaluation batch."""

    trained: Trained
    buffers: dict[str, Tensor]
    scores: Tensor
    state: dict[str, Tensor]


def evaluated(module: Any) -> Tensor:
    module.eval()
    scores: Tensor = module(**images(9), gather="all")[1]
    return scores


def train(layout: str) -> Found:
    module = module_of(layout)
    trained = train_module(module, images)
    buffers = {name: b.clone() for name, b in module.named_buffers()}
    return Found(trained, buffers, evaluated(module), module.full_state_dict())


@lru_cache
def alone() -> tuple[Trained, dict[str, Tensor], Tensor]:
    """One process: the trained state, all buffers, and the scores of an evaluation batch."""
    trained, model = train_alone(CASE), CASE.model().double()
    model.load_state_dict(model.state_dict() | trained.values)
    model.eval()
    buffers = dict(model.named_buffers()) | {"calls": torch.tensor(3)}
    batch = images(9)
    return trained, buffers, model(batch["image"].double(), batch["label"])[1].detach()


def off(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, float]:
    each = {name: error(value, wanted[name]) for name, value in found.items()}
    return {name: e for name, e in each.items() if not e <= TOLERANCE}


@one_in(3)
@pytest.mark.parametrize("layout", [pytest.param("auto", marks=nightly), "tensor", "stages"])
def test_training_and_evaluation_equal_one_process(workers: Pool, layout: str) -> None:
    trained, buffers, scores = alone()
    ranks = workers(2).run(train, layout)
    found = errors([r.trained for r in ranks], trained)
    assert {name: e for name, e in found.items() if not e <= TOLERANCE} == {}
    assert CHANGED | {"centre", "scale"} <= ranks[0].trained.values.keys()
    assert "calls" not in ranks[0].trained.values
    for rank in ranks:
        assert off(rank.buffers, buffers) == {}
        assert error(rank.scores, scores) <= TOLERANCE
    held = [rank.buffers.keys() for rank in ranks]
    assert held[0] | held[1] == buffers.keys()
    assert off(ranks[0].state, ranks[0].trained.values) == {}  # evaluation changes nothing
    if layout == "stages":
        assert not {n for n in held[0] if n.startswith("second")}
        assert not {n for n in held[1] if n.startswith("first")}


def refused() -> list[str]:
    module = module_of("stages")
    whole = {n: v.double() for n, v in CASE.model().state_dict().items()}
    messages = []
    for change in (
        {"first.norm.running_mean": None},
        {"second.norm.running_var": torch.ones(CHANNELS + 1)},
        {"scale": torch.zeros(CHANNELS)},
    ):
        given = {n: v for n, v in (whole | change).items() if v is not None}
        with pytest.raises(StateError) as raised:
            module.load_state_dict(given)
        messages.append(str(raised.value))
    return messages


def test_state_that_does_not_fit_is_refused_on_every_rank(workers: Pool) -> None:
    for missing, shaped, constant in workers(2).run(refused):
        assert "missing" in missing and "first.norm.running_mean" in missing
        assert "second.norm.running_var: (5,)" in shaped
        assert "buffer `scale`" in constant


class Unlike(Net):
    """Changes a buffer in evaluation and not in training."""

    def forward(self, image: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        if not self.training:
            self.scale.mul_(2)
        return super().forward(image, label)


def test_a_buffer_that_only_evaluation_changes_is_refused() -> None:
    module = autopar.parallelize(Unlike(), machine((1, 1)), images(0), precision="fp64")
    module.eval()
    with pytest.raises(autopar.NotSupportedError, match="`scale` changes here"):
        module(**images(0))


def test_verify_compares_buffers() -> None:
    report = autopar.verify(CASE.model(), machine((1, 2)), images(0), precision="fp64")
    assert report.ok, report.text()
    assert CHANGED | {"centre", "calls"} <= report.errors.keys()


def test_a_world_of_one_keeps_the_tensors_that_others_hold() -> None:
    model = CASE.model()
    module = autopar.parallelize(model, machine((1, 1)), images(0), precision="fp64")
    held = dict(module.named_buffers())
    program = capture(model, images(0), precision="fp64")
    buffers = whole_buffers(program, model)
    for step in range(2):
        module.step(**images(step))
        values = {n: p.detach() for n, p in module.named_parameters()}
        reference_step(program, values, images(step), buffers)
    assert all(held[name] is buffer for name, buffer in module.named_buffers())
    assert off(buffers, held) == {}
    assert model.get_buffer("calls").item() == 0  # the user's model is left alone


@pytest.mark.parametrize("manual", [None, autopar.Manual(dp=2)])
def test_a_batch_norm_of_one_channel(manual: autopar.Manual | None) -> None:
    """Its statistics have no dim that a rule names."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(CHANNELS, 1, 1), nn.BatchNorm2d(1)).double()
    batch = {"input": images(0)["image"].double()}
    report = autopar.verify(
        model, machine((1, 2)), batch, loss_fn=lambda out, _: out.pow(3).mean(), precision="fp64",
        microbatches=1, manual=manual, forbid=["tensor", "sequence"] if manual is None else (),
    )  # fmt: skip
    report.raise_if_wrong()
