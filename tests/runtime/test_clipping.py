"""The global norm: replicated shards and tied parameters count once, as in one process."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from autopar.errors import OptionError
from autopar.runtime.launch import ThreadWorld, run_threads
from autopar.runtime.state import clip_grad_norm_, initial_shards
from autopar.runtime.tensors import local_shard
from tests.helpers.state_model import (
    DIMS,
    FROZEN,
    Sizes,
    gradient,
    pipeline_of,
    seeded_model,
    thread_place,
)

TRAINED = [n for n in DIMS if n not in FROZEN and n != "qkv.bias"]  # qkv.bias has no gradient


@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
@pytest.mark.parametrize(
    "shapes",
    [
        ((1, 1),),
        ((1, 2),),
        ((2, 2),),
        ((4,),),
        ((1, 1), (1, 1)),
        ((1, 1), (1, 3)),
        ((2, 2), (2, 1)),
        ((1, 1), (1, 2), (1, 1)),
    ],
    ids=str,
)
def test_clipping(shapes: tuple[Sizes, ...], norm_type: float) -> None:
    model, pipeline = seeded_model(), pipeline_of(shapes)
    values = dict(model.named_parameters(remove_duplicate=False))
    for name in TRAINED:
        values[name].grad = gradient(name, values[name].shape, 0)
    expected = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.7, norm_type)

    def work(world: ThreadWorld) -> Tensor:
        place = thread_place(pipeline, world)
        locals_ = initial_shards(place, "rank0", seeded_model())
        for p in place.parameters:
            name = p.mirror_of or p.name
            if name in TRAINED:
                whole = gradient(name, p.shape, 0)
                locals_[p.name].grad = local_shard(whole, p, place.sizes, place.coordinate)
        norm = clip_grad_norm_(place, locals_, 0.7, norm_type)
        for p in place.parameters:
            clipped, found = values[p.name].grad, locals_[p.name].grad
            assert (clipped is None) == (found is None)
            if clipped is not None and found is not None:
                part = local_shard(clipped, p, place.sizes, place.coordinate)
                torch.testing.assert_close(found, part, rtol=1e-6, atol=1e-8)
        return norm

    norms = run_threads(work, pipeline.n_ranks)
    for norm in norms:
        assert norm.dtype == torch.float32
        assert torch.equal(norm, norms[0])
        torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("shapes", [((1, 2),), ((1, 1), (1, 1))], ids=str)
def test_clipping_a_norm_that_is_not_finite(shapes: tuple[Sizes, ...]) -> None:
    pipeline = pipeline_of(shapes)

    def work(world: ThreadWorld) -> list[float]:
        place = thread_place(pipeline, world)
        locals_ = initial_shards(place, "rank0", seeded_model())
        norm = locals_.get("norm.weight", locals_.get("gain"))
        assert norm is not None
        norm.grad = torch.full_like(norm, math.nan if world.rank else 1.0)
        norms = [float(clip_grad_norm_(place, locals_, 1.0, q)) for q in (2.0, math.inf)]
        with pytest.raises(RuntimeError, match="cannot be clipped"):
            clip_grad_norm_(place, locals_, 1.0, error_if_nonfinite=True)
        with pytest.raises(OptionError, match="must be positive"):
            clip_grad_norm_(place, locals_, 1.0, 0.0)
        return norms

    assert all(math.isnan(norm) for norms in run_threads(work, 2) for norm in norms)
