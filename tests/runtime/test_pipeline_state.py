"""State of GPT-2 in pipeline stages; its head is tied to the embedding of another stage.

Losses, norms and values are compared in float64 with one process that trains without interruption.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import autopar
from autopar.runtime.launch import WorkerPool
from tests.helpers.jobs import CASES, adamw, error, machine
from tests.helpers.nightly import nightly

Pools = Callable[[int], WorkerPool]
TOLERANCE = 1e-12
N_BEFORE, N_AFTER = 2, 2
HEAD, EMBEDDING = "lm_head.weight", "transformer.wte.weight"


class Layout(NamedTuple):
    """A mesh, the submeshes of its two stages, and the blocks (of two) on the first stage."""

    mesh: tuple[int, ...]
    submeshes: tuple[tuple[int, ...], ...] = ()
    blocks_on_first: int = 1

    @property
    def options(self) -> dict[str, Any]:
        if not self.submeshes:
            return {"precision": "fp64", "stages": 1}
        parts = ["wte", "wpe", "h.0", "h.1", "ln_f"]
        names = [f"transformer.{part}" for part in parts]
        cut = 2 + self.blocks_on_first
        modules = [names[:cut], [*names[cut:], "lm_head"]]
        stages = list(zip(modules, self.submeshes, strict=True))
        return {"precision": "fp64", "stages": stages, "microbatches": 2}

    def module(self) -> autopar.ParallelModule:
        case = CASES["gpt2"]
        return autopar.parallelize(
            case.model(), machine(self.mesh), case.batch(0), **self.options
        )


ALONE = Layout((1, 1))
ONE_STAGE = Layout((1, 2))
TWO_STAGES = Layout((2, 1), ((1, 1), (1, 1)))
OTHER_CUT = Layout((2, 2), ((1, 2), (1, 2)), blocks_on_first=2)
UNEQUAL = Layout((1, 4), ((1, 1), (1, 3)))


class Trained(NamedTuple):
    losses: list[float]
    norms: list[float]
    values: dict[str, Tensor]


def train(
    layout: Layout, first: int, n_steps: int, load: str | None = None, save: str | None = None
) -> Trained:
    """Train `n_steps` from step `first`; load a checkpoint before, save one after, if given."""
    module = layout.module()
    optimizer = adamw(module.parameters())
    if load is not None:
        assert autopar.load(module, optimizer, load) == (first, {"seen": first})
    losses, norms = [], []
    for step in range(first, first + n_steps):
        losses.append(module.step(**CASES["gpt2"].batch(step)).item())
        norms.append(module.clip_grad_norm_(0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    if save is not None:
        autopar.save(module, optimizer, save, first + n_steps, {"seen": first + n_steps})
    check_mirror(module)
    return Trained(losses, norms, module.full_state_dict())


def check_mirror(module: autopar.ParallelModule) -> None:
    """The head equals rank 0's embedding, if it is a parameter of its own on this rank."""
    if not dist.is_initialized():
        return
    whole = module.full_state_dict()
    held: list[Any] = [whole.get(EMBEDDING)]
    dist.broadcast_object_list(held, src=0)
    head = module.state_dict().get(HEAD)
    if head is not None and EMBEDDING not in dict(module.named_parameters()):
        assert torch.equal(head.full_tensor(), held[0])


def run(
    pools: Pools, layout: Layout, first: int, load: str | None, save: str | None = None
) -> list[Trained]:
    """`train` for a fixed number of steps on the ranks of a layout."""
    n_steps = N_AFTER if load else N_BEFORE
    n_ranks = machine(layout.mesh).n_ranks
    if n_ranks == 1:
        return [train(layout, first, n_steps, load, save)]
    found: list[Trained] = pools(n_ranks).run(train, layout, first, n_steps, load, save)
    return found


@pytest.fixture(scope="module")
def truth() -> tuple[Trained, Trained]:
    """One process: after the first steps, and after all."""
    return train(ALONE, 0, N_BEFORE), train(ALONE, 0, N_BEFORE + N_AFTER)


def check(found: list[Trained], wanted: Trained, first: int) -> None:
    n_steps = len(found[0].losses)
    steps = slice(first, first + n_steps)
    for rank in found:
        for ours, right in ((rank.losses, wanted.losses), (rank.norms, wanted.norms)):
            assert error(torch.tensor(ours), torch.tensor(right[steps])) <= TOLERANCE
        assert rank.norms == found[0].norms
    assert found[0].values.keys() == wanted.values.keys()
    for name, value in wanted.values.items():
        assert error(found[0].values[name], value) <= TOLERANCE, name
    assert not any(rank.values for rank in found[1:])


@pytest.mark.parametrize(
    ("saved_on", "loaded_on"),
    [
        (TWO_STAGES, (UNEQUAL,)),
        pytest.param(TWO_STAGES, (ALONE, ONE_STAGE, OTHER_CUT), marks=nightly),
        pytest.param(UNEQUAL, (TWO_STAGES,), marks=nightly),
        pytest.param(ONE_STAGE, (TWO_STAGES,), marks=nightly),
    ],
    ids=("stages", "other meshes", "unequal stages", "one stage"),
)
def test_training_goes_on_in_another_layout(
    workers: Pools,
    truth: tuple[Trained, Trained],
    tmp_path: Path,
    saved_on: Layout,
    loaded_on: tuple[Layout, ...],
) -> None:
    path = str(tmp_path / "checkpoint")
    check(run(workers, saved_on, 0, None, path), truth[0], 0)
    for layout in loaded_on:
        check(run(workers, layout, N_BEFORE, path), truth[1], N_BEFORE)
