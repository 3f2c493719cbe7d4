"""A whole program as data: one stage program per pipeline stage, and what joins them.

    crossings   values made on one stage and read on another; a value is sent once to each stage
                that reads it, from the sender's spec to the reader's (`cross_mesh.slices`)
    ties        parameters that several stages use: each stage has its copy, and after backward
                every copy gets the sum of the gradients
    schedule    the actions of every stage in order, with sends and receives
    devices     sets of ranks. Stages on one device have one mesh, and hand tensors on locally
    n_blocks    how the rows of a batch are split: every stage sees them as `n_blocks` blocks of
                `n_microbatches` parts. So a microbatch has the same rows on all stages, and the
                rows of a rank are contiguous on each. It is the least common multiple of the
                stages' numbers of batch shards

A model without pipeline stages is a pipeline of one stage. The runtime executes this object, the
simulator prices it, and the verifier checks it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch

from autopar.errors import VerificationError
from autopar.mesh import LogicalMesh
from autopar.program.lines.stage_program import (
    Boundary,
    StageProgram,
    StoredParameter,
    most_batch_shards,
)
from autopar.schedule import (
    Schedule,
    ScheduleFactory,
    Transfer,
    forward_only,
    lower,
    one_f_one_b,
)


@dataclass(frozen=True)
class Crossing:
    """A value that stage `source` makes and stage `target` reads."""

    source: int
    target: int
    sent: Boundary
    received: Boundary

    @property
    def value(self) -> str:
        return self.sent.value

    @property
    def has_grad(self) -> bool:
        return self.sent.local.has_grad


@dataclass(frozen=True)
class Tie:
    """A parameter that several stages use: (stage, name on it), the owner first."""

    places: tuple[tuple[int, str], ...]

    @property
    def name(self) -> str:
        return self.places[0][1]


@dataclass(frozen=True)
class Pipeline:
    """The stages in order, each on its mesh. Make it with `Pipeline.of`."""

    stages: tuple[StageProgram, ...]
    meshes: tuple[LogicalMesh, ...]
    schedule: Schedule
    crossings: tuple[Crossing, ...]
    ties: tuple[Tie, ...]
    n_blocks: int

    @staticmethod
    def of(
        stages: Sequence[StageProgram],
        meshes: Sequence[LogicalMesh],
        order: ScheduleFactory = forward_only,
    ) -> Pipeline:
        """Join the stages; `order` makes their schedule.

        Stages with equal meshes are on one device. All split their backward if the schedule does.

        Raises `VerificationError` if a stage reads what no earlier stage sends, or another tensor,
        and if `order` is for stages on other devices.
        """
        crossings = _crossings(stages)
        transfers: dict[tuple[int, int], bool] = {}
        trains = all(s.trains for s in stages)
        for c in crossings:
            pair = c.source, c.target
            transfers[pair] = transfers.get(pair, False) or (c.has_grad and trains)
        between = frozenset(Transfer(*pair, returns) for pair, returns in transfers.items())
        schedule = _schedule(order, mesh_devices(meshes), stages[0].n_microbatches, between)
        if schedule.splits_backward:
            stages = [stage.split_backward() for stage in stages]
        n_blocks = math.lcm(*(most_batch_shards(s.delivered, s.axis_sizes) for s in stages))
        return Pipeline(tuple(stages), tuple(meshes), schedule, crossings, _ties(stages), n_blocks)

    @staticmethod
    def single(program: StageProgram, mesh: LogicalMesh) -> Pipeline:
        """A pipeline of one stage."""
        return Pipeline.of([program], [mesh], one_f_one_b if program.trains else forward_only)

    @property
    def n_stages(self) -> int:
        return len(self.stages)

    @property
    def n_microbatches(self) -> int:
        return self.stages[0].n_microbatches

    @cached_property
    def device_meshes(self) -> tuple[LogicalMesh, ...]:
        """The mesh of every device, in the order of ranks."""
        return tuple(dict.fromkeys(self.meshes))

    @property
    def n_ranks(self) -> int:
        return sum(mesh.n_ranks for mesh in self.device_meshes)

    def device_of(self, rank: int) -> int:
        """The device that a rank of the world is part of."""
        return next(k for k, mesh in enumerate(self.device_meshes) if rank in mesh.ranks)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of a rank of the world."""
        return tuple(k for k, mesh in enumerate(self.meshes) if rank in mesh.ranks)

    def parameter(self, stage: int, name: str) -> StoredParameter:
        return next(p for p in self.stages[stage].parameters if p.name == name)

    @cached_property
    def loss_dtype(self) -> torch.dtype:
        """The dtype of the loss, which the last stage makes."""
        last = self.stages[-1]
        assert last.loss is not None, "a pipeline without a loss"
        return last.variables[last.loss].dtype

    def between(self, source: int, target: int) -> tuple[Crossing, ...]:
        """What crosses from one stage to another, in the order of the message."""
        return tuple(c for c in self.crossings if (c.source, c.target) == (source, target))


@lru_cache(maxsize=16)
def _schedule(
    order: ScheduleFactory,
    devices: tuple[int, ...],
    n_microbatches: int,
    between: frozenset[Transfer],
) -> Schedule:
    return lower(order(devices, n_microbatches), between)


def mesh_devices(meshes: Sequence[LogicalMesh]) -> tuple[int, ...]:
    """The device of every stage: stages with equal meshes are on one."""
    numbers = {mesh: k for k, mesh in enumerate(dict.fromkeys(meshes))}
    return tuple(numbers[mesh] for mesh in meshes)


def _crossings(stages: Sequence[StageProgram]) -> tuple[Crossing, ...]:
    made: dict[str, tuple[int, Boundary]] = {}
    found = []
    for stage, program in enumerate(stages):
        for received in program.received:
            if received.value not in made:
                raise VerificationError(
                    f"stage {stage} reads {received.key}, which no earlier stage sends"
                )
            source, sent = made[received.value]
            same = (sent.local.dims, sent.local.dtype, sent.local.has_grad)
            if same != (received.local.dims, received.local.dtype, received.local.has_grad):
                raise VerificationError(
                    f"{received.key} is one tensor on stage {source}, another on stage {stage}"
                )
            found.append(Crossing(source, stage, sent, received))
        made |= {sent.value: (stage, sent) for sent in program.sent}
    return tuple(found)


def _ties(stages: Sequence[StageProgram]) -> tuple[Tie, ...]:
    places: dict[str, list[tuple[int, str]]] = {}
    for stage, program in enumerate(stages):
        for p in program.parameters:
            places.setdefault(p.mirror_of or p.name, []).append((stage, p.name))
    return tuple(Tie(tuple(at)) for at in places.values() if len(at) > 1)
