"""Checkpoints: bitwise onto other meshes, interrupted saves, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import SGD, Adafactor, AdamW, Optimizer

from autopar.errors import OptionError, StateError
from autopar.runtime.checkpoints import ModuleState, load, save
from autopar.runtime.state import (
    clip_grad_norm_,
    full_state_dict,
    initial_shards,
    stage_device_mesh,
    state_dict,
)
from autopar.runtime.state.dtensors import dtensor_placements
from tests.helpers.checkpoint_jobs import (
    Rank,
    assert_same,
    checkpoint_values,
    load_train_and_save,
    train_and_save,
)
from tests.helpers.full_disk import files_of_at_most
from tests.helpers.nightly import one_in
from tests.helpers.pools import Pool
from tests.helpers.state_model import (
    DIMS,
    ONE,
    PAIR,
    STAGES,
    Shapes,
    Tied,
    pipeline_of,
    process_place,
    seeded_model,
)


def owned(whole: dict[str, Tensor]) -> dict[str, Tensor]:
    """`Rank.whole` without mirrors, after a check that mirrors equal their owners."""
    for name, value in whole.items():
        if name[0].isdigit():
            owner = name[1:].replace("head.weight", "embed.weight")
            assert torch.equal(value, whole[owner]), name
    return {name: value for name, value in whole.items() if not name[0].isdigit()}


# Each saves for the next; the first trains before. One process is between them.
CHAINS: dict[str, tuple[Shapes, ...]] = {
    "meshes": (PAIR, ((2, 2),), PAIR, ONE, ((4,),)),
    "stages": (
        ((1, 1), (1, 1)),
        ((1, 1), (1, 3)),
        ((1, 1), (1, 2), (1, 1)),
        ((2, 2),),
        ((1, 2), (1, 2), ()),
        ONE,
        ((1, 2), (2, 1)),
    ),
}


def on_ranks(workers: Pool, shapes: Shapes, job: Callable[..., Any], *args: Any) -> Any:
    """What rank 0 returns."""
    n_ranks = pipeline_of(shapes).n_ranks
    return job(shapes, *args) if n_ranks == 1 else workers(n_ranks).run(job, shapes, *args)[0]


@one_in(2)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # one process reads too
@pytest.mark.parametrize("chain", CHAINS)
def test_onto_other_ranks_and_back(chain: str, workers: Pool, tmp_path: Path) -> None:
    """Training continues identically. Both names of a tied parameter are in every checkpoint."""
    begun, *others = CHAINS[chain]
    paths = [str(tmp_path / f"ckpt{i}") for i in range(len(others) + 1)]
    first = owned(on_ranks(workers, begun, train_and_save, paths[0]))
    assert {"embed.weight/value", "qkv.weight/exp_avg", "gain/step"} < first.keys()
    assert "norm.bias/exp_avg" not in first  # frozen
    results = [
        on_ranks(workers, shapes, load_train_and_save, before, 1, after)
        for shapes, before, after in zip(others, paths, paths[1:], strict=False)
    ]
    alone = results[others.index(ONE)][1]
    for loaded, trained in results:
        assert_same(owned(loaded), first)
        assert_same(owned(trained), alone)
    assert not torch.equal(alone["qkv.weight/value"], first["qkv.weight/value"])
    assert not list(tmp_path.glob(".*"))
    for path in paths:
        values = checkpoint_values(path)
        assert_same(values, {n: first.get(f"{n}/value", v) for n, v in values.items()})
        assert torch.equal(values["head.weight"], values["embed.weight"])
        groups = json.loads((Path(path) / "autopar.json").read_text())["optimizer"]["groups"]
        names = [name for group in groups for name in group["parameters"]]
        assert len(groups) == 2 and len(names) == len({*names}), "a mirror is its owner's"


def weights_from(shapes: Shapes, path: str) -> dict[str, Tensor]:
    """Whole parameters of a model that takes its initial weights from a checkpoint."""
    place = process_place(pipeline_of(shapes))
    shards = initial_shards(place, path, seeded_model(0))
    return full_state_dict(place, shards)


def load_with_dcp(path: str) -> None:
    """Load and save with DCP and `pm.state_dict()` alone, as a user would; some shards strided."""
    rank = Rank(((2, 2),), 5, AdamW)
    mesh = init_device_mesh("cpu", (2, 2))
    held = state_dict(rank.place, rank.locals, mesh, rank.buffers)
    dcp.load(held, storage_reader=HuggingFaceStorageReader(path))
    original = checkpoint_values(path)
    for p in rank.place.parameters:
        if not dtensor_placements(p, (2, 2))[1]:
            assert torch.equal(rank.locals[p.name], rank.cut(original[p.name], p)), p.name
    dcp.save(held, checkpoint_id=f"{path}-again")
    again: dict[str, Any] = {n: torch.zeros_like(v) for n, v in original.items()}
    dcp.load(again, checkpoint_id=f"{path}-again")
    for name in (*DIMS, "head.weight"):
        assert torch.equal(again[name], original[name]), name


def test_other_readers(workers: Pool, tmp_path: Path) -> None:
    path = str(tmp_path / "ckpt")
    expected = train_and_save(ONE, path)
    meshes: tuple[Shapes, ...] = (((2, 2),), ((1, 1), (1, 3)))
    for whole in (
        weights_from(ONE, path),
        *(workers(4).run(weights_from, m, path)[0] for m in meshes),
    ):
        assert torch.equal(whole.pop("head.weight"), whole["embed.weight"])
        assert_same(whole, {n: expected[f"{n}/value"] for n in whole})
    workers(4).run(load_with_dcp, path)


def save_on_a_full_disk(path: str, size_bytes: int) -> str:
    """A save whose files cannot grow on rank 0; the error message on this rank."""
    rank = Rank(PAIR, 0, AdamW)
    rank.train(0, 1)
    most_bytes = size_bytes if rank.place.rank == 0 else 10**9
    with files_of_at_most(most_bytes), pytest.raises(StateError) as caught:
        rank.save(path, 9, {"note": "x" * 100_000})
    return str(caught.value)


@pytest.mark.parametrize("size_bytes", [100, 50_000], ids=["data", "record"])
def test_a_full_disk_leaves_the_checkpoint_before(
    workers: Pool, tmp_path: Path, size_bytes: int
) -> None:
    path = str(tmp_path / "ckpt")
    for message in workers(2).run(save_on_a_full_disk, path, size_bytes):
        assert message.startswith("rank 0 failed: writing ")
        assert "File too large" in message
        assert "are free there: free space or save elsewhere" in message
    assert not list(tmp_path.iterdir())  # the draft takes no space
    alone = Rank(ONE, 3, AdamW)
    before = alone.whole()
    with pytest.raises(StateError, match=r"no whole checkpoint"):
        alone.load(path)
    alone.save(path, 1)
    workers(2).run(save_on_a_full_disk, path, size_bytes)
    again = Rank(ONE, 5, AdamW)
    assert again.load(path)[0] == 1
    assert_same(again.whole(), before)
    again.save(path, 2)  # replaces the old checkpoint and what the failed save left
    assert again.load(path)[0] == 2
    assert [p.name for p in tmp_path.iterdir()] == ["ckpt"]


def test_death_between_the_renames(tmp_path: Path) -> None:
    rank = Rank(ONE, 0, AdamW)
    path = tmp_path / "ckpt"
    rank.save(str(path), 1)
    path.rename(tmp_path / ".ckpt.old")
    assert rank.load(str(path))[0] == 1
    rank.save(str(path), 2)
    assert rank.load(str(path))[0] == 2
    assert [p.name for p in tmp_path.iterdir()] == ["ckpt"]


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"a": (1, 2)}, r"extra\['a'\] is a tuple"),
        ({"a": [{"b": torch.ones(1)}]}, r"extra\['a'\]\[0\]\['b'\] is a Tensor"),
        ({1: 2}, "extra has the key 1; keys must be str"),
        ([1], "extra is a dict, not list"),
    ],
)
def test_extra_that_json_cannot_hold(extra: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=message):
        Rank(ONE, 0, AdamW).save(str(tmp_path / "ckpt"), 1, extra)
    assert not list(tmp_path.iterdir())


def test_other_folders_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(StateError, match="is not a checkpoint; it is not overwritten"):
        Rank(ONE, 0, AdamW).save(str(tmp_path), 1)
    with pytest.raises(OptionError, match=r"step is .* not 1\.0"):
        Rank(ONE, 0, AdamW).save(str(tmp_path / "ckpt"), 1.0)  # type: ignore[arg-type]


def test_damaged_and_foreign_checkpoints(tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    rank = Rank(ONE, 0, AdamW)
    rank.save(str(path), 1)
    record = path / "autopar.json"
    good = record.read_text()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("autopar.runtime.storage.manifest.VERSION", 99)
        rank.save(str(tmp_path / "later"), 1)
    with pytest.raises(StateError, match="has version 99, this release reads 2"):
        rank.load(str(tmp_path / "later"))
    record.write_text(good[:-20])
    with pytest.raises(StateError, match="damaged"):
        rank.load(str(path))
    record.write_text(json.dumps({"format": "autopar checkpoint", "version": 1}))
    with pytest.raises(StateError, match=r"of autopar 0\.3: .* pickle.*\n.*autopar convert"):
        rank.load(str(path))
    record.unlink()
    (path / ".metadata").touch()
    with pytest.raises(StateError, match=r"written by torch\.distributed.*\n.*autopar convert"):
        rank.load(str(path))


def test_optimizers_that_do_not_fit(tmp_path: Path) -> None:
    path = str(tmp_path / "ckpt")
    rank = Rank(ONE, 0, AdamW)
    rank.train(0, 1)
    with pytest.raises(StateError, match="are not parameters of the parallel module"):
        save(rank.checkpointed(), AdamW(Tied().parameters()), path, 1)
    rank.save(path, 1)
    rank.optimizer = AdamW(rank.locals.values())
    with pytest.raises(StateError, match="parameter groups are not those of the checkpoint"):
        rank.load(path)
    save(rank.checkpointed(), None, path, 1)
    with pytest.raises(StateError, match="holds no optimizer state"):
        rank.load(path)


def two(rank: Rank, first: str) -> list[Optimizer]:
    """Two optimizers of a rank's parameters; the first has those with `first` in their names."""
    chosen = [p for n, p in rank.locals.items() if first in n and p.requires_grad]
    left = [p for n, p in rank.locals.items() if first not in n and p.requires_grad]
    return [AdamW(chosen, lr=0.1), SGD(left, lr=0.01, momentum=0.9)]


def states_of(optimizers: list[Optimizer]) -> list[Any]:
    return [
        (group["lr"], {k: v.clone() for k, v in one.state.get(p, {}).items()})
        for one in optimizers
        for group in one.param_groups
        for p in group["params"]
    ]


def test_several_optimizers(tmp_path: Path) -> None:
    path, rank, again = str(tmp_path / "ckpt"), Rank(ONE, 0, AdamW), Rank(ONE, 5, AdamW)
    saved, loaded = two(rank, "bias"), two(again, "bias")
    for p in rank.locals.values():
        p.grad = torch.ones_like(p) if p.requires_grad else None
    for one in saved:
        one.step()
        one.param_groups[0]["lr"] = 0.5
    save(rank.checkpointed(), {"of biases": saved[0], "others": saved[1]}, path, 1)
    load(again.checkpointed(), loaded, path)
    torch.testing.assert_close(states_of(loaded), states_of(saved), rtol=0, atol=0)
    load(again.checkpointed(), loaded[::-1], path)
    torch.testing.assert_close(states_of(loaded), states_of(saved), rtol=0, atol=0)
    for wrong, message in (
        ([saved[0], saved[0]], "two of the optimizers have the same parameter"),
        ([saved[0], 3], "one of the optimizers is a int"),
        ("adam", "the optimizer is a str"),
    ):
        with pytest.raises(OptionError, match=message):
            save(rank.checkpointed(), wrong, path, 1)  # type: ignore[arg-type]


def save_adafactor(path: str) -> str:
    rank = Rank(PAIR, 0, lambda groups, lr: Adafactor(groups, lr=lr))
    rank.train(0, 1)
    try:
        rank.save(path, 1)
    except StateError as error:
        return str(error)
    return ""


def momentum(groups: Any, lr: float) -> Optimizer:
    return SGD(groups, lr=torch.tensor(lr), momentum=0.9)


def save_momentum(path: str) -> dict[str, Tensor]:
    rank = Rank(PAIR, 0, momentum)
    rank.train(0, 2)
    rank.save(path, 2)
    return rank.whole()


def test_optimizers(workers: Pool, tmp_path: Path) -> None:
    """Momentum and a tensor learning rate are restored; factored state is refused."""
    path = str(tmp_path / "ckpt")
    assert "row_var" in workers(2).run(save_adafactor, path)[1]
    expected = workers(2).run(save_momentum, path)[0]
    alone = Rank(ONE, 5, momentum)
    alone.load(path)
    assert_same(alone.whole(), expected)
    assert isinstance(alone.optimizer.param_groups[0]["lr"], Tensor)


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
    if rank.place.stages == (0,):
        rank.optimizer = AdamW(rank.locals.values(), weight_decay=0.0)
    with pytest.raises(StateError) as caught:
        rank.save(path, 1)
    return str(caught.value)


def test_a_mirror_with_other_options_is_refused(workers: Pool, tmp_path: Path) -> None:
    for message in workers(2).run(save_with_drifting_mirror, str(tmp_path / "ckpt")):
        assert "is tied to `qkv.weight` of an earlier stage" in message
    assert not (tmp_path / "ckpt").exists()
