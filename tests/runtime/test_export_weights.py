"""Weights as Hugging Face's files: bounded files, an index, and back again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.optim import AdamW
from transformers import AutoConfig, AutoModelForCausalLM

import autopar
from autopar.errors import OptionError, StateError
from autopar.runtime.state import export, full_state_dict, initial_shards
from tests.helpers.checkpoint_jobs import Rank, assert_same
from tests.helpers.full_disk import files_of_at_most
from tests.helpers.pools import Pool
from tests.helpers.state_model import ONE, SHAPES_OF_4, Shapes, seeded_model

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
    config.save_pretrained(tmp_path / "out")
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
