"""A candidate plan before it is solved: stages of the program, each on its part of the mesh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.errors import OptionError
from autopar.mesh import LogicalMesh, Mesh
from autopar.options import StageOption
from autopar.passes.constraints import Constraints
from autopar.program import Program


@dataclass(frozen=True)
class StageLayout:
    """One stage of a candidate: the ranks it has, how they are seen, and what it may not do."""

    view: LogicalMesh
    constraints: Constraints


@dataclass(frozen=True)
class Candidate:
    """Stages that end after `ends` operators (`passes.cut.cut`), with their microbatches."""

    name: str
    ends: tuple[int, ...]
    stages: tuple[StageLayout, ...]
    n_microbatches: int


def n_operators(program: Program) -> int:
    return sum(1 for _ in program.operators)


def ends_by_modules(program: Program, stages: Sequence[StageOption]) -> tuple[int, ...]:
    """Where stages end that hold these modules.

    An operator belongs to the stage that names the innermost module around it; one that no
    stage names stays with the operator before it.

    Raises `OptionError` for a module without operators, and for stages out of order.
    """
    owner = {name: k for k, stage in enumerate(stages) for name in stage.modules}
    found: set[str] = set()
    last_of_stage = [0] * len(stages)
    current = 0
    for position, node in enumerate(program.operators):
        module = program.keys[node.name].rpartition("/")[0]
        named = _innermost(module, owner)
        if named is not None:
            found.add(named)
            if owner[named] < current:
                raise OptionError(
                    f"{program.where(node.name)} is in stage {owner[named]} by stages=, but runs "
                    f"after stage {current} has begun",
                    hint="stages hold consecutive operators; name the modules in running order",
                )
            current = owner[named]
        last_of_stage[current] = position + 1
    missing = [name for name in owner if name not in found]
    if missing:
        modules = dict.fromkeys(key.rpartition("/")[0] for key in program.keys.values())
        raise OptionError(
            f"stages= names {missing[0]!r}, which runs no operator",
            hint=f"modules are such as {', '.join([m for m in modules if m][:6])}",
        )
    ends = tuple(last_of_stage)
    empty = next((k for k, end in enumerate(ends) if end == 0), None)
    if empty is not None:
        raise OptionError(f"stage {empty} of stages= holds no operator")
    return ends


def _innermost(module: str, owner: dict[str, int]) -> str | None:
    """The longest name that is `module` or a module around it."""
    while module:
        if module in owner:
            return module
        module = module.rpartition(".")[0]
    return None


def submesh_shape(mesh: Mesh, first_rank: int, n_ranks: int) -> tuple[int, int]:
    """(nodes, devices per node) of consecutive ranks; (1, n) where they are no rectangle."""
    per_node = mesh.devices_per_node
    if n_ranks > per_node and first_rank % per_node == 0 and n_ranks % per_node == 0:
        return n_ranks // per_node, per_node
    return 1, n_ranks
