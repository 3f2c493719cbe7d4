"""The kind of each result's sharding on each axis, which the picture shows as a colour.

data         sharded along the rows of the batch
tensor       sharded along a factor of a weight
sequence     sharded along another dim of an activation
replicated   R or I
partial      P
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.placement import Spec
from autopar.program.lines import GatherLine, MoveLine, ShardKind, StageProgram, StoredParameter


@dataclass(frozen=True)
class ParameterUsed:
    """A parameter as one node uses it; `gathers` are the moves of a gather at each use."""

    parameter: StoredParameter
    spec: Spec
    gathers: tuple[MoveLine, ...] = ()


def parameter_variables(program: StageProgram) -> dict[str, ParameterUsed]:
    """Variable -> the parameter that it holds, as it is used."""
    stored = {p.name: p for p in program.parameters}
    out = {
        use.local.name: ParameterUsed(p, use.local.spec)
        for p in program.parameters
        for use in p.uses
    }
    for line in program.body:
        if isinstance(line, GatherLine):
            parameter = stored[line.parameter]
            out[line.out.name] = ParameterUsed(parameter, line.out.spec, line.moves)
    return out


def shard_kinds(program: StageProgram) -> dict[str, tuple[ShardKind, ...]]:
    """Variable -> on each axis, its kind of sharding."""
    placed = [item.local for item in program.received]
    placed += [item.local for item in program.delivered]
    placed += [out for line in program.body for out in line.outs]
    axes = range(len(program.axis_sizes))
    return {local.name: tuple(map(local.shard_kind, axes)) for local in placed}
