"""Which shards of a stage are in head-tail order, so that all ranks have equal causal work.

One axis may be *folded*: every shard of a sequence on it is in head-tail order
(`autopar/placement/head_tail.py`). It is the axis over which the causal attention of the stage is
lowered. It is not folded if

    another causal attention shards its rows over other axes
    a sequence has no 2n equal pieces, or another axis cuts it further out
    a parameter has a shard of a sequence on it: state is stored in order

Other functions that compute offsets from shards do so of vocabularies and experts, which are no
sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopar.mesh import LogicalMesh
from autopar.passes.lowering.placed_stage import PlacedStage
from autopar.placement import Move, Spec, folds_of
from autopar.program.lines import (
    Boundary,
    CallLine,
    DetachLine,
    FactorKind,
    Line,
    Local,
    MoveLine,
    StageProgram,
)


def folded_axis(stage: PlacedStage) -> int | None:
    """The folded axis of a stage, by its placements; None if there is none."""
    strategy, sizes = stage.strategy, stage.cost.mesh.sizes
    axes = {
        chosen.lowered_axes
        for operator in stage.analysis.operators
        if operator.call.args.get("is_causal")
        and (chosen := strategy.operators[operator.name]).lowered is not None
    }
    over = next(iter(axes)) if len(axes) == 1 else ()
    if len(over) != 1:
        return None
    (axis,), parameters = over, stage.analysis.program.parameters
    # A stage with one block for all its copies stores parameters of the others, and has none.
    absent = strategy.storage.keys() - parameters.keys()
    can_fold = all(
        value not in parameters and folds_of(strategy.types[value].dims, spec, axis, sizes) > 1
        for value, spec in stage.specs()
        if value not in absent and _is_sequence(spec, stage.factor_kinds(value), axis)
    )
    return axis if can_fold else None


def _is_sequence(spec: Spec, kinds: Sequence[Sequence[FactorKind]], axis: int) -> bool:
    placement = spec.placements[axis]
    return placement.is_shard and kinds[placement.dim][placement.factor] == "sequence"


def fold_alike(
    programs: Sequence[StageProgram], meshes: Sequence[LogicalMesh]
) -> list[StageProgram] | None:
    """The stages of a pipeline, all of one mesh with the same folded axis; None if they cannot.

    Stages of one mesh hand tensors on as they are. What a factor counts, each stage tells by its
    own parameters (experts, where the router is), so two may differ about a value between them.
    """
    axes: dict[LogicalMesh, set[int]] = {}
    for program, mesh in zip(programs, meshes, strict=True):
        axes.setdefault(mesh, set()).update({program.folded} - {None})  # type: ignore[arg-type]
    found = []
    for program, mesh in zip(programs, meshes, strict=True):
        if program.folded is None and axes[mesh]:
            program = fold_shards(program, min(axes[mesh]))
        if len(axes[mesh]) > 1 or not _is_folded(program):
            return None
        found.append(program)
    orders = {
        (mesh, b.value): b.local.folded
        for program, mesh in zip(found, meshes, strict=True)
        for b in program.sent
    }
    is_one = all(
        orders.get((mesh, b.value), b.local.folded) == b.local.folded
        for program, mesh in zip(found, meshes, strict=True)
        for b in program.received
    )
    return found if is_one else None


def _is_folded(program: StageProgram) -> bool:
    """Are all its shards of sequences on the folded axis in head-tail order?"""
    axis = program.folded
    if axis is None:
        return True
    state = [p.stored for p in program.parameters] + [
        use.local for p in program.parameters for use in p.uses
    ]
    ends = [b.local for b in (*program.received, *program.sent)]
    return not any(x.shard_kind(axis) == "sequence" for x in state) and not any(
        x.shard_kind(axis) == "sequence" and x.folded is None for x in ends
    )


def fold_shards(program: StageProgram, axis: int) -> StageProgram:
    """A stage whose shards of sequences on an axis are in head-tail order, where they can be."""
    sizes = program.axis_sizes

    def place(local: Local) -> Local:
        can_fold = folds_of(local.dims, local.spec, axis, sizes) > 1
        is_folded = can_fold and local.shard_kind(axis) == "sequence"
        return replace(local, folded=axis) if is_folded else local

    def fold_line(line: Line) -> Line:
        match line:
            case MoveLine():
                out = place(line.out)
                ends = (known[line.source], out)
                move = _folded_move(line.move, ends, sizes[axis])
                found: Line = replace(line, out=out, move=move)
            case CallLine():
                found = replace(line, outs=tuple(map(place, line.outs)))
            case DetachLine():
                found = replace(line, out=place(line.out))
            case _:
                return line
        known.update({out.name: out for out in found.outs})
        return found

    def fold_boundary(of: Boundary) -> Boundary:
        return replace(of, local=place(of.local))

    folded = replace(
        program,
        delivered=tuple(replace(d, local=place(d.local)) for d in program.delivered),
        received=tuple(map(fold_boundary, program.received)),
        sent=tuple(map(fold_boundary, program.sent)),
    )
    known = dict(folded.given_variables)
    return replace(folded, body=tuple(map(fold_line, program.body)))


def _folded_move(move: Move, ends: tuple[Local, Local], n_ranks: int) -> Move:
    """A move between two variables, with the splits of folded shards folded."""
    cut = [local for local in ends if local.spec.placements[move.axes[0]].is_shard]
    splits = zip(move.splits, cut, strict=True)
    folded = (
        replace(split, folds=n_ranks) if local.folded in move.axes else split
        for split, local in splits
    )
    return replace(move, splits=tuple(folded))
