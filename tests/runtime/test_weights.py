"""Initial weights of every rank: from rank 0's model, files, initialisers on meta; and exports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import AdamW
from transformers import AutoConfig, AutoModelForCausalLM

import autopar
from autopar.errors import OptionError, StateError
from autopar.runtime.state import export, full_state_dict, initial_buffers, initial_shards
from autopar.runtime.state.initialise import initial_values
from autopar.runtime.tensors import local_shard
from tests.helpers.checkpoint_jobs import Rank, assert_same
from tests.helpers.full_disk import files_of_at_most
from tests.helpers.pools import Pool
from tests.helpers.state_model import (
    CPU,
    DIMS,
    FROZEN,
    ONE,
    SHAPES_OF_4,
    Shapes,
    Tied,
    pipeline_of,
    process_place,
    seeded_model,
)


def same_shards(shapes: Shapes, weights: str, mine: Any, truth: nn.Module) -> None:
    """`weights` gives every rank its shard of `truth` and does not change the given model."""
    place = process_place(pipeline_of(shapes))
    held = mine.state_dict(keep_vars=True)
    before = {name: (id(v), v.is_meta or v.clone()) for name, v in held.items()}
    shards = initial_shards(place, weights, mine)
    assert shards.keys() == {p.name for p in place.parameters}
    values = dict(truth.named_parameters(remove_duplicate=False))
    for p in place.parameters:
        part = local_shard(values[p.name], p, place.sizes, place.coordinate)
        assert torch.equal(shards[p.name], part), p.name
        assert shards[p.name].requires_grad == (p.name not in FROZEN)
    for name, value in mine.state_dict(keep_vars=True).items():
        kept_id, kept = before[name]
        assert id(value) == kept_id
        assert value.is_meta if kept is True else torch.equal(value, kept)


def broadcast_weights(shapes: Shapes) -> None:
    """Ranks other than 0 have other values or are on meta."""
    rank = dist.get_rank()
    mine = seeded_model(rank) if rank < 2 else meta_model()
    same_shards(shapes, "rank0", mine, seeded_model(0))


def meta_model() -> Tied:
    with torch.device("meta"):
        return Tied()


def meta_on_rank0() -> str:
    mine = meta_model() if dist.get_rank() == 0 else seeded_model()
    with pytest.raises(StateError) as caught:
        initial_shards(process_place(pipeline_of(((2, 2),))), "rank0", mine)
    return str(caught.value)


def test_weights_of_rank0(workers: Pool) -> None:
    for shapes in SHAPES_OF_4:
        workers(4).run(broadcast_weights, shapes)
    same_shards(ONE, "rank0", seeded_model(0), seeded_model(0))
    first, *others = workers(4).run(meta_on_rank0)
    assert "on meta: embed.weight" in first
    assert all(message.startswith("rank 0 failed: ") for message in others)


def file_weights(shapes: Shapes, path: str) -> None:
    mine = meta_model() if dist.is_initialized() and dist.get_rank() == 1 else seeded_model(7)
    same_shards(shapes, path, mine, seeded_model(0))


def without_buffers(model: nn.Module) -> dict[str, Tensor]:
    return {n: v.detach() for n, v in model.named_parameters()}


def test_weights_from_safetensors(workers: Pool, tmp_path: Path) -> None:
    values = without_buffers(seeded_model(0))
    values["head.weight"] = values.pop("embed.weight")  # a tied parameter may have any of its names
    file = tmp_path / "model.safetensors"
    save_file(values, file)
    for shapes in SHAPES_OF_4:
        workers(4).run(file_weights, shapes, str(file))
    file_weights(ONE, str(tmp_path))
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
    workers(4).run(file_weights, ((2, 2),), str(folder))
    (folder / "b.safetensors").unlink()
    with pytest.raises(StateError, match=r"lists files that are not there: b\.safetensors"):
        file_weights(ONE, str(folder))


def test_names_that_do_not_fit(tmp_path: Path) -> None:
    values = without_buffers(seeded_model(0))
    del values["qkv.bias"], values["embed.weight"]
    values |= {"lm.weight": torch.zeros(1), "norm.weight": torch.zeros(9)}
    save_file(values, tmp_path / "model.safetensors")
    with pytest.raises(StateError) as raised:
        file_weights(ONE, str(tmp_path))
    lines = str(raised.value).splitlines()
    assert lines[1:3] == ["  2 missing:", "    embed.weight"]
    assert "    qkv.bias" in lines
    assert lines[4:6] == ["  1 unexpected:", "    lm.weight"]
    assert "    norm.weight: (9,), the model has (8,)" in lines
    with pytest.raises(StateError, match="no such file or folder"):
        file_weights(ONE, str(tmp_path / "nowhere"))
    (tmp_path / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(StateError, match="cannot read weights"):
        file_weights(ONE, str(tmp_path))


def test_a_buffer_that_differs_is_refused(tmp_path: Path) -> None:
    held = {n: v.clone() for n, v in seeded_model(0).state_dict().items() if n != "head.weight"}
    save_file(held, tmp_path / "model.safetensors")
    same_shards(ONE, str(tmp_path), seeded_model(0), seeded_model(0))
    with pytest.raises(StateError, match=r"buffer `norm\.running_mean` .* differs"):
        file_weights(ONE, str(tmp_path))


class Rescaling(Tied):
    """The scalar belongs to the root, whose initialiser also rescales a child."""

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.gain.fill_(0.5)
            self.qkv.weight.mul_(0.0).add_(3.0)


def initialised_shards(shapes: Shapes, seed: int) -> dict[str, Tensor]:
    place = process_place(pipeline_of(shapes))
    torch.manual_seed(seed + place.rank)  # only rank 0's seed counts
    with torch.device("meta"):
        model = Rescaling()
    shards = initial_shards(place, "init", model)
    assert all(v.is_meta for v in model.parameters())
    whole = full_state_dict(place, shards)
    for p in place.parameters:  # mirrors too
        if p.mirror_of is not None:
            alone = initial_values(model, [p.mirror_of], seed)
            part = local_shard(dict(alone)[p.mirror_of], p, place.sizes, place.coordinate)
            assert torch.equal(shards[p.name], part)
    return whole


@pytest.mark.parametrize("shapes", SHAPES_OF_4, ids=str)
def test_weights_initialised_on_meta(workers: Pool, shapes: Shapes) -> None:
    with torch.random.fork_rng(devices=()):
        one = initialised_shards(ONE, 3)
        four = workers(4).run(initialised_shards, shapes, 3)[0]
    for name in (*DIMS, "head.weight"):
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
    """GPT-2 rescales a child's weights when it initialises the parent, and ties its head."""
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


MOST_BYTES = 600


def exported(shapes: Shapes, path: str) -> dict[str, Tensor]:
    rank = Rank(shapes, 0, AdamW)
    export.export_weights(rank.place, rank.locals, path, MOST_BYTES, rank.buffers)
    return full_state_dict(rank.place, rank.locals, rank.buffers)


@pytest.mark.parametrize("shapes", SHAPES_OF_4)
def test_out_and_back(shapes: Shapes, workers: Pool, tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    expected = workers(4).run(exported, shapes, str(folder))[0]
    index = json.loads((folder / export.INDEX).read_text())
    held = {f.name: load_file(f) for f in sorted(folder.glob("*.safetensors"))}
    assert len(held) > 2
    assert all(name.endswith(f"-of-{len(held):05d}.safetensors") for name in held)
    for values in held.values():
        assert len(values) == 1 or sum(v.nbytes for v in values.values()) <= MOST_BYTES
    flat = {n: v for values in held.values() for n, v in values.items()}
    assert index["weight_map"] == {n: f for f, values in held.items() for n in values}
    assert index["metadata"]["total_size"] == sum(v.nbytes for v in flat.values())
    tied = expected.pop("head.weight")
    assert torch.equal(tied, expected["embed.weight"])
    assert_same(flat, expected)
    rank = Rank(ONE, 5, AdamW)
    shards = initial_shards(rank.place, str(folder), seeded_model(0))
    assert all(torch.equal(value, expected[name]) for name, value in shards.items())


def test_into_transformers(tmp_path: Path) -> None:
    """`from_pretrained` reads what a parallel module wrote, tied head included."""
    config = AutoConfig.for_model("gpt2", n_layer=1, n_embd=32, n_head=2, vocab_size=64)
    tokens = torch.arange(64).view(4, 16)
    batch = {"input_ids": tokens, "labels": tokens}
    pm = autopar.parallelize(AutoModelForCausalLM.from_config(config), (1, 1), batch)
    autopar.export_weights(pm, tmp_path / "out", max_shard_bytes=20_000)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["architectures"] == ["GPT2LMHeadModel"]
    assert not hasattr(config, "_of") and config.architectures is None
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert_same(dict(again.state_dict()), pm.full_state_dict())
    other = AutoModelForCausalLM.from_config(config)
    back = autopar.parallelize(other, (1, 1), batch, weights=str(tmp_path / "out"))
    assert_same(back.full_state_dict(), pm.full_state_dict())


def test_what_is_refused(tmp_path: Path) -> None:
    rank = Rank(ONE, 0, AdamW)
    with pytest.raises(OptionError, match="max_shard_bytes is a size in bytes, not 0"):
        export.export_weights(rank.place, rank.locals, tmp_path / "w", 0)
    (tmp_path / "note").touch()
    with pytest.raises(StateError, match="exists already"):
        export.export_weights(rank.place, rank.locals, tmp_path, 100)
    with files_of_at_most(100), pytest.raises(StateError, match=r"is its disk full"):
        export.export_weights(rank.place, rank.locals, tmp_path / "w", 10_000)
    assert [p.name for p in tmp_path.iterdir()] == ["note"]
    export.export_weights(rank.place, rank.locals, tmp_path / "w", 100, rank.buffers)
    copy = next((tmp_path / "w").glob("*.safetensors"))
    (tmp_path / "w" / export.INDEX).unlink()
    (tmp_path / "w" / "copy.safetensors").write_bytes(copy.read_bytes())
    with pytest.raises(StateError, match="is in several files of"):
        initial_shards(rank.place, str(tmp_path / "w"), seeded_model(0))
