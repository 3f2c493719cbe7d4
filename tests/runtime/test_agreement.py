"""Ranks that are set up, trained or changed differently, or absent: refused by name, on all."""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar
from autopar import AbsentRanksError, BatchError, CaptureError, DivergenceError, Manual
from autopar.module import job
from autopar.runtime.groups import rendezvous, together_in
from tests.helpers.jobs import Batch, machine, rank
from tests.helpers.models.tiny_model import Tiny, batch
from tests.helpers.nightly import nightly
from tests.helpers.pools import Pool

MESH = machine((1, 2))
PLANS = {"dp": Manual(dp=2), "tp": Manual(tp=2), "pp": Manual(pp=2)}


class Drawn(nn.Module):
    """Constants drawn at random: a buffer, one that is not saved, and a tensor attribute."""

    offset: Tensor
    gain: Tensor

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = Tiny()
        torch.manual_seed(seed)
        self.register_buffer("offset", torch.randn(8))
        self.register_buffer("gain", torch.randn(8), persistent=False)
        self.shift = torch.randn(8)

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        return self.inner((x + self.offset) * self.gain + self.shift, labels)


# name -> (keyword arguments of this rank, what the error says)
SETTINGS: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "an option": (
        lambda: {"manual": Manual(tp=2), "recompute": "full" if rank() else "none"},
        r"recompute: 'full' on rank 1, 'none' on rank 0",
    ),
    "another recipe": (
        lambda: {"manual": Manual(dp=2) if rank() else Manual(tp=2)},
        r"manual: Manual\(dp=2.* on rank 1, Manual\(dp=1, tp=2",
    ),
    "where weights come from": (
        lambda: {"weights": "init" if rank() else "rank0"}, "weights: init on rank 1, rank0 on",
    ),
    "no batch": (
        lambda: {} if rank() else {"example_inputs": batch()},
        "called with: neither on rank 1, example_inputs on rank 0",
    ),
    "a loss function": (
        lambda: {"loss_fn": sum if rank() else max}, r"loss_fn: builtins.sum on rank 1",
    ),
}  # fmt: skip


def other_settings(name: str) -> str:
    given = SETTINGS[name][0]()
    if "example_inputs" not in given and name != "no batch":
        given["example_inputs"] = batch()
    with pytest.raises(DivergenceError) as refusal:
        autopar.parallelize(Tiny(), MESH, **given)
    return str(refusal.value)


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_that_differ_are_named(name: str, workers: Pool) -> None:
    for message in workers(2).run(other_settings, name):
        assert re.search(SETTINGS[name][1], message), message


def progress_of_rank_0() -> None:
    torch.manual_seed(0)
    autopar.parallelize(Tiny(), MESH, batch(), manual=Manual(tp=2), progress=rank() == 0)


def test_a_rank_may_show_progress_alone(workers: Pool) -> None:
    workers(2).run(progress_of_rank_0)


def losses_of(seed: int, plan: str, folder: str) -> list[Any]:
    module = autopar.parallelize(Drawn(seed), MESH, batch(), manual=PLANS[plan], precision="fp64")
    found = [module.step(**batch()).item()]
    found.append(module.step(**batch(0, 16)).item())  # another shape: captured again
    module.eval()
    found.append(module.loss(**batch()).item())
    autopar.save(module, None, folder, step=1)
    assert autopar.load(module, None, folder)[0] == 1  # it compares the buffers
    return [*found, module.offset.tolist()]


@pytest.mark.parametrize(
    "plan", ["tp", *(pytest.param(plan, marks=nightly) for plan in ("dp", "pp"))]
)
def test_constants_are_those_of_rank_0(plan: str, workers: Pool, tmp_path: Path) -> None:
    """Buffers and tensor attributes that were drawn by each rank, beside equal ones."""
    folder = str(tmp_path / "c")
    drawn = workers(2).run(constants_drawn, plan, folder)
    assert drawn == workers(2).run(losses_of, 0, plan, folder)


def constants_drawn(plan: str, folder: str) -> list[Any]:
    return losses_of(rank(), plan, folder)


def other_constants() -> str:
    torch.manual_seed(0)
    with torch.device("meta"):
        model: nn.Module = Drawn(0)
    model.offset = torch.full((8,), float(rank()))
    model.gain, model.shift = torch.ones(8), torch.ones(8)
    with pytest.raises(DivergenceError) as refusal:
        autopar.parallelize(model, MESH, batch(), manual=Manual(tp=2), weights="init")
    return str(refusal.value)


def test_constants_that_nobody_broadcasts_are_refused(workers: Pool) -> None:
    for message in workers(2).run(other_constants):
        assert re.search(r"offset`: float32 \(8,\) [0-9a-f]{16} on rank 1, float32", message)


def drifting_rate(plan: str, check_every: int) -> tuple[int, str]:
    """(optimizer steps before the refusal, what it says): the rate differs from step 5 on."""
    torch.manual_seed(0)
    module = autopar.parallelize(Tiny(), MESH, batch(), manual=PLANS[plan], check_every=check_every)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    for n in range(2 * check_every):
        module.step(**batch())
        optimizer.param_groups[0]["lr"] = 1e-3 * (1 + rank() * (n >= 4))
        try:
            optimizer.step()
        except DivergenceError as error:
            return n, str(error)
        optimizer.zero_grad()
    return -1, ""


def test_learning_rates_that_drift_are_named(workers: Pool) -> None:
    for n, message in workers(2).run(drifting_rate, "dp", 8):
        assert n == 7
        assert "lr of group 0: 0.002 on rank 1, 0.001 on rank 0" in message


def test_stages_may_have_rates_of_their_own(workers: Pool) -> None:
    """Layer-wise rates: a stage has the parameters of its layers."""
    assert workers(2).run(drifting_rate, "pp", 8) == [(-1, "")] * 2


def drifting_batches(check_every: int | None, first: int) -> tuple[int, str]:
    """(steps before the refusal, what it says): batches differ from step `first` on."""
    torch.manual_seed(0)
    module = autopar.parallelize(
        Tiny(), MESH, batch(), manual=Manual(tp=2), check_every=check_every
    )
    for n in range(12):
        try:
            module.step(**batch(rank() if n >= first else 0))
        except BatchError as error:
            return n, str(error)
    return -1, ""


def test_batches_that_drift_are_found_at_every_nth_step(workers: Pool) -> None:
    """The first three are compared anyway."""
    for check_every, first, wanted in ((6, 4, 5), (None, 2, 2)):
        for n, message in workers(2).run(drifting_batches, check_every, first):
            assert n == wanted and "`x` on rank 1 is not rank 0's" in message
    assert workers(2).run(drifting_batches, None, 3) == [(-1, "")] * 2


CALLS: dict[str, Callable[[autopar.ParallelModule, str], object]] = {
    "pm.full_state_dict()": lambda pm, _: pm.full_state_dict(),
    "pm.full_gradients()": lambda pm, _: pm.full_gradients(),
    "pm.load_state_dict(...)": lambda pm, _: pm.load_state_dict({}),
    "autopar.save(...)": lambda pm, path: autopar.save(pm, None, path),
    "autopar.load(...)": lambda pm, path: autopar.load(pm, None, path),
    "autopar.export_weights(...)": lambda pm, path: autopar.export_weights(pm, f"{path}-out"),
    "AsyncSaver.save(...)": lambda pm, path: autopar.AsyncSaver(path).save(pm, None, step=1),
}


def on_one_rank(name: str, path: str) -> tuple[str, set[str]]:
    """What rank 0 is told; then all ranks call it, as if nothing had happened."""
    module = autopar.parallelize(Tiny(), machine((1, 2)), batch(), manual=Manual(tp=2))
    module.step(**batch())
    message = ""
    if rank() == 0:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(rendezvous.TIMEOUT, "0.2")
            with pytest.raises(AbsentRanksError) as refusal:
                CALLS[name](module, path)
        message = str(refusal.value)
    dist.barrier()
    autopar.save(module, None, path)
    autopar.load(module, None, path)
    return message, {*module.full_state_dict(), *module.full_gradients()}


@pytest.mark.parametrize("name", CALLS)
def test_the_absent_rank_is_named(name: str, workers: Pool, tmp_path: Path) -> None:
    (message, names), (other, none) = workers(2).run(on_one_rank, name, str(tmp_path / "c"))
    assert message.startswith(f"{name}: rank 1 of 2 ranks did not call it within 0.2 s")
    assert "every rank must call it: take `if rank == 0` away" in message
    assert rendezvous.TIMEOUT in message
    assert (other, none) == ("", set())
    assert names == {"up.weight", "up.bias", "down.weight", "down.bias"}


def called(what: str) -> None:
    with together_in(what):
        pass


def other_calls() -> str:
    with pytest.raises(AbsentRanksError) as refusal:
        called("this" if rank() == 0 else "that")
    called("both")
    return str(refusal.value).splitlines()[0]


def test_other_calls_are_named(workers: Pool) -> None:
    assert workers(2).run(other_calls) == [
        "this: rank 1 called that instead", "that: rank 0 called this instead",
    ]  # fmt: skip


def late() -> int:
    """Rank 1 comes later. Meetings leave nothing in the store but the last."""
    store = dist.distributed_c10d._get_default_store()
    for k in range(4):
        time.sleep(0.1 * rank())
        called("here")
        dist.barrier()
        if k == 1:
            before = store.num_keys()
        dist.barrier()  # nobody meets while another one counts
    return store.num_keys() - before


def test_late_ranks_are_waited_for(workers: Pool) -> None:
    assert workers(2).run(late) == [0, 0]


VALUES = (0.5, 0.25, 0.5, 0.125)
SCALE = {"loss": 1.0}


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 8)
        self.outer = nn.Linear(8, 4)
        self.beta = VALUES[0]

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.inner(x).relu() * self.beta)


def squares(out: Tensor, batch: Any) -> Tensor:
    return out.pow(2).sum() * SCALE["loss"]


def inputs() -> Batch:
    return {"x": torch.randn(8, 4, generator=torch.Generator().manual_seed(1)).double()}


def made() -> Scaled:
    torch.manual_seed(0)
    return Scaled().double()


def ready(manual: Manual) -> tuple[Scaled, autopar.ParallelModule]:
    model = made()
    return model, autopar.parallelize(
        model, machine((1, 2)), inputs(), loss_fn=squares, manual=manual, microbatches=1
    )


def differing() -> str:
    model, module = ready(Manual(dp=2))
    model.beta = 0.25 + dist.get_rank()
    with warnings.catch_warnings(record=True) as notices:
        warnings.simplefilter("always")
        with pytest.raises(CaptureError) as caught:
            module.step(**inputs())
    assert len([w for w in notices if "captured again" in str(w.message)]) == 1 - dist.get_rank()
    return str(caught.value)


def test_ranks_that_change_to_other_values_are_refused(workers: Pool) -> None:
    messages = workers(2).run(differing)
    assert "differs between ranks: 0.25 on rank 0, 1.25 on rank 1" in messages[0]
    assert "differs between ranks: 1.25 on rank 1, 0.25 on rank 0" in messages[1]


def alone(what: str) -> str:
    """Rank 0 sees a change; rank 1 would wait in the collectives of its step."""
    model, module = ready(Manual(dp=2))
    for _ in range(3):  # which compare the batch between ranks
        module.step(**inputs())
    if dist.get_rank() == 1:
        return ""
    given = inputs()
    if what == "shape":
        given = {"x": given["x"].repeat(2, 1)}
    else:
        model.beta = 0.25
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        patch.setattr(job, "AGREE_TIMEOUT_S", 1.0)
        warnings.simplefilter("ignore")
        with pytest.raises(CaptureError) as caught:
            module.step(**given)
    return str(caught.value)


@pytest.mark.parametrize("what", ["a change of `beta` of the model", "a new shape of"])
def test_a_change_on_one_rank_alone_is_refused(what: str, workers: Pool) -> None:
    message = workers(2).run(alone, what.split()[2])[0]
    assert f"rank 0 sees {what}" in message and "rank 1 does not" in message
    assert "hint: " in message
