"""The part of a pipelined model that one rank stores, and its connections to the other ranks.

Every stage keeps its own parameters on its own ranks. State dicts, checkpoints and norms cover the
whole model. Every rank has the pipeline, and derives from it

    stages       those of this rank, which all have its mesh
    parameters   what this rank keeps a shard of, under its stages' names
    owners       every parameter of the model once, as the stage that owns it stores it, with
                 all of its names, those of its mirrors included
    held         owner's name -> what this rank keeps of it: the parameter, its mirrors, or both

So all ranks check names over the whole model, and run collectives over `owners` in the same
order, whatever they keep. A mirror has its owner's value: it loads the owner's, and is never
written itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from autopar.mesh import LogicalMesh
from autopar.program.lines import ChangedBuffer, Pipeline, StoredParameter
from autopar.runtime.collectives import Messenger
from autopar.runtime.groups import Group
from autopar.runtime.state.names import all_names
from autopar.runtime.tensors import Groups


@dataclass(frozen=True)
class StageState:
    """One rank's place in the pipeline.

    `groups` are of its mesh; `messenger` and `world` join the stages. The latter may be missing
    when there is one stage, and groups when it has one rank. Shards are on `device`.
    """

    pipeline: Pipeline
    rank: int
    device: torch.device
    groups: Groups = field(default_factory=dict)
    messenger: Messenger | None = None
    world: Group | None = None

    @cached_property
    def stages(self) -> tuple[int, ...]:
        return self.pipeline.stages_of(self.rank)

    @cached_property
    def mesh(self) -> LogicalMesh:
        return self.pipeline.device_meshes[self.pipeline.device_of(self.rank)]

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.mesh.sizes

    @cached_property
    def coordinate(self) -> tuple[int, ...]:
        return self.mesh.coordinate(self.rank)

    @property
    def is_first(self) -> bool:
        """Whether this rank is the first of its mesh."""
        return not any(self.coordinate)

    @cached_property
    def parameters(self) -> tuple[StoredParameter, ...]:
        return tuple(p for k in self.stages for p in self.pipeline.stages[k].parameters)

    @cached_property
    def owned(self) -> tuple[StoredParameter, ...]:
        """The parameters that stages of this rank own, with all their names."""
        return tuple(p for k in self.stages for p in self.owned_by(k))

    @cached_property
    def owners(self) -> tuple[StoredParameter, ...]:
        return tuple(p for stage in range(self.pipeline.n_stages) for p in self.owned_by(stage))

    def owned_by(self, stage: int) -> tuple[StoredParameter, ...]:
        """The parameters that a stage owns, with all their names."""
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
    def held(self) -> Mapping[str, Sequence[StoredParameter]]:
        found: dict[str, list[StoredParameter]] = {}
        for p in self.parameters:
            found.setdefault(owner_name(p), []).append(p)
        return found

    @cached_property
    def canonical(self) -> Mapping[str, str]:
        """Every name of every parameter -> its owner's name."""
        return {name: owner for owner, names in self._names.items() for name in names}

    @cached_property
    def _names(self) -> Mapping[str, Sequence[str]]:
        """Owner's name -> all names, the owner's own first."""
        found: dict[str, dict[str, None]] = {}
        for program in self.pipeline.stages:
            for p in program.parameters:
                found.setdefault(owner_name(p), {}).update(dict.fromkeys(all_names(p)))
        return {owner: tuple(names) for owner, names in found.items()}

    @cached_property
    def changed(self) -> tuple[ChangedBuffer, ...]:
        """The buffers that steps change on this rank."""
        return tuple(b for k in self.stages for b in self.pipeline.stages[k].changed)

    @cached_property
    def all_changed(self) -> tuple[ChangedBuffer, ...]:
        """The buffers that steps change, over all stages in order."""
        return tuple(b for program in self.pipeline.stages for b in program.changed)

    @cached_property
    def changed_anywhere(self) -> tuple[ChangedBuffer, ...]:
        """Those of them that state dicts have."""
        return tuple(b for b in self.all_changed if b.persistent)

    @cached_property
    def entries(self) -> tuple[StoredParameter | ChangedBuffer, ...]:
        """The state dict entries that steps change, over all stages; all others are constant."""
        return (*self.owners, *self.changed_anywhere)

    def first_rank_that_changes(self, buffer: ChangedBuffer) -> int:
        """The first rank of the stage that changes a buffer; no other stage holds the buffer."""
        stages = zip(self.pipeline.stages, self.pipeline.meshes, strict=True)
        return next(mesh.first_rank for program, mesh in stages if buffer in program.changed)

    def saves(self, parameter: StoredParameter) -> bool:
        """Whether this rank saves a parameter of its stages under its name: no earlier stage has
        that name."""
        programs = enumerate(self.pipeline.stages)
        first = next(
            k
            for k, program in programs
            if any(parameter.name in all_names(p) for p in program.parameters)
        )
        return first in self.stages


def owner_name(parameter: StoredParameter) -> str:
    """The parameter's name on the first stage that uses it."""
    return parameter.mirror_of or parameter.name
