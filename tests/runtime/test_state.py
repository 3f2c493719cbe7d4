"""Shards in and out: weights, DTensors, whole state dicts; the global norm of gradients."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from autopar.errors import OptionError, StateError
from autopar.placement import Spec, TensorType, all_specs, scatter
from autopar.runtime.launch import ThreadWorld, run_threads
from autopar.runtime.state import (
    StageState,
    all_names,
    clip_grad_norm_,
    full_gradients,
    full_state_dict,
    initial_buffers,
    initial_shards,
    load_state_dict,
    stage_device_mesh,
    state_dict,
)
from autopar.runtime.state.dtensors import dtensor_of, dtensor_placements
from autopar.runtime.tensors import boxes, gather_whole, local_shard
from tests.helpers.machines import mesh_of
from tests.helpers.nightly import one_in
from tests.helpers.pools import Pool
from tests.helpers.state_model import (
    CPU,
    DIMS,
    FROZEN,
    ONE,
    SHAPES_OF_4,
    Shapes,
    Sizes,
    Tied,
    gradient,
    pipeline_of,
    process_place,
    seeded_model,
    storable,
    stored,
    thread_place,
)

# Factor sizes for which two axes of two ranks share a dim, share a factor, or share neither.
SHAPES = (((4, 3, 4), (8,)), ((3, 4), (4, 4)), ((2, 4), (4,)), ((16,),))
MESHES = ((2,), (1, 2), (2, 1), (4,), (2, 2))


def storage_specs(dims: tuple[tuple[int, ...], ...], sizes: tuple[int, ...]) -> list[Spec]:
    every = all_specs(TensorType(dims, 8, True), sizes)
    return [spec for spec in every if all(map(storable, spec.placements))]


def counting(dims: tuple[tuple[int, ...], ...]) -> Tensor:
    shape = TensorType(dims, 8, True).shape
    return torch.arange(math.prod(shape), dtype=torch.float64).view(shape)


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_shards_boxes_and_gather(sizes: tuple[int, ...]) -> None:
    """Shards follow the definition, and boxes say where they lie in the whole."""
    mesh = mesh_of(*sizes)
    for dims in SHAPES:
        whole = counting(dims)
        tensor = TensorType(dims, 8, True)
        for spec in storage_specs(dims, sizes):
            p = stored("p", dims, spec, sizes, torch.float64)
            expected = scatter(whole, tensor, spec, sizes, torch.Generator())
            for rank, part in enumerate(expected):
                at = mesh.coordinate(rank)
                local = local_shard(whole, p, sizes, at)
                assert torch.equal(local, part)
                assert local.is_contiguous()
                assert local.untyped_storage().nbytes() == local.nbytes
                filled = torch.full_like(local, -1.0)
                for box in boxes(p, sizes, at):
                    filled[box.of_shard] = whole[box.of_whole]
                assert torch.equal(filled, part)


@pytest.mark.parametrize("sizes", [(2,), (2, 2)], ids=str)
def test_gather_whole_is_the_inverse(sizes: tuple[int, ...]) -> None:
    mesh = mesh_of(*sizes)
    cases = [
        (stored("p", dims, spec, sizes, torch.float64), counting(dims))
        for dims in SHAPES
        for spec in storage_specs(dims, sizes)
    ]

    def work(world: ThreadWorld) -> None:
        groups = world.make_groups(mesh)
        at = mesh.coordinate(world.rank)
        for p, whole in cases:
            back = gather_whole(local_shard(whole, p, sizes, at), p, sizes, groups)
            assert torch.equal(back, whole), p.stored.spec

    run_threads(work, mesh.n_ranks)


def check_dtensors(sizes: tuple[int, ...]) -> tuple[int, int]:
    """Every storage spec as a DTensor; (number of specs, number that needed a dim gathered)."""
    mesh = init_device_mesh("cpu", sizes)
    at = mesh.get_coordinate()
    assert at is not None
    n_specs, n_gathered = 0, 0
    for dims in SHAPES:
        whole = counting(dims)
        for spec in storage_specs(dims, sizes):
            p = stored("p", dims, spec, sizes, torch.float64)
            local = local_shard(whole, p, sizes, at)
            made = dtensor_of(p, local, mesh)
            assert torch.equal(made.full_tensor(), whole), (spec, made.placements)
            gathered = dtensor_placements(p, sizes)[1]
            shares = made.to_local().data_ptr() == local.data_ptr()
            assert shares == (not gathered), spec
            n_specs, n_gathered = n_specs + 1, n_gathered + bool(gathered)
    return n_specs, n_gathered


def test_dtensors_of_one_axis(workers: Pool) -> None:
    for sizes in ((4,), (1, 4), (4, 1)):
        assert workers(4).run(check_dtensors, sizes)[0][1] == 0


def test_dtensors_of_two_axes(workers: Pool) -> None:
    n_specs, n_gathered = workers(4).run(check_dtensors, (2, 2))[0]
    # A gather is needed only if both axes cut one dim and the first cut is strided.
    assert 0 < n_gathered < n_specs / 4


def check_state_dicts(shapes: Shapes, path: str) -> None:
    """Keys and values of every stage's state dict; loading it, also with DCP and of other plans."""
    place = process_place(pipeline_of(shapes))
    mesh = stage_device_mesh(place.pipeline, place.rank, "cpu")
    model = seeded_model()
    buffers = initial_buffers(model, CPU)
    locals_ = initial_shards(place, "rank0", model)

    def zeros() -> dict[str, nn.Parameter]:
        return {name: nn.Parameter(torch.zeros_like(value)) for name, value in locals_.items()}

    def wrong(others: dict[str, nn.Parameter]) -> set[str]:
        return {name for name, value in locals_.items() if not torch.equal(others[name], value)}

    held = state_dict(place, locals_, mesh, buffers)
    own = {name for p in place.parameters for name in all_names(p)}
    assert held.keys() == own | buffers.keys()
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, set(held))
    assert set().union(*everywhere) == model.state_dict().keys()
    for name, value in held.items():
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        assert torch.equal(whole, model.state_dict()[name]), name
    # DTensors of another plan: those on a mesh of all ranks are gathered by all ranks.
    line = process_place(pipeline_of(((4,),)))
    mesh_of_line = init_device_mesh("cpu", (4,))
    of_line = state_dict(line, initial_shards(line, "rank0", model), mesh_of_line, buffers)
    for given in (held, of_line):
        others = zeros()
        load_state_dict(place, others, given, buffers)
        assert not wrong(others)
    # Each rank saves its own keys; the folder has every key of the model, once.
    dcp.save(held, checkpoint_id=path)
    others = zeros()
    dcp.load(state_dict(place, others, mesh, buffers), checkpoint_id=path)
    copied = {p.name for p in place.parameters if dtensor_placements(p, place.sizes)[1]}
    assert wrong(others) <= copied  # a gathered dim makes a copy
    every: dict[str, Any] = {n: torch.zeros_like(v) for n, v in model.state_dict().items()}
    dcp.load(every, checkpoint_id=path)
    assert all(torch.equal(every[n], v) for n, v in model.state_dict().items())


@one_in(3)
@pytest.mark.parametrize("shapes", SHAPES_OF_4, ids=str)
def test_state_dicts(workers: Pool, tmp_path: Path, shapes: Shapes) -> None:
    workers(4).run(check_state_dicts, shapes, str(tmp_path / "ckpt"))


def test_state_dict_of_other_stages(workers: Pool) -> None:
    """An error names the parameter that a rank stores and its state dict lacks."""
    messages = workers(4).run(load_from_other_cut)
    for message, name in zip(messages, ["norm.weight"] * 2 + ["qkv.bias"] * 2, strict=True):
        assert f"lacks `{name}`, which other ranks have" in message


def load_from_other_cut() -> str:
    theirs, place = (process_place(pipeline_of(s)) for s in (((1, 2), (2, 1)), ((2, 2),)))
    model = seeded_model()
    held = state_dict(
        theirs, initial_shards(theirs, "rank0", model),
        stage_device_mesh(theirs.pipeline, theirs.rank, "cpu"),
    )  # fmt: skip
    with pytest.raises(StateError) as caught:
        load_state_dict(place, initial_shards(place, "rank0", model), held)
    return str(caught.value)


def there_and_back(shapes: Shapes) -> dict[str, Tensor]:
    place = process_place(pipeline_of(shapes))
    model = seeded_model()
    buffers = initial_buffers(model, CPU)
    locals_ = initial_shards(place, "rank0", model)
    whole = full_state_dict(place, locals_, buffers)
    for local in locals_.values():
        local.detach().zero_()
    # Values that rank 0 alone has are broadcast; values that all ranks have are cut locally.
    for given in (whole, seeded_model(1).state_dict() | buffers):
        load_state_dict(place, locals_, given, buffers)
    ours = full_state_dict(place, locals_, buffers)
    load_state_dict(place, locals_, whole, buffers)
    again = full_state_dict(place, locals_, buffers)
    if place.rank:
        assert not whole
        return {}
    for name, value in (seeded_model(1).state_dict() | buffers).items():
        assert torch.equal(ours[name], value), name
    for name, value in whole.items():
        assert torch.equal(again[name], value), name
    return whole


@pytest.mark.parametrize("shapes", SHAPES_OF_4, ids=str)
def test_full_state_dict(workers: Pool, shapes: Shapes) -> None:
    whole, *others = workers(4).run(there_and_back, shapes)
    assert others == [{}, {}, {}]
    expected = seeded_model().state_dict()
    assert whole.keys() == expected.keys()
    assert all(torch.equal(whole[n], v) for n, v in expected.items())
    fresh = Tied()
    fresh.load_state_dict(whole)


@pytest.mark.parametrize("shapes", [*SHAPES_OF_4, ((1, 2),), ((1, 1), (1, 1))], ids=str)
def test_full_gradients(shapes: Shapes) -> None:
    """Each parameter once, zeros if it has no gradient; mirrors are left to their owners."""
    pipeline = pipeline_of(shapes)

    def work(world: ThreadWorld) -> dict[str, Tensor]:
        place = thread_place(pipeline, world)
        locals_ = initial_shards(place, "rank0", seeded_model())
        for p in place.parameters:
            if p.requires_grad and p.name != "gain":
                whole = gradient(p.mirror_of or p.name, p.shape, 0)
                part = local_shard(whole, p, place.sizes, place.coordinate)
                locals_[p.name].grad = part
        return full_gradients(place, locals_)

    found, *others = run_threads(work, pipeline.n_ranks)
    assert not any(others)
    assert found.keys() == DIMS.keys() - set(FROZEN)
    assert found["gain"] == 0
    for name in found.keys() - {"gain"}:
        assert torch.equal(found[name], gradient(name, found[name].shape, 0)), name


def test_loading_what_does_not_fit() -> None:
    place, model = StageState(pipeline_of(ONE), 0, CPU), seeded_model()
    locals_ = initial_shards(place, "rank0", model)
    values = copy.deepcopy(model.state_dict())
    del values["gain"]
    buffers = initial_buffers(model, CPU)
    with pytest.raises(StateError, match="1 missing:\n    gain"):
        load_state_dict(place, locals_, values, buffers)
    values["other"] = torch.zeros(1)
    keys = load_state_dict(place, locals_, values, buffers, strict=False)
    assert keys == (["gain"], ["other"])


def load_what_does_not_fit(shapes: Shapes) -> tuple[str, Any, list[bool]]:
    """Rank 0 alone has values; one parameter is missing, and one is not of the model."""
    place = process_place(pipeline_of(shapes))
    locals_ = initial_shards(place, "rank0", seeded_model(1))
    values = dict(seeded_model().named_parameters()) if place.rank == 0 else {}
    values.pop("gain", None)
    message = ""
    try:
        load_state_dict(place, locals_, values)
    except StateError as error:
        message = str(error)
    if place.rank == 0:
        values["other"] = nn.Parameter(torch.zeros(1))
    keys = load_state_dict(place, locals_, values, strict=False)
    truth = dict(seeded_model().named_parameters(remove_duplicate=False))
    right = [
        torch.equal(locals_[p.name], local_shard(truth[p.name], p, place.sizes, place.coordinate))
        for p in place.parameters
    ]
    return message, tuple(keys), right


def test_strictness_is_that_of_all_stages(workers: Pool) -> None:
    for message, keys, right in workers(4).run(load_what_does_not_fit, ((1, 1), (1, 3))):
        assert "1 missing:\n    gain" in message
        assert "unexpected" not in message
        assert keys == (["gain"], ["other"])
        assert all(right)  # `gain` is 0.5 in both models


TRAINED = [n for n in DIMS if n not in FROZEN and n != "qkv.bias"]  # qkv.bias has no gradient


@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
@pytest.mark.parametrize(
    "shapes", [*SHAPES_OF_4, ONE, ((1, 2),), ((4,),), ((1, 1), (1, 1))], ids=str
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
