"""The kind of each result's sharding on each axis, which the picture shows as a colour.

    data         sharded along the batch
    tensor       sharded along a factor of a parameter
    sequence     sharded along another dim of an activation
    replicated   R or I
    partial      P

A sharded result is `tensor` if its operator reads a parameter that is sharded on the axis. Else it
takes the kind of its inputs. A sharded result of a reshard, or from another stage, is `data` if it
is sharded along the batch, and `sequence` if not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from autopar.placement import Placement, Spec
from autopar.program import GatherLine, Local, MoveLine, StageProgram, StoredParameter

KINDS = ("data", "tensor", "sequence", "replicated", "partial")


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


def microbatch_rows(programs: Iterable[StageProgram]) -> int:
    """Rows of a microbatch over all ranks; 0 if no input has a batch."""
    return next(
        (
            d.dims[d.batch_cell[0]][d.batch_cell[1]]
            for program in programs
            for d in program.delivered
            if d.batch_cell
        ),
        0,
    )


def shard_kinds(program: StageProgram, batch_size: int | None = None) -> dict[str, tuple[str, ...]]:
    """Variable -> on each axis, one of `KINDS`."""
    parameters = parameter_variables(program)
    if batch_size is None:
        batch_size = microbatch_rows([program])
    out: dict[str, tuple[str, ...]] = {}
    for received in program.received:
        local = received.local
        out[local.name] = tuple(
            _kind_after_reshard(local, p, batch_size) for p in local.spec.placements
        )
    for d in program.delivered:
        kinds = ("data" if p.is_shard and p.cell == d.batch_cell else _plain(p)
                 for p in d.local.spec.placements)  # fmt: skip
        out[d.local.name] = tuple(kinds)
    for line in program.body:
        for result in line.outs:
            placements = result.spec.placements
            kinds = (
                _shard_kind(line_reads, axis, out, parameters)
                if p.is_shard and (line_reads := line.reads)
                else _plain(p)
                for axis, p in enumerate(placements)
            )
            found = list(kinds)
            if isinstance(line, MoveLine):
                for axis in line.move.axes:
                    found[axis] = _kind_after_reshard(result, placements[axis], batch_size)
            out[result.name] = tuple(found)
    return out


def _plain(placement: Placement) -> str:
    return {"S": "sequence", "P": "partial"}.get(placement.kind, "replicated")


def _shard_kind(
    names: Sequence[str],
    axis: int,
    kinds: Mapping[str, tuple[str, ...]],
    parameters: Mapping[str, ParameterUsed],
) -> str:
    """The kind of a sharded result: from its parameters, else from its inputs."""
    if any(n in parameters and parameters[n].spec.placements[axis].is_shard for n in names):
        return "tensor"
    found = {kinds[n][axis] for n in names if n in kinds}
    return next((kind for kind in KINDS[:3] if kind in found), "sequence")


def _kind_after_reshard(result: Local, placement: Placement, batch_size: int) -> str:
    """The kind of a reshard's result; the batch is the outermost factor of the first dim."""
    is_batch = placement.cell == (0, 0) and bool(result.dims and result.dims[0])
    if placement.is_shard and is_batch and result.dims[0][0] == batch_size:
        return "data"
    return _plain(placement)
