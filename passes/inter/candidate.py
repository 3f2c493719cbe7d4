"""A candidate plan before it is solved: the cut into stages, and a submesh for each stage."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.errors import MeshError, OptionError
from autopar.mesh import LogicalMesh, Mesh
from autopar.options import StageOption
from autopar.passes.analysis import Analysis
from autopar.passes.intra import Constraints
from autopar.program import Program


@dataclass(frozen=True)
class StageLayout:
    """One stage of a candidate: the view of its ranks, and its constraints."""

    view: LogicalMesh
    constraints: Constraints


@dataclass(frozen=True)
class Candidate:
    """A pipeline whose stages end after `ends` operators (`passes/analysis/cutting.py`).

    `recipe` is the plain recipe that places it: "data parallel", "ZeRO-3" or "Megatron".
    """

    name: str
    ends: tuple[int, ...]
    stages: tuple[StageLayout, ...]
    n_microbatches: int
    recipe: str = ""

    def forbidding(self, *words: str) -> Candidate:
        """The same with more words in `forbid`."""
        stages = (
            replace(s, constraints=replace(s.constraints, forbid=s.constraints.forbid.union(words)))
            for s in self.stages
        )
        return replace(self, stages=tuple(stages))

    @property
    def is_recipe(self) -> bool:
        """Does a recipe place its operators, on the abstract machine of recipes?"""
        return any(layout.constraints.roles for layout in self.stages)


def n_operators(program: Program) -> int:
    return sum(1 for _ in program.operators)


def ends_by_modules(program: Program, stages: Sequence[StageOption]) -> tuple[int, ...]:
    """Where the stages end, given the modules of each.

    An operator belongs to the stage that names the innermost module around it. If no stage names
    one, the operator stays with the operator before it. A named module may run no operator: a
    dropout that is off, or tables that are constants.

    Raises `OptionError` for a name that is no module, for stages out of order, and for a stage
    without operators.
    """
    owner = {name: k for k, stage in enumerate(stages) for name in stage.modules}
    named: dict[str, int] = {}
    for key in program.keys.values():
        module = _innermost(key.rpartition("/")[0], owner)
        if module is not None:
            named[key] = owner[module]
    unknown = [name for name in owner if name not in program.modules]
    if unknown:
        modules = dict.fromkeys(key.rpartition("/")[0] for key in program.keys.values())
        raise OptionError(
            f"stages= names {unknown[0]!r}, which is no module of the model",
            hint=f"modules are such as {', '.join([m for m in modules if m][:6])}",
        )
    return ends_by_stage(program, named, len(stages))


def ends_by_stage(program: Program, stage_of: Mapping[str, int], n_stages: int) -> tuple[int, ...]:
    """Where the stages end, given the stage of some operators by key.

    Every other operator joins the stage of the operator before it.

    Raises `OptionError` for an operator that runs after a later stage began, and for an empty
    stage.
    """
    ends = [0] * n_stages
    current = 0
    for position, node in enumerate(program.operators):
        stage = stage_of.get(program.keys[node.name], current)
        if stage < current:
            raise OptionError(
                f"{program.where(node.name)} belongs to stage {stage}, but runs after stage "
                f"{current} has begun",
                hint="stages hold consecutive operators; name the modules in running order",
            )
        current = stage
        ends[current] = position + 1
    empty = next((k for k, end in enumerate(ends) if end == 0), None)
    if empty is not None:
        raise OptionError(f"stage {empty} holds no operator")
    return tuple(ends)


def crossing_bytes(analysis: Analysis) -> list[float]:
    """Bytes that cross between operators i and i + 1, for the global batch; [operators - 1]."""
    operators, types = analysis.operators, analysis.types.tensors
    made: dict[str, int] = {}
    last_read: dict[str, int] = {}
    for i, operator in enumerate(operators):
        made |= dict.fromkeys(operator.outputs, i)
        last_read |= dict.fromkeys(operator.inputs, i)
    change = [0.0] * (len(operators) + 1)
    for value, first in made.items():
        if value in last_read:
            change[first] += types[value].size_bytes
            change[last_read[value]] -= types[value].size_bytes
    return list(itertools.accumulate(change))[: len(operators) - 1]


def _innermost(module: str, owner: dict[str, int]) -> str | None:
    """The innermost module of `owner` that is `module` or contains it."""
    while module:
        if module in owner:
            return module
        module = module.rpartition(".")[0]
    return None


def check_submesh(mesh: Mesh, first_rank: int, stage: StageOption) -> None:
    """Check that the ranks from `first_rank` on form the submesh that the stage asks for.

    A stage holds consecutive ranks: some of one node, or whole nodes.

    Raises `MeshError` if those ranks have another shape.
    """
    last_rank, shape = first_rank + stage.n_ranks - 1, stage.mesh_shape
    in_a_node = mesh.node_of(first_rank) == mesh.node_of(last_rank)
    found = mesh.submesh_shape(first_rank, stage.n_ranks)
    if shape == found and (found[0] > 1 or in_a_node):
        return
    raise MeshError(
        f"stages= asks a submesh {shape} for {', '.join(stage.modules)}; ranks {first_rank} to "
        f"{last_rank} of the mesh {mesh.shape} are "
        + (f"{found}" if found[0] > 1 or in_a_node else "neither in one node nor whole nodes"),
        hint="a stage holds consecutive ranks: (1, n) inside a node, or (nodes, "
        f"{mesh.devices_per_node})",
    )
