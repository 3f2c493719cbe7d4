"""Replay: turns the texts of a plan back into a `Strategy`, and refuses what is not legal.

On every axis, an operator's specs must be one of the strategies that its rule allows, and must
divide. Every storage must be legal and convertible. Saved plans run this way, every rank takes
rank 0's plan this way, and hand-edited plans are checked this way.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from autopar.errors import PlanError
from autopar.manual import Recompute
from autopar.mesh import LogicalMesh
from autopar.passes.analysis import Analysis, PlacedOperator, Side, is_boundary_spec
from autopar.passes.intra import joint_lowering
from autopar.placement import I, Placement, R, Spec, TensorType, illegal_reason
from autopar.plans import (
    StageRecord,
    operator_text,
    parse_operator,
    parse_recomputed,
    parse_spec,
    parse_storage,
    recomputed_text,
    storage_text,
)
from autopar.program.graph import Program
from autopar.program.lines import OperatorStrategy, Recomputed, Storage, Strategy
from autopar.rules import AxisStrategy


def stage_record(
    analysis: Analysis, strategy: Strategy, view: LogicalMesh, mesh_shape: tuple[int, int]
) -> StageRecord:
    """A stage's strategy as the texts of a plan."""
    program = analysis.program
    first = next(program.operators)
    return StageRecord(
        begins_at=program.keys[first.name],
        mesh_shape=mesh_shape,
        axes=view.axes,
        parameters={
            info.name: storage_text(strategy.storage[name])
            for name, info in program.parameters.items()
        },
        operators={
            program.keys[name]: operator_text(chosen.inputs, chosen.outputs)
            for name, chosen in strategy.operators.items()
        },
        received={program.value_key(v): str(spec) for v, spec in strategy.received.items()},
        sent={program.value_key(v): str(spec) for v, spec in strategy.sent.items()},
        recomputed={
            program.keys[item.operators[0]]: recomputed_text(
                item.mode, program.keys[item.operators[-1]]
            )
            for item in strategy.recomputed
        },
    )


def replay_ends(program: Program, stages: Sequence[StageRecord]) -> tuple[int, ...]:
    """Where the stages of a plan end, as `cut` (`passes/analysis/cutting.py`) takes it.

    Raises `PlanError` for a stage that begins at no operator, and for stages out of order.
    """
    position = {program.keys[node.name]: i for i, node in enumerate(program.operators)}
    starts = []
    for stage in stages:
        if stage.begins_at not in position:
            raise PlanError(
                f"a stage begins at {stage.begins_at!r}, which the captured graph does not have",
                hint="plan again for this model, inputs and mode",
            )
        starts.append(position[stage.begins_at])
    if starts != sorted(set(starts)) or starts[0] != 0:
        raise PlanError(
            f"stages begin at operators {starts}",
            hint="the first begins at the first operator, each later one after the one before",
        )
    return (*starts[1:], len(position))


def replay(
    analysis: Analysis,
    stage: StageRecord,
    n_microbatches: int,
    forbid: Collection[str] = (),
) -> Strategy:
    """The strategy that the texts of a plan describe, for one stage's program.

    Raises `PlanError` for unknown and missing names, and for illegal placements, with the reason.
    """
    program, sizes = analysis.program, tuple(stage.axes.values())
    types = analysis.microbatch_types(n_microbatches).tensors
    storage = _storages(analysis, stage.parameters, types, sizes)
    placed = analysis.placed_operators(n_microbatches)
    _check_names("operator", [program.keys[p.name] for p in placed], stage.operators)
    operators = {
        item.name: _operator(analysis, item, stage.operators[program.keys[item.name]], types, sizes)
        for item in placed
    }
    return Strategy(
        operators,
        storage,
        types,
        analysis.batch.cells,
        analysis.batch.size,
        n_microbatches,
        "sequence" in forbid,
        _boundaries(program, program.received, stage.received, types, sizes, "received"),
        _boundaries(program, program.sent, stage.sent, types, sizes, "sent"),
        _recomputed(program, stage.recomputed),
    )


def _recomputed(program: Program, texts: Mapping[str, str]) -> tuple[Recomputed, ...]:
    """The recomputed ranges of operators, in order; they must not overlap."""
    names = [node.name for node in program.operators]
    position = {program.keys[name]: i for i, name in enumerate(names)}
    found: list[tuple[int, int, Recompute]] = []
    for first, text in texts.items():
        mode, last = parse_recomputed(text, first)
        for key in (first, last):
            if key not in position:
                raise PlanError(
                    f"the plan recomputes {key!r}, which the captured graph does not have",
                    hint="plan again for this model, inputs and mode",
                )
        found.append((position[first], position[last], mode))
    found.sort()
    end = -1
    for start, stop, _ in found:
        if start <= end or stop < start:
            raise PlanError(
                f"the plan recomputes a range from {program.keys[names[start]]!r} on that ends "
                "before it begins, or overlaps another range",
                hint="ranges end where they begin or later, and do not overlap",
            )
        end = stop
    return tuple(Recomputed(mode, tuple(names[a : b + 1])) for a, b, mode in found)


def _boundaries(
    program: Program, values: Sequence[str], texts: Mapping[str, str],
    types: Mapping[str, TensorType], sizes: Sequence[int], side: Side,
) -> dict[str, Spec]:  # fmt: skip
    """The specs of values that cross a boundary, on one side of it.

    A value that the plan does not name crosses only for the user's outputs.
    """
    keys = {program.value_key(v): v for v in values}
    unknown = sorted(set(texts) - set(keys))
    if unknown:
        raise PlanError(
            f"the plan does not fit the captured graph: nothing is {side} under {unknown[:3]}",
            hint="plan again for this model, inputs and mode",
        )
    found: dict[str, Spec] = {}
    for key, text in texts.items():
        spec = parse_spec(text, f"{side} {key}")
        if not is_boundary_spec(types[keys[key]], spec, sizes, side):
            rest = "R" if side == "sent" else "P"
            raise PlanError(
                f"{side} {key}: {spec} is not legal here",
                hint=f"on an axis of several ranks a value crosses S(dim), or {rest}",
            )
        found[keys[key]] = spec
    return found


def _check_names(what: str, wanted: Sequence[str], given: Mapping[str, str]) -> None:
    unknown = sorted(set(given) - set(wanted))
    missing = sorted(set(wanted) - set(given))
    if unknown or missing:
        raise PlanError(
            f"the plan does not fit the captured graph: {what}s it does not have: "
            f"{unknown[:5] or 'none'}; {what}s the plan lacks: {missing[:5] or 'none'}",
            hint="plan again for this model, inputs and mode",
        )


def _storages(
    analysis: Analysis,
    texts: Mapping[str, str],
    types: Mapping[str, TensorType],
    sizes: Sequence[int],
) -> dict[str, Storage]:
    program = analysis.program
    _check_names("parameter", [p.name for p in program.parameters.values()], texts)
    out: dict[str, Storage] = {}
    for name, info in program.parameters.items():
        storage = parse_storage(texts[info.name], info.name)
        reason = illegal_reason(types[name], storage.spec, sizes)
        for placement in storage.spec.placements:
            if placement.kind not in "IS":
                reason = reason or f"{placement} is no way to store a parameter; use I or S(dim)"
        if reason:
            raise PlanError(f"parameter {info.name} cannot be stored {storage.spec}: {reason}")
        out[name] = storage
    return out


def _operator(
    analysis: Analysis,
    item: PlacedOperator,
    text: str,
    types: Mapping[str, TensorType],
    sizes: Sequence[int],
) -> OperatorStrategy:
    key = analysis.program.keys[item.name]
    where = analysis.program.where(item.name)
    inputs, outputs = parse_operator(text, key)
    if (len(inputs), len(outputs)) != (len(item.operator.inputs), len(item.operator.outputs)):
        raise PlanError(
            f"operator {key} has {len(item.operator.inputs)} inputs and "
            f"{len(item.operator.outputs)} outputs; the plan says {text!r}",
            where=where,
        )
    names = (*item.operator.inputs, *item.operator.outputs)
    for name, spec in zip(names, (*inputs, *outputs), strict=True):
        reason = illegal_reason(types[name], spec, sizes)
        if reason is None and spec.order:
            reason = "operators take several axes of one factor in axis order only"
        if reason:
            raise PlanError(f"operator {key}: {spec} is not legal here: {reason}", where=where)
    axes = [axis for axis, size in enumerate(sizes) if size > 1]
    chosen = [_match(item, axis, inputs, outputs, key, where) for axis in axes]
    functions = {s.lowering.function for s in chosen if s.lowering}
    if len(functions) > 1:
        raise PlanError(
            f"operator {key} would be replaced by {' and by '.join(sorted(functions))}",
            where=where,
            hint="shard one of the dims that need collectives inside the operator",
        )
    return OperatorStrategy(inputs, outputs, *joint_lowering(chosen, axes))


def _match(
    item: PlacedOperator, axis: int, inputs: Sequence[Spec], outputs: Sequence[Spec],
    key: str, where: str,
) -> AxisStrategy:  # fmt: skip
    """An operator's strategy on `axis`. Raises `PlanError` if no strategy fits."""
    wanted = tuple(s.placements[axis] for s in inputs), tuple(s.placements[axis] for s in outputs)
    for strategy in item.strategies:
        if (strategy.inputs, strategy.outputs) == wanted:
            return strategy
    allowed = "\n    ".join(str(s) for s in item.strategies)
    text = f"{', '.join(map(str, wanted[0]))} -> {', '.join(map(str, wanted[1]))}"
    reason = (
        "Invariant never mixes with other placements in one operator; "
        if _mixes_invariant(wanted[0])
        else ""
    )
    raise PlanError(
        f"operator {key}: {text} on axis {axis} is no strategy of its rule",
        where=where,
        hint=f"{reason}it may be\n    {allowed}",
    )


def _mixes_invariant(placements: Sequence[Placement]) -> bool:
    return I in placements and any(p != I and p != R for p in placements)
