"""Checkpoints of stages: onto other stages or one process, mirrors, a stage without state."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.optim import AdamW

from autopar.errors import StateError
from autopar.runtime.checkpoints import ModuleState, load, save
from autopar.runtime.state import (
    clip_grad_norm_,
    full_state_dict,
    initial_shards,
    stage_device_mesh,
    state_dict,
)
from tests.helpers.checkpoint_jobs import (
    Rank,
    assert_same,
    checkpoint_values,
    load_train_and_save,
    train_and_save,
)
from tests.helpers.pools import Pool
from tests.helpers.state_model import ONE, STAGES, pipeline_of, process_place, seeded_model


def owned(whole: dict[str, Tensor]) -> dict[str, Tensor]:
    """`Rank.whole` without mirrors, after a check that mirrors equal their owners."""
    for name, value in whole.items():
        if name[0].isdigit():
            owner = name[1:].replace("head.weight", "embed.weight")
            assert torch.equal(value, whole[owner]), name
    return {name: value for name, value in whole.items() if not name[0].isdigit()}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # one process reads too
def test_onto_other_stages_and_back(workers: Pool, tmp_path: Path) -> None:
    """2 stages -> 2 unequal -> 3 -> 1 stage of 4 ranks -> one process -> 2 stages."""
    paths = [str(tmp_path / f"ckpt{i}") for i in range(6)]
    first = owned(workers(2).run(train_and_save, ((1, 1), (1, 1)), paths[0])[0])
    unequal = workers(4).run(load_train_and_save, ((1, 1), (1, 3)), paths[0], 1, paths[1])[0]
    three = workers(4).run(load_train_and_save, ((1, 1), (1, 2), (1, 1)), paths[1], 1, paths[2])[0]
    square = workers(4).run(load_train_and_save, ((2, 2),), paths[2], 1, paths[3])[0]
    alone = load_train_and_save(ONE, paths[3], 1, paths[4])
    two = workers(4).run(load_train_and_save, ((1, 2), (2, 1)), paths[4], 1, paths[5])[0]
    for loaded, trained in (unequal, three, square, alone, two):
        assert_same(owned(loaded), first)
        assert_same(owned(trained), alone[1])
    truth = load_train_and_save(ONE, paths[5], 1, paths[0])
    assert_same(truth[1], alone[1])
    records = [json.loads((Path(path) / "autopar.json").read_text()) for path in paths]
    assert all(len(record["optimizer"]["groups"]) == 2 for record in records)
    for path in paths:  # every key of the model; both names of the tied one
        values = checkpoint_values(path)
        assert_same(values, {n: first.get(f"{n}/value", v) for n, v in values.items()})
        assert torch.equal(values["head.weight"], values["embed.weight"])


def save_beside_an_empty_stage(path: str) -> dict[str, Tensor]:
    """The last stage has no parameters, so no optimizer; without buffers it has no state."""
    place = process_place(pipeline_of(((1, 1), (1, 1)), [*STAGES[1], {}]))
    locals_ = initial_shards(place, "rank0", seeded_model(0))
    optimizer = AdamW(locals_.values()) if locals_ else None
    save(ModuleState(place, locals_), optimizer, path, 1)
    whole = full_state_dict(place, locals_)
    for local in locals_.values():
        local.detach().zero_()
    load(ModuleState(place, locals_), optimizer, path)
    clip_grad_norm_(place, locals_, 1.0)
    again = full_state_dict(place, locals_)
    assert_same(again, whole)
    mesh = stage_device_mesh(place.pipeline, place.rank, "cpu")
    held = state_dict(place, locals_, mesh)
    dcp.save(held, checkpoint_id=f"{path}-again")
    dcp.load(held, checkpoint_id=f"{path}-again")
    return whole


def test_a_stage_without_parameters(workers: Pool, tmp_path: Path) -> None:
    path = str(tmp_path / "ckpt")
    whole, nothing = workers(2).run(save_beside_an_empty_stage, path)
    assert not nothing
    place = process_place(pipeline_of(ONE))
    shards = initial_shards(place, path, seeded_model(5))
    assert_same(full_state_dict(place, shards), whole)


def save_with_drifting_mirror(path: str) -> str:
    """The last stage decays the tied head; the first does not decay the embedding."""
    rank = Rank(((1, 1), (1, 1)), 0, AdamW)
    if rank.place.stage == 0:
        rank.optimizer = AdamW(rank.locals.values(), weight_decay=0.0)
    try:
        rank.save(path, 1)
    except StateError as error:
        return str(error)
    return ""


def test_a_mirror_with_other_options_is_refused(workers: Pool, tmp_path: Path) -> None:
    for message in workers(2).run(save_with_drifting_mirror, str(tmp_path / "ckpt")):
        assert "is tied to `qkv.weight` of an earlier stage" in message
    assert not (tmp_path / "ckpt").exists()
