"""A stage holds microbatches between their forward and their backward, and nothing else: before
each computation, those in flight; on stage i of n at most n - i under 1f1b, all under gpipe."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.program.lines import Pipeline
from autopar.runtime.execute import Executor
from tests.helpers.harness import generated_code, model_case
from tests.helpers.models.pipeline_models import Skip, analysis_of, batch_of
from tests.helpers.pipeline_harness import Layout, random_ends, random_pipeline
from tests.helpers.ranks import Rank, named_inputs, random_parameters, run_ranks

__all__ = ["generated_code"]

ALONE = (1, 1)
N_STAGES, N_MICROBATCHES = 4, 8


class Watch(TorchDispatchMode):
    """Records the storages made inside it. Scalars are left out: the summed loss stays alive."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[StorageWeakRef] = []

    def add(self, tensor: Tensor) -> None:
        if tensor.dim():
            self.made.append(StorageWeakRef(tensor.untyped_storage()))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = {_storage(x) for x in pytree.tree_leaves(args) if isinstance(x, Tensor)}
        results = func(*args, **(kwargs or {}))
        for result in pytree.tree_leaves(results):
            if isinstance(result, Tensor) and _storage(result) not in given:
                self.add(result)
        return results

    @property
    def is_alive(self) -> bool:
        return not all(storage.expired() for storage in self.made)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class Watched:
    """The microbatches of one rank; `seen` are those alive before each computation."""

    def __init__(self, executor: Executor) -> None:
        self.microbatches: list[Watch] = []
        self.seen: list[set[int]] = []
        (stage,) = executor.stages.values()
        code = self._code = stage.code
        stage.code = replace(code, forward=self.forward, backward=self.backward)

    def look(self) -> set[int]:
        return {k for k, watch in enumerate(self.microbatches) if watch.is_alive}

    def forward(self, *args: Any) -> Any:
        self.seen.append(self.look())
        watch = Watch()
        self.microbatches.append(watch)
        for received in args[2] if len(args) == 4 else ():
            watch.add(received)
        with watch:
            return self._code.forward(*args)

    def backward(self, *args: Any) -> None:
        self.seen.append(self.look())
        assert self._code.backward is not None
        self._code.backward(*args)


@dataclass(frozen=True)
class Held:
    """Microbatches alive on one stage: before each computation, and after the step."""

    seen: list[set[int]]
    left: set[int]


def in_flight_before_each(pipeline: Pipeline, stage: int) -> list[set[int]]:
    """The microbatches in flight in the schedule, before each computation."""
    found: list[set[int]] = []
    now: set[int] = set()
    for action in pipeline.schedule.actions_of(stage):
        if action.is_compute:
            found.append(now)
            now = now ^ {action.microbatch}
    return found


@pytest.mark.parametrize("order", ["gpipe", "1f1b"])
@pytest.mark.parametrize("model", ["gpt2", "skip"])
def test_held_microbatches(model: str, order: str) -> None:
    if model == "skip":
        analysis, batch = analysis_of(Skip), batch_of(Skip, 0)
    else:
        case = model_case(model)
        analysis, batch = case.analysis, case.batch(0)
    program, layout = analysis.program, Layout((ALONE,) * N_STAGES, N_MICROBATCHES, order)
    ends = random_ends(program, N_STAGES, random.Random(3))
    pipeline = random_pipeline(analysis, ends, layout, random.Random(0))

    def work(rank: Rank) -> Held:
        mine = Watched(rank.executor)
        rank.executor.step(rank.stored, named_inputs(program, batch))
        return Held(mine.seen, mine.look())

    for stage, held in enumerate(run_ranks(program, pipeline, random_parameters(program, 0), work)):
        assert held.seen == in_flight_before_each(pipeline, stage)
        assert held.left == set()
        n_most = N_STAGES - stage if order == "1f1b" else N_MICROBATCHES
        assert max(map(len, held.seen)) == n_most
