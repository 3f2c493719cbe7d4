"""The global norm: replicated shards and tied parameters count once, as in one process."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.errors import OptionError
from autopar.runtime.sharding import local_shard
from autopar.runtime.state import clip_grad_norm_
from autopar.runtime.threads import ThreadWorld, run_threads
from autopar.runtime.weights import initial_shards
from tests.state_model import gradient, mesh_of, plan, seeded_model

CPU = torch.device("cpu")


def clip(sizes: tuple[int, ...], groups: Any, rank: int, norm_type: float) -> list[Tensor]:
    at, parameters = mesh_of(sizes).coordinate(rank), plan(sizes)
    locals_ = initial_shards(parameters, "rank0", seeded_model(), sizes, at, CPU)
    for p in parameters:
        if p.requires_grad and p.name != "qkv.bias":  # one without gradient
            locals_[p.name].grad = local_shard(gradient(p.name, p.shape, 0), p, sizes, at)
    norm = clip_grad_norm_(parameters, locals_, 0.7, at, groups, norm_type)
    kept = [locals_[p.name].grad for p in parameters]
    return [norm, *(g for g in kept if g is not None)]


@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
@pytest.mark.parametrize("sizes", [(1, 1), (1, 2), (2, 2), (4,)], ids=str)
def test_clipping(sizes: tuple[int, ...], norm_type: float) -> None:
    mesh, model, parameters = mesh_of(sizes), seeded_model(), plan(sizes)
    values = dict(model.named_parameters())
    for p in parameters:
        if p.requires_grad and p.name != "qkv.bias":
            values[p.name].grad = gradient(p.name, p.shape, 0)
    expected = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.7, norm_type)

    def work(world: ThreadWorld) -> list[Tensor]:
        return clip(sizes, world.make_groups(mesh), world.rank, norm_type)

    results = run_threads(work, mesh.n_ranks)
    for rank, (norm, *gradients) in enumerate(results):
        assert norm.dtype == torch.float32
        assert torch.equal(norm, results[0][0])
        torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)
        wanted = [
            local_shard(g, p, sizes, mesh.coordinate(rank))
            for p in parameters
            if (g := values[p.name].grad) is not None
        ]
        torch.testing.assert_close(gradients, wanted, rtol=1e-6, atol=1e-8)


def test_clipping_a_norm_that_is_not_finite() -> None:
    parameters = plan((1, 2))

    def work(world: ThreadWorld) -> list[float]:
        groups, at = world.make_groups(mesh_of((1, 2))), (0, world.rank)
        local = nn.Parameter(torch.ones(8, 8))
        local.grad = torch.full((8, 8), math.nan if world.rank else 1.0)
        embed = parameters[0]
        norms = [
            float(clip_grad_norm_([embed], {embed.name: local}, 1.0, at, groups, q))
            for q in (2.0, math.inf)
        ]
        with pytest.raises(RuntimeError, match="cannot be clipped"):
            clip_grad_norm_([embed], {embed.name: local}, 1.0, at, groups, error_if_nonfinite=True)
        with pytest.raises(OptionError, match="must be positive"):
            clip_grad_norm_([embed], {embed.name: local}, 1.0, at, groups, 0.0)
        return norms

    assert all(math.isnan(norm) for norms in run_threads(work, 2) for norm in norms)
