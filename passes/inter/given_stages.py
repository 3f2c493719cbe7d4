"""The stages that the user gives: modules and a submesh for each (`stages=[...]`)."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from autopar.errors import MeshError, OptionError
from autopar.mesh import Mesh
from autopar.options import StageOption
from autopar.passes.analysis import Analysis
from autopar.program.graph import Program


def given_ends(analysis: Analysis, mesh: Mesh, stages: Sequence[StageOption]) -> tuple[int, ...]:
    """After how many operators the stages end.

    Raises `MeshError` if their submeshes do not add up to the mesh, or have other shapes;
    `OptionError` as `ends_by_modules`, and if a stage has nothing to optimise.
    """
    held = sum(s.n_ranks for s in stages)
    if held != mesh.n_ranks:
        raise MeshError(
            f"stages= hold {held} ranks, the mesh has {mesh.n_ranks}",
            hint="make the submeshes add up to the mesh",
        )
    ends = ends_by_modules(analysis.program, stages)
    idle = stage_without_parameters(analysis, ends)
    if idle is not None:
        raise OptionError(
            f"stage {idle} of stages= has no parameter that learns, so nothing to optimise",
            hint="give it a module with parameters",
        )
    first_rank = 0
    for stage in stages:
        _check_submesh(mesh, first_rank, stage)
        first_rank += stage.n_ranks
    return ends


def stage_without_parameters(analysis: Analysis, ends: tuple[int, ...]) -> int | None:
    """The first of several stages that no optimizer can be made for; None if there is none."""
    operators, parameters = analysis.operators, analysis.program.parameters
    learns = {name for name, info in parameters.items() if info.requires_grad}
    for k, (first, end) in enumerate(itertools.pairwise((0, *ends))):
        read = (name for operator in operators[first:end] for name in operator.inputs)
        if len(ends) > 1 and learns.isdisjoint(read):
            return k
    return None


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


def _innermost(module: str, owner: dict[str, int]) -> str | None:
    """The innermost module of `owner` that is `module` or contains it."""
    while module:
        if module in owner:
            return module
        module = module.rpartition(".")[0]
    return None


def _check_submesh(mesh: Mesh, first_rank: int, stage: StageOption) -> None:
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
