"""State of padded parameters: padding is zeros and never leaves; also on processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import autopar
from autopar import Manual
from autopar.placement import I, S, Spec
from autopar.program.lines import StoredParameter
from autopar.runtime.launch import ThreadWorld, run_threads
from autopar.runtime.state.dtensors import dtensor_of
from autopar.runtime.tensors import boxes, gather_whole, local_shard
from tests.helpers.harness import generated_code  # noqa: F401
from tests.helpers.jobs import adamw, advance, error, machine
from tests.helpers.machines import mesh_of
from tests.helpers.models.padding_models import (
    TOLERANCE,
    WIDTH,
    Pool,
    SoftmaxWhenEvaluated,
    batch,
)
from tests.helpers.nightly import nightly
from tests.helpers.state_model import stored

EMBEDDING = "embed.weight"


def kept(spec: Spec, sizes: tuple[int, ...], size: int = 61, padded: int = 64) -> StoredParameter:
    return replace(stored("p", ((padded,), (3,)), spec, sizes, torch.float64), shape=(size, 3))


def counting(size: int) -> Tensor:
    return torch.arange(1.0, 3 * size + 1, dtype=torch.float64).view(size, 3)


CUT: dict[str, tuple[tuple[int, ...], StoredParameter]] = {
    "over one axis": ((2,), kept(Spec((S(0),)), (2,), padded=62)),
    "over one of two": ((1, 2), kept(Spec((I, S(0))), (1, 2), padded=62)),
    "padded for more ranks": ((2,), kept(Spec((S(0),)), (2,), padded=64)),
    "over two axes": ((2, 2), kept(Spec((S(0), S(0))), (2, 2))),
    "in another order": ((2, 2), kept(Spec.of((S(0), S(0)), (1, 0)), (2, 2))),
    "along the other dim": ((3,), kept(Spec((S(1),)), (3,))),
    "not at all": ((2,), kept(Spec((I,)), (2,))),
    "ranks without any": ((4,), kept(Spec((S(0),)), (4,), size=5, padded=8)),
    "one without any": ((2,), kept(Spec((S(0),)), (2,), size=1, padded=2)),
}


@pytest.mark.parametrize("case", CUT)
def test_padding_comes_in_as_zeros_and_never_leaves(case: str) -> None:
    sizes, p = CUT[case]
    whole = counting(p.shape[0])

    def work(world: ThreadWorld) -> None:
        mesh = mesh_of(*sizes)
        at = mesh.coordinate(world.rank)
        local = local_shard(whole, p, sizes, at)
        assert local.shape == p.stored.shape
        assert local.is_contiguous()
        filled = torch.zeros_like(local)
        for box in boxes(p, sizes, at):
            filled[box.of_shard] = whole[box.of_whole]
        assert torch.equal(filled, local)
        back = gather_whole(local + (local == 0) * 9, p, sizes, world.make_groups(mesh))
        assert torch.equal(back, whole)
        assert back.untyped_storage().nbytes() == whole.untyped_storage().nbytes()

    run_threads(work, mesh_of(*sizes).n_ranks)


def export() -> dict[str, tuple[bool, bool]]:
    """Case -> (is the DTensor right?, does it share the shard's memory?)."""
    found = {}
    for case, (sizes, p) in CUT.items():
        if mesh_of(*sizes).n_ranks == 2:
            mesh, whole = init_device_mesh("cpu", sizes), counting(p.shape[0])
            local = local_shard(whole, p, sizes, mesh.get_coordinate() or ())
            made = dtensor_of(p, local, mesh)
            part, is_right = made.to_local(), torch.equal(made.full_tensor(), whole)
            found[case] = is_right, not part.numel() or part.data_ptr() == local.data_ptr()
    return found


def test_dtensors_are_uneven(workers: Pool) -> None:
    """DTensors share memory if shards are cut as by `torch.chunk`; otherwise they are copies."""
    for found in workers(2).run(export):
        assert all(is_right for is_right, _ in found.values()), found
        copied = [case for case, (_, shares) in found.items() if not shares]
        assert copied == ["padded for more ranks"]


def model() -> nn.Module:
    """Training pads its classes; evaluation takes their softmax."""
    torch.manual_seed(0)
    return SoftmaxWhenEvaluated()


def drawn(step: int = 0) -> dict[str, Any]:
    return batch(SoftmaxWhenEvaluated, step)


def trained(folder: str, manual: Manual, first: str | None, last: str | None) -> dict[str, Any]:
    """Load `first`, train two steps, save `last`; evaluate if nothing is saved."""
    module = autopar.parallelize(
        model(), machine((1, 2)), drawn(), precision="fp64", microbatches=2, manual=manual
    )
    optimizer = adamw(module.parameters())
    if first is not None:
        autopar.load(module, optimizer, f"{folder}/{first}")
    losses = []
    for step in range(2):
        losses.append(module.step(**drawn(step)).item())
        norm = module.clip_grad_norm_(1e3)
        advance(optimizer)
    if last is not None:
        autopar.save(module, optimizer, f"{folder}/{last}")
    whole = module.full_state_dict()
    module.load_state_dict(whole)
    held = {n: v.full_tensor() for n, v in module.state_dict().items() if isinstance(v, DTensor)}
    local = module.shards[EMBEDDING].detach().clone()
    found = {"losses": losses, "norm": norm, "whole": whole, "held": held, "local": local}
    if last is None:
        module.eval()
        found["logits"] = module(**drawn())["logits"]
    return found | {"padded": module.plan.data.padded}


@lru_cache
def alone(n_steps: int) -> dict[str, Any]:
    """`n_steps` of the model on one process; `losses` are those of the last two."""
    net = model().double()
    optimizer, losses = adamw(net.parameters()), []
    for step in range(n_steps):
        loss = net(**drawn(step % 2))["loss"]
        loss.backward()
        losses.append(loss.item())
        norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 1e3)
        advance(optimizer)
    net.eval()
    logits = net(**drawn())["logits"].detach()
    return {"losses": losses[-2:], "norm": norm, "whole": net.state_dict(), "logits": logits}


def off(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """What differs from one process, in shape or value."""
    compared = [name for name in ("norm", "logits") if name in found]
    pairs = {name: (found[name], wanted[name]) for name in compared}
    pairs["losses"] = torch.tensor(found["losses"]), torch.tensor(wanted["losses"])
    for kind in ("whole", "held"):
        for name, value in found[kind].items():
            pairs[f"{kind} {name}"] = value, wanted["whole"][name]
    return [n for n, (a, b) in pairs.items() if a.shape != b.shape or not error(a, b) <= TOLERANCE]


@pytest.mark.parametrize(
    "manual", [Manual(tp=2), pytest.param(Manual(dp=2, zero=3), marks=nightly)]
)
def test_training_and_checkpoints_on_processes(
    manual: Manual, workers: Pool, tmp_path: Path
) -> None:
    """Saved by a plan that pads, read by one that shards no parameter, then by one that pads."""
    folder = str(tmp_path)
    first = workers(2).run(trained, folder, manual, None, "a")
    second = workers(2).run(trained, folder, Manual(dp=2), "a", "b")
    third = workers(2).run(trained, folder, manual, "b", None)
    padded = {EMBEDDING: (62, WIDTH)}
    assert [results[0]["padded"] for results in (first, second, third)] == [padded, {}, padded]
    for results in (first, third):
        assert [r["local"].shape for r in results] == [(31, WIDTH)] * 2
        assert not results[1]["local"][30].any()
    assert all("logits" in found for found in third)
    for n_steps, results in ((2, first), (4, second), (6, third)):
        assert set(results[0]["whole"]) == set(alone(n_steps)["whole"])
        assert [off(found, alone(n_steps)) for found in results] == [[], []]
