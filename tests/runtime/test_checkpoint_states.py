"""Schedulers, loaders and generators in checkpoints: without pickle, and resumed bitwise."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW, lr_scheduler
from torch.optim.lr_scheduler import OneCycleLR

import autopar
from autopar import Manual
from autopar.errors import OptionError, StateError
from autopar.runtime.checkpoints import load, save
from autopar.runtime.checkpoints.trees import decoded, encoded
from tests.helpers.checkpoint_jobs import Rank
from tests.helpers.jobs import advance, machine
from tests.helpers.nightly import one_in
from tests.helpers.pools import Pool
from tests.helpers.state_model import ONE, PAIR

SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 2, 4]),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, 20),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.CosineAnnealingLR(o, 8)], [3]
    ),
}


class Held:
    """An object with a state of any kind."""

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def state_dict(self) -> Any:
        return self.value

    def load_state_dict(self, state: Any) -> None:
        self.value = state


def rates(rank: Rank, scheduler: Any, n_steps: int) -> list[float]:
    out = []
    for step in range(n_steps):
        rank.train(step, 1)
        is_plateau = isinstance(scheduler, lr_scheduler.ReduceLROnPlateau)
        scheduler.step(*([1.0] if is_plateau else []))
        out.append(rank.optimizer.param_groups[0]["lr"])
    return out


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers(name: str, tmp_path: Path) -> None:
    path = str(tmp_path / "ckpt")
    rank = Rank(ONE, 0, AdamW)
    scheduler = SCHEDULERS[name](rank.optimizer)
    rates(rank, scheduler, 2)
    save(rank.checkpointed(), rank.optimizer, path, 2, states={"scheduler": scheduler})
    expected = rates(rank, scheduler, 5)
    again = Rank(ONE, 5, AdamW)
    other = SCHEDULERS[name](again.optimizer)
    load(again.checkpointed(), again.optimizer, path, {"scheduler": other})
    assert rates(again, other, 5) == expected


VALUE: dict[Any, Any] = {
    "plain": [None, True, 3, 0.1, float("inf"), "ü", {"a": []}],
    "tuple": ((1, (2,)), {3, 4}, frozenset("x"), b"\x00\xff"),
    "keys": {1: "one", (2, 3): "pair", "~": "tag", None: 0},
    "counter": Counter("aab"),
    "ordered": OrderedDict(a=1),
    "array": np.arange(6, dtype=np.uint32).reshape(2, 3),
}


def test_what_a_state_may_hold() -> None:
    tensors: list[Tensor] = []
    model = nn.Linear(2, 3).to(torch.bfloat16)
    tree = encoded({**VALUE, "model": model.state_dict(), "scalar": np.array(2.5)}, "it", tensors)
    back = decoded(tree, tensors.__getitem__)
    array, scalar, weights = back.pop("array"), back.pop("scalar"), back.pop("model")
    assert back == {k: v for k, v in VALUE.items() if k != "array"}
    assert type(back["counter"]) is Counter
    assert type(back["tuple"]) is tuple
    assert (array == VALUE["array"]).all()
    assert (array.dtype, scalar.shape, scalar) == (np.uint32, (), 2.5)
    assert torch.equal(weights["weight"], model.weight)
    with pytest.raises(OptionError, match=r"it\['f'\]\[0\] is a function, which only a pickle"):
        encoded({"f": [test_schedulers]}, "it", [])
    with pytest.raises(StateError, match="unknown kind, 'object'"):
        decoded({"~": "object", "of": []}, tensors.__getitem__)


def draw() -> list[float]:
    return [random.gauss(0, 1), random.random(), float(np.random.randn()), float(torch.randn(()))]


def draws_again(path: str) -> tuple[list[float], list[float], float]:
    """What this rank draws after a save, and after a load; and its own state."""
    rank = Rank(PAIR if dist.is_initialized() else ONE, 0, AdamW)
    number = dist.get_rank() if dist.is_initialized() else 0
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)
    draw()
    held = Held({"at": number})
    save(rank.checkpointed(), None, path, 1, states={"held": held})
    expected = draw()
    held.value = None
    load(rank.checkpointed(), None, path, {"held": held})
    return expected, draw(), held.value["at"]


@pytest.fixture
def kept_generators() -> Any:
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


@pytest.mark.usefixtures("kept_generators")
def test_every_rank_draws_on(workers: Pool, tmp_path: Path) -> None:
    both = workers(2).run(draws_again, str(tmp_path / "ckpt"))
    for rank, (expected, again, held) in enumerate(both):
        assert again == expected
        assert held == rank
    assert both[0][0] != both[1][0]
    alone = Rank(ONE, 0, AdamW)
    load(alone.checkpointed(), None, tmp_path / "ckpt")
    assert draw() == both[0][0]
    with pytest.raises(StateError, match=r"'held'\] differed between the 2 ranks that saved them"):
        load(alone.checkpointed(), None, tmp_path / "ckpt", {"held": Held()})


def test_states_that_are_not_there(tmp_path: Path) -> None:
    rank = Rank(ONE, 0, AdamW)
    save(rank.checkpointed(), rank.optimizer, tmp_path / "c", 1, states={"loader": Held([1])})
    with pytest.raises(StateError, match=r"has no state of 'sampler', but of \['loader'\]"):
        load(rank.checkpointed(), rank.optimizer, tmp_path / "c", {"sampler": Held()})
    with pytest.warns(UserWarning, match=r"\['loader'\] of checkpoint .* are not loaded"):
        load(rank.checkpointed(), rank.optimizer, tmp_path / "c")
    load(rank.checkpointed(), None, tmp_path / "c")  # weights alone
    held = Held()
    load(rank.checkpointed(), rank.optimizer, tmp_path / "c", {"loader": held}, verify=False)
    assert held.value == [1]


N_STEPS, N_SAVED = 6, 3
LAYOUTS = {"tp": Manual(tp=2), "zero-3": Manual(dp=2, zero=3), "pp": Manual(pp=2)}


class Noisy(nn.Module):
    """The first weight is used again at the end, so two stages hold it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(8, 16), nn.Dropout(0.3), nn.Linear(16, 8)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.down(self.drop(self.up(x).relu())))
        return F.linear(hidden, self.up.weight).square().mean()


class Script:
    """Draws its batches from all generators, and has a schedule of its learning rate."""

    def __init__(self, seed: int, layout: Manual) -> None:
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        self.pm = autopar.parallelize(Noisy(), machine((1, 2)), {"x": drawn()}, manual=layout)
        self.optimizer = AdamW(self.pm.parameters(), lr=1e-2)
        self.states = {"schedule": OneCycleLR(self.optimizer, 0.1, 2 * N_STEPS)}

    def train(self, n_steps: int) -> list[float]:
        losses = []
        for _ in range(n_steps):
            losses.append(self.pm.step(x=drawn()).item())
            losses.append(self.pm.clip_grad_norm_(0.5).item())
            advance(self.optimizer)
            self.states["schedule"].step()
        return losses


def drawn() -> Tensor:
    scale = random.random() + float(np.random.rand())
    return torch.randn(8, 8) * scale


def stop_and_resume(path: str, before: Manual, after: Manual) -> list[Any]:
    """The losses and norms of the last steps, without a stop and with; the step that was loaded."""
    script = Script(0, before)
    with autopar.AsyncSaver(path, keep_last=1) as saver:
        script.train(N_SAVED - 1)
        saver.save(script.pm, script.optimizer, step=N_SAVED - 1, states=script.states)
        script.train(1)
        saver.save(script.pm, script.optimizer, step=N_SAVED, states=script.states)
        straight = script.train(N_STEPS - N_SAVED)
    again = Script(1, after)
    step, _ = autopar.load(again.pm, again.optimizer, path, states=again.states)
    return [straight, again.train(N_STEPS - step), step]


@one_in(3)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_bits(layout: str, workers: Pool, tmp_path: Path) -> None:
    job = workers(2).run(stop_and_resume, str(tmp_path), LAYOUTS[layout], LAYOUTS[layout])
    for straight, resumed, step in job:
        assert step == N_SAVED
        assert resumed == straight


@pytest.mark.parametrize(("before", "after"), [("tp", "zero-3"), ("zero-3", "pp"), ("pp", "tp")])
def test_onto_another_plan(before: str, after: str, workers: Pool, tmp_path: Path) -> None:
    job = workers(2).run(stop_and_resume, str(tmp_path / "c"), LAYOUTS[before], LAYOUTS[after])
    for straight, resumed, _ in job:
        torch.testing.assert_close(resumed, straight, rtol=1e-5, atol=0)
