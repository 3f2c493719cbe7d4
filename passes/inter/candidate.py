"""A candidate plan before it is solved: the cut into stages, and a submesh for each stage."""

from __future__ import annotations

from dataclasses import dataclass, replace

from autopar.caching import once
from autopar.mesh import LogicalMesh
from autopar.passes.intra import Constraints
from autopar.program.graph import Program
from autopar.program.lines import mesh_devices


@dataclass(frozen=True)
class StageLayout:
    """One stage of a candidate: the view of its ranks, and its constraints."""

    view: LogicalMesh
    constraints: Constraints


@dataclass(frozen=True)
class Candidate:
    """A pipeline whose stages end after `ends` operators (`passes/analysis/cutting.py`).

    `recipe` is the plain recipe that places it: "data parallel", "ZeRO-3" or "Megatron". `row` is
    what people call it among the alternatives, where it has no plan; empty: its name. Stages with
    equal views are on one device, as `schedule` places them.
    """

    name: str
    ends: tuple[int, ...]
    stages: tuple[StageLayout, ...]
    n_microbatches: int
    recipe: str = ""
    row: str = ""
    schedule: str = "1f1b"

    @property
    def devices(self) -> tuple[int, ...]:
        """The device of every stage."""
        return mesh_devices([layout.view for layout in self.stages])

    @property
    def has_chunks(self) -> bool:
        """Has a device several stages?"""
        return len({*self.devices}) < len(self.stages)

    def restrict(self, *words: str) -> Candidate:
        """The same with more words in `forbid`."""
        stages = (
            replace(s, constraints=replace(s.constraints, forbid=s.constraints.forbid.union(words)))
            for s in self.stages
        )
        return replace(self, stages=tuple(stages))

    @property
    def is_recipe(self) -> bool:
        """Does a recipe place its operators, on the abstract machine of recipes?"""
        return any(layout.constraints.is_recipe for layout in self.stages)


@once
def n_operators(program: Program) -> int:
    return sum(1 for _ in program.operators)
