"""Loss scaling as `GradScaler`'s; what is not finite is skipped on all ranks, or refused."""

from __future__ import annotations

import copy
import itertools
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call

import autopar
from autopar import Manual, NonFiniteError, ParallelModule
from autopar.runtime.state import LossScale, LossScaler
from autopar.runtime.state.loss_scale import FIRST, INTERVAL
from tests.helpers.jobs import Case, MlpWithLoss, advance, machine, rank, rows
from tests.helpers.nightly import nightly, one_in, sampled
from tests.helpers.pools import Pool

LAYOUTS = {"tp": Manual(tp=2), "zero-3": Manual(dp=2, zero=3), "stages": Manual(pp=2)}


class Steep(nn.Module):
    """Its gradients are about 1 where those of its float16 activations pass 65504 / scale."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x))).float().square().mean()


def of_steep(seed: int) -> Tensor:
    return 4 * torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))


def test_steps_are_those_of_grad_scaler() -> None:
    """The first scales overflow; every weight and scale after is that of torch's `GradScaler`."""
    pm = autopar.parallelize(
        Steep(), (1, 1), {"x": of_steep(0)}, precision="fp16-mixed", microbatches=1
    )
    alone, scaler = Steep(), torch.amp.GradScaler("cpu")
    mine = torch.optim.AdamW(pm.parameters(), lr=1e-2)
    theirs = torch.optim.AdamW(alone.parameters(), lr=1e-2)
    n_skipped = 0
    for seed in range(12):
        loss = pm.step(x=of_steep(seed))
        used = {name: p.half() for name, p in alone.named_parameters()}
        expected = functional_call(alone, used, (of_steep(seed).half(),))
        scaler.scale(expected).backward()
        mine.step()
        before = scaler.get_scale()
        scaler.step(theirs)
        scaler.update()
        n_skipped += scaler.get_scale() < before
        assert torch.equal(loss, expected)
        assert pm.loss_scale is not None
        assert (pm.loss_scale.value, pm.loss_scale.n_skipped) == (scaler.get_scale(), n_skipped)
        mine.zero_grad()
        theirs.zero_grad()
    assert 0 < n_skipped < 12
    for name, value in pm.full_state_dict().items():
        assert torch.equal(value, alone.state_dict()[name]), name


class Calm(MlpWithLoss):
    """The loss is float32, so that gradients are finite at the first scale."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.net(x).float() - y).square().mean()


CASE = Case(Calm, lambda seed: rows(seed, "x", "y"))


def module(layout: Manual) -> ParallelModule:
    """A model in float16, for the job's ranks."""
    mesh = machine((1, dist.get_world_size()))
    return autopar.parallelize(
        CASE.model(), mesh, CASE.batch(0), precision="fp16-mixed", manual=layout
    )


def adamw(pm: ParallelModule) -> torch.optim.Optimizer:
    return torch.optim.AdamW(pm.parameters(), lr=1e-2)


def scale_of(pm: ParallelModule) -> LossScale:
    assert pm.loss_scale is not None
    return pm.loss_scale


def overflow(pm: ParallelModule, rank: int) -> None:
    """In the next step, one element of a gradient is not finite, on this rank alone."""
    scaler = pm._state.scaler
    assert scaler is not None
    after = scaler.after

    def spoilt(leaves: Any, loss: Tensor) -> None:
        if dist.get_rank() == rank:
            leaf = [leaf for leaf in leaves.values() if leaf.grad is not None][-1]
            leaf.grad.view(-1)[-1] = torch.inf
        after(leaves, loss)
        scaler.after = after  # type: ignore[method-assign]

    scaler.after = spoilt  # type: ignore[method-assign]


def weights(pm: ParallelModule) -> dict[str, Tensor]:
    return {name: shard.detach().clone() for name, shard in pm.shards.items()}


def skipped(layout: Manual, rank: int, how: str) -> LossScale:
    """Three steps; the second overflows on one rank, and changes nothing on any."""
    pm = module(layout)
    optimizer = adamw(pm)
    for seed in range(3):
        is_spoilt = seed == 1
        before = weights(pm)
        if is_spoilt:
            overflow(pm, rank)
        pm.step(**CASE.batch(seed), weight=0.5 if how == "accumulated" else 1.0)
        if how == "accumulated":  # the second is finite
            pm.step(**CASE.batch(seed + 10), weight=0.5)
        if how == "clipped":
            assert bool(pm.clip_grad_norm_(1.0).isfinite()) != is_spoilt
        optimizer.step()
        for name, shard in pm.shards.items():
            assert torch.equal(shard, before[name]) == is_spoilt, name
        optimizer.zero_grad()
    steps = {int(s["step"]) for s in optimizer.state.values()}
    assert steps == {2}
    return scale_of(pm)


@one_in(3)
@pytest.mark.parametrize(
    ("layout", "rank", "how"),
    sampled(
        [*itertools.product(LAYOUTS, (0, 1), ("plain", "clipped", "accumulated"))],
        [
            ("tp", 1, "clipped"),
            ("zero-3", 0, "plain"),
            ("zero-3", 1, "accumulated"),
            ("stages", 0, "clipped"),
            ("stages", 1, "plain"),
        ],
    ),
)
def test_an_overflow_on_one_rank_skips_on_all(
    layout: str, rank: int, how: str, workers: Pool
) -> None:
    found = workers(2).run(skipped, LAYOUTS[layout], rank, how)
    assert found == [LossScale(FIRST / 2, n_kept=1, n_skipped=1)] * 2


def resumed(layout: Manual, path: str) -> None:
    """A step that overflows, a checkpoint, two steps more: by this module, and by another."""
    pm = module(layout)
    optimizer = adamw(pm)
    for seed in range(2):
        if seed == 1:
            overflow(pm, 0)
        pm.step(**CASE.batch(seed))
        advance(optimizer)
    autopar.save(pm, optimizer, path)
    other = module(layout)
    again = adamw(other)
    autopar.load(other, again, path)
    assert scale_of(other) == LossScale(FIRST / 2, n_kept=0, n_skipped=1)
    for seed in range(2, 4):
        for one, its in ((pm, optimizer), (other, again)):
            if seed == 2:
                overflow(one, 1)
            one.step(**CASE.batch(seed))
            advance(its)
    assert scale_of(other) == scale_of(pm) == LossScale(FIRST / 4, n_kept=1, n_skipped=2)
    for name, shard in weights(other).items():
        assert torch.equal(shard, pm.shards[name]), name


@pytest.mark.parametrize(
    "layout", ["stages", *(pytest.param(layout, marks=nightly) for layout in ("tp", "zero-3"))]
)
def test_resumes_bitwise(layout: str, workers: Pool, tmp_path: Path) -> None:
    workers(2).run(resumed, LAYOUTS[layout], str(tmp_path / "checkpoint"))


def test_the_scale_grows_after_many_steps() -> None:
    scaler = LossScaler(None, torch.device("cpu"), lambda: None, LossScale(8.0, INTERVAL - 2))
    leaf = torch.ones(3, requires_grad=True)
    for _ in range(2):
        scaler.before({"w": leaf})
        (leaf.sum() * scaler.scale.value).backward()
        scaler.after({"w": leaf}, leaf.sum())
        assert leaf.grad is not None and (leaf.grad % 1 == 0).all()
        assert scaler.decide() and scaler.decide()  # once a step
    assert scaler.scale == LossScale(16.0, n_kept=0, n_skipped=0)
    assert leaf.grad is not None
    assert torch.equal(leaf.grad, torch.full((3,), 2.0))  # accumulated, unscaled


def test_a_copy_has_a_scale_of_its_own() -> None:
    pm = autopar.parallelize(
        Steep(), (1, 1), {"x": of_steep(0)}, precision="fp16-mixed", microbatches=1
    )
    twin = copy.deepcopy(pm)
    pm.step(x=of_steep(0))
    adamw(pm).step()
    assert scale_of(pm) != scale_of(twin) == LossScale()
    twin.step(x=of_steep(0))
    adamw(twin).step()
    assert scale_of(pm) == scale_of(twin)


MESH = machine((1, 2))
PLANS = {"dp": Manual(dp=2), "zero3": Manual(dp=2, zero=3), "tp": Manual(tp=2), "pp": Manual(pp=2)}


class Normed(nn.Module):
    """A batch norm, whose buffers a bad batch would ruin."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 1)

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        found = self.down(torch.relu(self.up(self.norm(x)))).squeeze(1)
        return ((found - labels) ** 2).mean()


def good(seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(8, 8, generator=generator),
        "labels": torch.randn(8, generator=generator),
    }


def bad(value: float = torch.nan) -> dict[str, Any]:
    batch = good(9)
    batch["x"][3, 2] = value
    return batch


def made(plan: str) -> tuple[autopar.ParallelModule, torch.optim.Optimizer]:
    torch.manual_seed(0)
    module = autopar.parallelize(Normed(), MESH, good(), manual=PLANS[plan], precision="fp64")
    return module, torch.optim.AdamW(module.parameters(), lr=1e-2)


def held(module: autopar.ParallelModule) -> dict[str, Any]:
    shards = {name: shard.tolist() for name, shard in module.shards.items()}
    return shards | {name: buffer.tolist() for name, buffer in module.named_buffers()}


def refused(plan: str) -> tuple[str, bool]:
    module, optimizer = made(plan)
    module.step(**good())
    advance(optimizer)
    before = {name: shard.tolist() for name, shard in module.shards.items()}
    assert module.step(**bad()).isnan()
    with pytest.raises(NonFiniteError) as refusal:
        optimizer.step()
    unchanged = before == {name: shard.tolist() for name, shard in module.shards.items()}
    optimizer.zero_grad()  # goes on, as the message says
    module.step(**good(), skip_nonfinite=False)
    optimizer.step()
    return str(refusal.value), unchanged


@pytest.mark.parametrize("plan", PLANS)
def test_an_optimizer_does_not_take_nan(plan: str, workers: Pool) -> None:
    for message, unchanged in workers(2).run(refused, plan):
        assert message.startswith("the loss of step 2 is nan. Not finite are\n  gradients on rank")
        assert "skip_nonfinite=True" in message and "no parameter has changed" in message
        assert unchanged


def handled_by_the_user() -> list[float]:
    """A script that looks at the loss itself."""
    module, optimizer = made("dp")
    losses = []
    for batch in (good(), bad(), good(1)):
        loss = module.step(**batch, skip_nonfinite=None)
        if loss.isfinite():
            optimizer.step()
            losses.append(loss.item())
        optimizer.zero_grad()
    return losses


def test_a_script_may_drop_the_gradients_itself(workers: Pool) -> None:
    for losses in workers(2).run(handled_by_the_user):
        assert len(losses) == 2 and all(map(math.isfinite, losses))


def trained(plan: str, with_bad: bool) -> dict[str, Any]:
    """What a rank holds after three good steps, and a bad one in between or not."""
    module, optimizer = made(plan)
    for n in range(3):
        module.step(**good(n), skip_nonfinite=True)
        if with_bad:
            module.step(**bad(torch.inf), skip_nonfinite=True)
        advance(optimizer)
    return held(module)


def with_and_without(plan: str) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        found = trained(plan, with_bad=True)
    told = [str(w.message) for w in seen if "is skipped" in str(w.message)]
    return found, trained(plan, with_bad=False), told


@pytest.mark.parametrize("plan", PLANS)
def test_a_skipped_step_changes_nothing(plan: str, workers: Pool) -> None:
    """Neither earlier gradients nor buffers; bitwise, on every rank."""
    of_ranks = workers(2).run(with_and_without, plan)
    for n, (found, wanted, told) in enumerate(of_ranks):
        assert found == wanted
        assert len(told) == (3 if n == 0 else 0)
    assert "step 2 is skipped: the loss is nan" in of_ranks[0][2][0]


def bad_gradient_alone() -> tuple[str, float]:
    """A finite loss of NaN gradients, on the rank of the first stage alone: seen one step later."""
    module, optimizer = made("pp")
    module.step(**good())
    if rank() == 0:
        next(iter(module.shards.values())).grad.fill_(torch.nan)  # type: ignore[union-attr]
    advance(optimizer)
    module.step(**good())
    with pytest.raises(NonFiniteError) as refusal:
        optimizer.step()
    return str(refusal.value), module.clip_grad_norm_(1.0).item()


def test_parameters_that_are_ruined_are_named(workers: Pool) -> None:
    for message, norm in workers(2).run(bad_gradient_alone):
        assert "parameters on rank 0: `norm." in message and "load the last checkpoint" in message
        assert norm != norm
