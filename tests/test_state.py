"""Shards in and out: weights, DTensors, whole state dicts."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from autopar.runtime.dtensors import dtensor_of, dtensor_placements, state_dict
from autopar.runtime.groups import make_groups
from autopar.runtime.initialise import initial_values
from autopar.runtime.launch import WorkerPool
from autopar.runtime.names import StateError
from autopar.runtime.sharding import boxes, gather_whole, local_shard
from autopar.runtime.state import full_state_dict, load_state_dict
from autopar.runtime.threads import ThreadWorld, run_threads
from autopar.runtime.weights import initial_buffers, initial_shards
from autopar.shards import scatter
from autopar.spec import Spec, TensorType, all_specs
from tests.state_model import (
    DIMS,
    FROZEN,
    Tied,
    mesh_of,
    plan,
    seeded_model,
    storable,
    stored,
)

CPU = torch.device("cpu")
# Factor sizes for which two axes of two ranks share a dim, a factor, and neither.
SHAPES = (((4, 3, 4), (8,)), ((3, 4), (4, 4)), ((2, 4), (4,)), ((16,),))
MESHES = ((2,), (1, 2), (2, 1), (4,), (2, 2))


def storage_specs(dims: tuple[tuple[int, ...], ...], sizes: tuple[int, ...]) -> list[Spec]:
    every = all_specs(TensorType(dims, 8, True), sizes)
    return [spec for spec in every if all(map(storable, spec.placements))]


def counting(dims: tuple[tuple[int, ...], ...]) -> Tensor:
    shape = TensorType(dims, 8, True).shape
    return torch.arange(math.prod(shape), dtype=torch.float64).view(shape)


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(4, timeout_s=200) as workers:
        yield workers


# -- shards and boxes --------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_shards_boxes_and_gather(sizes: tuple[int, ...]) -> None:
    """Shards are the definition's, boxes say where they lie, gather_whole is the inverse."""
    mesh = mesh_of(sizes)
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
    mesh = mesh_of(sizes)
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


# -- DTensors ----------------------------------------------------------------------------------


def check_dtensors(sizes: tuple[int, ...]) -> tuple[int, int]:
    """Every storage spec as a DTensor and back; (specs, specs that needed a dim gathered)."""
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


def test_dtensors_of_one_axis(pool: WorkerPool) -> None:
    for sizes in ((4,), (1, 4), (4, 1)):
        assert pool.run(check_dtensors, sizes)[0][1] == 0


def test_dtensors_of_two_axes(pool: WorkerPool) -> None:
    n_specs, n_gathered = pool.run(check_dtensors, (2, 2))[0]
    # Only where both axes cut one dim and the first cut is strided.
    assert 0 < n_gathered < n_specs / 4


def check_state_dict() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = seeded_model()
    parameters, at = plan((2, 2)), tuple(mesh.get_coordinate() or ())
    locals_ = initial_shards(parameters, "rank0", model, (2, 2), at, CPU)
    held = state_dict(parameters, locals_, mesh, initial_buffers(model, CPU))
    assert held.keys() == model.state_dict().keys()
    assert held["head.weight"] is held["embed.weight"]
    for name, value in model.state_dict().items():
        own = held[name]
        assert torch.equal(own.full_tensor() if isinstance(own, DTensor) else own, value), name
    # DTensors of one plan load into shards of another.
    others = {n: nn.Parameter(torch.zeros_like(v)) for n, v in locals_.items()}
    load_state_dict(parameters, others, held, (2, 2), at, initial_buffers(model, CPU))
    assert all(torch.equal(others[n], v) for n, v in locals_.items())


def test_state_dict(pool: WorkerPool) -> None:
    pool.run(check_state_dict)


# -- weights -----------------------------------------------------------------------------------


def same_shards(sizes: tuple[int, ...], weights: str, mine: Any, truth: nn.Module) -> None:
    """`weights` gives every rank its shard of `truth`, and leaves the model it got alone."""
    mesh = mesh_of(sizes)
    at = mesh.coordinate(dist.get_rank() if dist.is_initialized() else 0)
    held = mine.state_dict(keep_vars=True)
    before = {name: (id(v), v.is_meta or v.clone()) for name, v in held.items()}
    parameters = plan(sizes)
    shards = initial_shards(parameters, weights, mine, sizes, at, CPU)
    values = dict(truth.named_parameters())
    for p in parameters:
        assert torch.equal(shards[p.name], local_shard(values[p.name], p, sizes, at)), p.name
        assert shards[p.name].requires_grad == (p.name not in FROZEN)
    for name, value in mine.state_dict(keep_vars=True).items():
        kept_id, kept = before[name]
        assert id(value) == kept_id
        assert value.is_meta if kept is True else torch.equal(value, kept)


def broadcast_weights(sizes: tuple[int, ...]) -> None:
    """Ranks other than 0 have other values, or none."""
    rank = dist.get_rank()
    mine = seeded_model(rank) if rank < 2 else meta_model()
    same_shards(sizes, "rank0", mine, seeded_model(0))


def meta_model() -> Tied:
    with torch.device("meta"):
        return Tied()


def meta_on_rank0() -> str:
    mine = meta_model() if dist.get_rank() == 0 else seeded_model()
    try:
        at = mesh_of((2, 2)).coordinate(dist.get_rank())
        initial_shards(plan((2, 2)), "rank0", mine, (2, 2), at, CPU)
    except StateError as error:
        return str(error)
    return ""


def test_weights_of_rank0(pool: WorkerPool) -> None:
    pool.run(broadcast_weights, (2, 2))
    same_shards((1, 1), "rank0", seeded_model(0), seeded_model(0))
    first, *others = pool.run(meta_on_rank0)
    assert "on meta: embed.weight" in first
    assert all(message.startswith("rank 0 failed: ") for message in others)


def file_weights(sizes: tuple[int, ...], path: str) -> None:
    mine = meta_model() if dist.is_initialized() and dist.get_rank() == 1 else seeded_model(7)
    same_shards(sizes, path, mine, seeded_model(0))


def without_buffers(model: nn.Module) -> dict[str, Tensor]:
    return {n: v.detach() for n, v in model.named_parameters()}


def test_weights_from_safetensors(pool: WorkerPool, tmp_path: Path) -> None:
    values = without_buffers(seeded_model(0))
    values["head.weight"] = values.pop("embed.weight")  # any name of a tied parameter will do
    file = tmp_path / "model.safetensors"
    save_file(values, file)
    pool.run(file_weights, (2, 2), str(file))
    file_weights((1, 1), str(tmp_path))
    folder = tmp_path / "sharded"
    folder.mkdir()
    names = sorted(values)
    parts = {"a.safetensors": names[:3], "b.safetensors": names[3:]}
    for part, held in parts.items():
        save_file({n: values[n] for n in held}, folder / part)
    index = {n: part for part, held in parts.items() for n in held}
    (folder / "model.safetensors.index.json").write_text(
        str({"weight_map": index}).replace("'", '"')
    )
    pool.run(file_weights, (2, 2), str(folder))
    (folder / "b.safetensors").unlink()
    with pytest.raises(StateError, match=r"lists files that are not there: b\.safetensors"):
        file_weights((1, 1), str(folder))


def test_names_that_do_not_fit(tmp_path: Path) -> None:
    values = without_buffers(seeded_model(0))
    del values["qkv.bias"], values["embed.weight"]
    values |= {"lm.weight": torch.zeros(1), "norm.weight": torch.zeros(9)}
    save_file(values, tmp_path / "model.safetensors")
    with pytest.raises(StateError) as raised:
        file_weights((1, 1), str(tmp_path))
    lines = str(raised.value).splitlines()
    assert lines[1:3] == ["  2 missing:", "    embed.weight"]
    assert "    qkv.bias" in lines
    assert lines[4:6] == ["  1 unexpected:", "    lm.weight"]
    assert "    norm.weight: (9,), the model has (8,)" in lines
    with pytest.raises(StateError, match="no such file or folder"):
        file_weights((1, 1), str(tmp_path / "nowhere"))
    (tmp_path / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(StateError, match="cannot read weights"):
        file_weights((1, 1), str(tmp_path))


def test_a_buffer_that_differs_is_refused(tmp_path: Path) -> None:
    held = {n: v.clone() for n, v in seeded_model(0).state_dict().items() if n != "head.weight"}
    save_file(held, tmp_path / "model.safetensors")
    same_shards((1, 1), str(tmp_path), seeded_model(0), seeded_model(0))
    with pytest.raises(StateError, match=r"buffer `norm\.running_mean` .* differs"):
        file_weights((1, 1), str(tmp_path))


# -- initialisation on meta --------------------------------------------------------------------


class Rescaling(Tied):
    """The scalar has no module of its own; the root's initialiser rescales a child."""

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.gain.fill_(0.5)
            self.qkv.weight.mul_(0.0).add_(3.0)


def initialised_shards(seed: int) -> dict[str, Tensor]:
    if dist.is_initialized():
        torch.manual_seed(seed + dist.get_rank())  # rank 0's counts
    sizes = (2, 2) if dist.is_initialized() else (1, 1)
    mesh = mesh_of(sizes)
    at = mesh.coordinate(dist.get_rank() if dist.is_initialized() else 0)
    with torch.device("meta"):
        model = Rescaling()
    if not dist.is_initialized():
        torch.manual_seed(seed)
    shards = initial_shards(plan(sizes), "init", model, sizes, at, CPU)
    assert all(v.is_meta for v in model.parameters())
    if not dist.is_initialized():
        return dict(shards)
    return full_state_dict(plan(sizes), shards, sizes, at, make_groups(mesh))


def test_weights_initialised_on_meta(pool: WorkerPool) -> None:
    with torch.random.fork_rng(devices=()):
        one = initialised_shards(3)
        four = pool.run(initialised_shards, 3)[0]
    for name in DIMS:
        assert torch.equal(one[name], four[name]), name
    assert torch.equal(one["qkv.weight"], torch.full((24, 8), 3.0))
    assert one["gain"] == 0.5
    assert one["embed.weight"].std() > 0.1
    assert torch.equal(one["norm.weight"], torch.ones(8))


def test_what_nothing_initialises_is_named() -> None:
    model = meta_model()
    with pytest.raises(StateError, match="nothing initialises gain"):
        dict(initial_values(model, ["qkv.bias", "gain"], 0))
    buffers = initial_buffers(model, CPU)
    assert torch.equal(buffers["norm.running_var"], torch.ones(8))


def test_transformers_initialiser() -> None:
    """GPT-2 rescales the weights of a child in its parent's turn, and ties its head."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "gpt2", n_layer=2, n_embd=64, n_head=2, vocab_size=320, n_positions=16
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    names = [n for n, _ in model.named_parameters()]
    values = dict(initial_values(model, names, 0))
    assert set(values) == set(names)
    spread = {n: float(v.std()) for n, v in values.items()}
    assert spread["transformer.h.0.attn.c_attn.weight"] == pytest.approx(0.02, rel=0.1)
    assert spread["transformer.h.0.mlp.c_proj.weight"] == pytest.approx(0.01, rel=0.1)
    again = dict(initial_values(model, names[-4:], 0))
    assert all(torch.equal(again[n], values[n]) for n in names[-4:])


# -- whole state dicts -------------------------------------------------------------------------


def there_and_back() -> dict[str, Tensor]:
    sizes, rank = (2, 2), dist.get_rank()
    mesh, parameters = mesh_of(sizes), plan(sizes)
    at, groups = mesh.coordinate(rank), make_groups(mesh)
    model = seeded_model()
    buffers = initial_buffers(model, CPU)
    locals_ = initial_shards(parameters, "rank0", model, sizes, at, CPU)
    whole = full_state_dict(parameters, locals_, sizes, at, groups, buffers)
    for local in locals_.values():
        local.detach().zero_()
    # What rank 0 alone has is broadcast; what all have is cut where it is.
    for given in (whole, seeded_model(1).state_dict() | buffers):
        load_state_dict(parameters, locals_, given, sizes, at, buffers)
    ours = full_state_dict(parameters, locals_, sizes, at, groups, buffers)
    load_state_dict(parameters, locals_, whole, sizes, at, buffers)
    again = full_state_dict(parameters, locals_, sizes, at, groups, buffers)
    if rank:
        assert not whole
        return {}
    for name, value in (seeded_model(1).state_dict() | buffers).items():
        assert torch.equal(ours[name], value), name
    for name, value in whole.items():
        assert torch.equal(again[name], value), name
    return whole


def test_full_state_dict(pool: WorkerPool) -> None:
    whole, *others = pool.run(there_and_back)
    assert others == [{}, {}, {}]
    expected = seeded_model().state_dict()
    assert whole.keys() == expected.keys()
    assert all(torch.equal(whole[n], v) for n, v in expected.items())
    fresh = Tied()
    fresh.load_state_dict(whole)


def test_loading_what_does_not_fit() -> None:
    parameters, at = plan((1, 1)), (0, 0)
    model = seeded_model()
    locals_ = initial_shards(parameters, "rank0", model, (1, 1), at, CPU)
    values = copy.deepcopy(model.state_dict())
    del values["gain"]
    buffers = initial_buffers(model, CPU)
    with pytest.raises(StateError, match="1 missing:\n    gain"):
        load_state_dict(parameters, locals_, values, (1, 1), at, buffers)
    values["other"] = torch.zeros(1)
    keys = load_state_dict(parameters, locals_, values, (1, 1), at, buffers, strict=False)
    assert keys == (["gain"], ["other"])
