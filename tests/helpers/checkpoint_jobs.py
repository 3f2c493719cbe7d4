"""What tests of checkpoints run on ranks: train, save, load, and what is then where."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.optim import AdamW, Optimizer

from autopar.program.lines import StoredParameter
from autopar.runtime.checkpoints import ModuleState, load, save
from autopar.runtime.state import initial_buffers, initial_shards
from autopar.runtime.tensors import gather_whole, local_shard
from tests.helpers.state_model import (
    CPU,
    Shapes,
    Tied,
    gradient,
    pipeline_of,
    process_place,
    seeded_model,
)


class Rank:
    """One rank's module, and an optimizer with two parameter groups."""

    def __init__(self, shapes: Shapes, seed: int, make: Callable[..., Optimizer]) -> None:
        self.place = process_place(pipeline_of(shapes))
        model = seeded_model(seed)
        # A module's buffers are constants, and the same whatever the weights.
        self.buffers = initial_buffers(seeded_model(0), CPU)
        self.locals = initial_shards(self.place, "rank0", model)
        decayed = [v for n, v in self.locals.items() if "weight" in n]
        others = [v for n, v in self.locals.items() if "weight" not in n and v.requires_grad]
        self.optimizer = make(
            [{"params": decayed, "weight_decay": 0.1 + seed}, {"params": others}], lr=1e-2
        )

    def checkpointed(self) -> ModuleState:
        return ModuleState(self.place, self.locals, self.buffers)

    def train(self, first: int, n_steps: int) -> None:
        for step in range(first, first + n_steps):
            for p in self.place.parameters:
                if p.requires_grad:
                    whole = gradient(p.mirror_of or p.name, p.shape, step)
                    self.locals[p.name].grad = self.cut(whole, p)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def cut(self, whole: Tensor, p: StoredParameter) -> Tensor:
        return local_shard(whole, p, self.place.sizes, self.place.coordinate)

    def save(self, path: str, step: int, extra: dict[str, Any] | None = None) -> None:
        save(self.checkpointed(), self.optimizer, path, step, extra)

    def load(self, path: str) -> tuple[int, dict[str, Any]]:
        return load(self.checkpointed(), self.optimizer, path)

    def options(self) -> list[dict[str, Any]]:
        """The options of the optimizer's parameter groups."""
        groups = self.optimizer.param_groups
        return [{k: v for k, v in group.items() if k != "params"} for group in groups]

    def whole(self) -> dict[str, Tensor]:
        """Parameters and optimizer state of all stages, whole, the mirrors' apart; on rank 0."""
        place, own = self.place, {}
        for p in place.parameters:
            local = self.locals[p.name]
            kept = self.optimizer.state.get(local, {})
            for key, value in {"value": local.detach(), **kept}.items():
                is_shard = value.shape == local.shape
                held = gather_whole(value, p, place.sizes, place.groups) if is_shard else value
                own[f"{place.stages[0] if p.mirror_of else ''}{p.name}/{key}"] = held.clone()
        every: list[Any] = [own]
        if dist.is_initialized():
            every = [None] * dist.get_world_size()
            dist.all_gather_object(every, own)
        return {n: v for held in every for n, v in held.items()} if place.rank == 0 else {}


def train_and_save(shapes: Shapes, path: str) -> dict[str, Tensor]:
    rank = Rank(shapes, 0, AdamW)
    rank.train(0, 2)
    rank.save(path, 2, {"epoch": 1, "lr": [0.1, None], "note": {"ü": True}})
    return rank.whole()


def load_train_and_save(
    shapes: Shapes, path: str, n_steps: int, onto: str
) -> list[dict[str, Tensor]]:
    rank = Rank(shapes, 5, AdamW)
    step, extra = rank.load(path)
    assert step == 2
    assert extra == {"epoch": 1, "lr": [0.1, None], "note": {"ü": True}}
    assert rank.optimizer.param_groups[0]["weight_decay"] == 0.1
    assert rank.optimizer.param_groups[0]["betas"] == (0.9, 0.999)
    loaded = rank.whole()
    rank.save(onto, 2, extra)
    rank.train(2, n_steps)
    return [loaded, rank.whole()]


def assert_same(ours: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert ours.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(ours[name], value), name


def checkpoint_values(path: str) -> dict[str, Tensor]:
    """Read by PyTorch alone, into plain whole tensors."""
    whole: dict[str, Any] = {n: torch.zeros_like(v) for n, v in Tied().state_dict().items()}
    dcp.load(whole, storage_reader=HuggingFaceStorageReader(path))
    return whole
