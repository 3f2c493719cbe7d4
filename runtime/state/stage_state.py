"""What one rank keeps of a model that is cut into stages, and its ways to the other ranks.

Every stage keeps its own parameters on its own ranks; a state dict, a checkpoint and a norm
are the whole model's. What joins them is the pipeline, which every rank has:

    parameters   what this rank keeps a shard of, under this stage's names
    owners       every parameter of the model once, as the stage that owns it stores it, under
                 all names that the model has for it, those of its mirrors too
    held         owner's name -> what this rank keeps of it: the parameter, or its mirror

So names are judged over the whole model on every rank alike, and collectives go over `owners`
in one order, whoever keeps what. A mirror has its owner's value: it takes it from wherever the
owner does, and hands none out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from autopar.mesh import LogicalMesh
from autopar.program import ChangedBuffer, Pipeline, StoredParameter
from autopar.runtime.collectives import Messenger
from autopar.runtime.groups import Group
from autopar.runtime.state.names import all_names

Groups = Mapping[tuple[int, ...], Group]


@dataclass(frozen=True)
class StageState:
    """One rank's place: `groups` are its stage's; `messenger` and `world` join the stages.

    They may be missing where there is one stage, and groups where it has one rank. `device`
    is where shards are.
    """

    pipeline: Pipeline
    rank: int
    device: torch.device
    groups: Groups = field(default_factory=dict)
    messenger: Messenger | None = None
    world: Group | None = None

    @cached_property
    def stage(self) -> int:
        return self.pipeline.stage_of(self.rank)

    @property
    def mesh(self) -> LogicalMesh:
        return self.pipeline.meshes[self.stage]

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.mesh.sizes

    @cached_property
    def coordinate(self) -> tuple[int, ...]:
        return self.mesh.coordinate(self.rank)

    @property
    def is_first(self) -> bool:
        """Whether this rank is the first of its stage."""
        return not any(self.coordinate)

    @property
    def parameters(self) -> tuple[StoredParameter, ...]:
        return self.pipeline.stages[self.stage].parameters

    @cached_property
    def owners(self) -> tuple[StoredParameter, ...]:
        return tuple(p for stage in range(self.pipeline.n_stages) for p in self.owned_by(stage))

    def owned_by(self, stage: int) -> tuple[StoredParameter, ...]:
        """The parameters that a stage owns, under all their names."""
        return tuple(
            replace(p, aliases=tuple(n for n in self._names[p.name] if n != p.name))
            for p in self.pipeline.stages[stage].parameters
            if p.mirror_of is None
        )

    def first_rank_of(self, owned: StoredParameter) -> int:
        """The first rank of the stage that owns a parameter."""
        for program, mesh in zip(self.pipeline.stages, self.pipeline.meshes, strict=True):
            if any(p.name == owned.name and p.mirror_of is None for p in program.parameters):
                return mesh.first_rank
        raise AssertionError(f"no stage owns {owned.name}")

    @cached_property
    def held(self) -> Mapping[str, StoredParameter]:
        return {owner_name(p): p for p in self.parameters}

    @cached_property
    def canonical(self) -> Mapping[str, str]:
        """Every name of every parameter -> its owner's."""
        return {name: owner for owner, names in self._names.items() for name in names}

    @cached_property
    def _names(self) -> Mapping[str, Sequence[str]]:
        """Owner's name -> all names, the owner's own first."""
        found: dict[str, dict[str, None]] = {}
        for program in self.pipeline.stages:
            for p in program.parameters:
                found.setdefault(owner_name(p), {}).update(dict.fromkeys(all_names(p)))
        return {owner: tuple(names) for owner, names in found.items()}

    @property
    def changed(self) -> tuple[ChangedBuffer, ...]:
        """The buffers that this stage's steps change."""
        return self.pipeline.stages[self.stage].changed

    @cached_property
    def changed_anywhere(self) -> tuple[ChangedBuffer, ...]:
        """The persistent buffers that steps change, of all stages in order."""
        stages = self.pipeline.stages
        return tuple(b for program in stages for b in program.changed if b.persistent)

    @cached_property
    def entries(self) -> tuple[StoredParameter | ChangedBuffer, ...]:
        """What of a state dict steps change, over all stages; the rest of it is constant."""
        return (*self.owners, *self.changed_anywhere)

    def first_rank_that_changes(self, buffer: ChangedBuffer) -> int:
        """The first rank of the stage that changes a buffer: no other stage holds it."""
        stages = zip(self.pipeline.stages, self.pipeline.meshes, strict=True)
        return next(mesh.first_rank for program, mesh in stages if buffer in program.changed)

    def hands_out(self, parameter: StoredParameter) -> bool:
        """Whether no earlier stage has a parameter under this one's name."""
        earlier = self.pipeline.stages[: self.stage]
        return not any(parameter.name in all_names(p) for s in earlier for p in s.parameters)


def owner_name(parameter: StoredParameter) -> str:
    """The name that the model's first user of the parameter has for it."""
    return parameter.mirror_of or parameter.name
