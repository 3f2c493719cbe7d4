"""What a plan with several stages adds to its tables: stages, crossings, ties, the schedule.

modules     the modules of a stage, folded: `transformer.wte, transformer.h.0-5`. A block that two
            stages share is marked `(part)`
crossing    bytes of one microbatch over all ranks: every element crosses once
grid        a row per device, a column per clock. Every action takes one clock and messages take
            none, so the grid shows the order of a step and not its time
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from autopar.program.lines import CallLine, Crossing, Pipeline, StageProgram, Tie
from autopar.report.blocks import Block
from autopar.report.tables import ParameterRow, parameter_rows
from autopar.schedule import Action, Schedule, clocks, start_times

# Clocks of the grid that are shown: the start of a step shows the pattern.
N_CLOCKS = 10


@dataclass(frozen=True)
class StageRow:
    """One stage; `ranks` is `2-3`, `axes` is `dp=1 x tp=2`."""

    stage: int
    ranks: str
    axes: str
    modules: str


@dataclass(frozen=True)
class ParameterTable:
    """How the parameters of some stages are stored and used."""

    stages: tuple[int, ...]
    axis_names: tuple[str, ...]
    rows: tuple[ParameterRow, ...]

    @property
    def title(self) -> str:
        each = " each" if len(self.stages) > 1 else ""
        return f"stage{'s' if each else ''} {span(self.stages)}{each}"


@dataclass(frozen=True)
class CrossingRow:
    """A value sent between stages; `backward_bytes` is None if no gradient returns."""

    value: str
    stages: str
    tensor: str
    sent: str
    received: str
    forward_bytes: int
    backward_bytes: int | None


@dataclass(frozen=True)
class ScheduleGrid:
    """The first clocks of a schedule; a cell is an action, or None if the device is idle."""

    rows: tuple[tuple[Action | None, ...], ...]
    n_clocks: int


def axes_text(names: Sequence[str], sizes: Sequence[int], times: str = " x ") -> str:
    """`dp=2 x tp=4`."""
    return times.join(f"{name}={size}" for name, size in zip(names, sizes, strict=True))


def span(numbers: Sequence[int]) -> str:
    """`2-5` for consecutive numbers."""
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"


def stage_rows(pipeline: Pipeline) -> list[StageRow]:
    """Every stage, first to last."""
    modules = [_modules(program) for program in pipeline.stages]
    shared = Counter(block for found in modules for block in found if isinstance(block, Block))
    return [
        StageRow(
            stage,
            span(mesh.ranks),
            axes_text(mesh.names, mesh.sizes),
            ", ".join(_folded(found, {b for b, n in shared.items() if n > 1})),
        )
        for stage, (mesh, found) in enumerate(zip(pipeline.meshes, modules, strict=True))
    ]


def _modules(program: StageProgram) -> list[Block | str]:
    """Repeated blocks and other modules with operators, in order of first use.

    Modules that contain others are left out: their own operators are glue, and a name such as
    `transformer` says little.
    """
    paths = dict.fromkeys(
        line.key.rpartition("/")[0] for line in program.body if isinstance(line, CallLine)
    )
    inner = [p for p in paths if p and not any(q.startswith(f"{p}.") for q in paths)]
    return list(dict.fromkeys(b if (b := Block.of(p)).index else p for p in inner or paths))


def _folded(modules: Sequence[Block | str], shared: set[Block]) -> Iterable[str]:
    """Names of modules; consecutive whole blocks of one list become one name."""
    run: list[Block] = []
    for module in [*modules, ""]:
        follows = (
            isinstance(module, Block)
            and bool(run)
            and module not in shared
            and run[-1].prefix == module.prefix
            and int(run[-1].index) + 1 == int(module.index)
        )
        if run and not follows:
            yield _span_of(run)
            run = []
        if isinstance(module, Block) and module not in shared:
            run.append(module)
        elif module:
            yield f"{module.path} (part)" if isinstance(module, Block) else module


def _span_of(run: Sequence[Block]) -> str:
    indices = span([int(block.index) for block in run])
    return f"{run[0].prefix}.{indices}" if run[0].prefix else indices


def parameter_tables(pipeline: Pipeline) -> list[ParameterTable]:
    """A table of parameters per stage; consecutive stages with equal tables share one."""
    tables: list[ParameterTable] = []
    for stage, program in enumerate(pipeline.stages):
        table = ParameterTable((stage,), program.axis_names, tuple(parameter_rows(program)))
        if tables and replace(tables[-1], stages=(stage,)) == table:
            table = replace(table, stages=(*tables.pop().stages, stage))
        tables.append(table)
    return tables


def crossing_rows(pipeline: Pipeline) -> list[CrossingRow]:
    """Every value that crosses, in order of the stage that makes it."""
    return [
        CrossingRow(
            c.sent.key,
            f"{c.source} -> {c.target}",
            _tensor_text(c),
            str(c.sent.local.spec),
            str(c.received.local.spec),
            *crossing_bytes(c, pipeline),
        )
        for c in pipeline.crossings
    ]


def crossing_bytes(crossing: Crossing, pipeline: Pipeline) -> tuple[int, int | None]:
    """Bytes of one microbatch over all ranks, forward and backward."""
    local = crossing.sent.local
    n_elements = math.prod(size for factors in local.dims for size in factors)
    size_bytes = n_elements * local.dtype.itemsize
    returns = crossing.has_grad and pipeline.schedule.trains
    return size_bytes, size_bytes if returns else None


def _tensor_text(crossing: Crossing) -> str:
    """`float32[4, 16, 64]` of one microbatch, over all ranks."""
    local = crossing.sent.local
    shape = [math.prod(factors) for factors in local.dims]
    return f"{str(local.dtype).removeprefix('torch.')}{shape}"


def tie_text(pipeline: Pipeline, tie: Tie) -> str:
    """`wte.weight is on stages 0 and 1 (as lm_head.weight): their gradients are added`."""
    owner, *mirrors = tie.places
    others = [f"{stage}" + (f" (as {name})" if name != owner[1] else "") for stage, name in mirrors]
    words = ", ".join([str(owner[0]), *others[:-1]]) + f" and {others[-1]}"
    is_trained = pipeline.parameter(*tie.places[0]).requires_grad
    how = ": their gradients are added after backward" if is_trained else ", frozen"
    return f"{tie.name} is on stages {words}{how}"


def ideal_bubble(pipeline: Pipeline) -> float:
    """The bubble of the schedule with equal stages and free messages, where the gradients of inputs
    and of weights take as long as forward: (p - 1) / (m + p - 1) for 1F1B."""
    schedule = pipeline.schedule
    order = replace(schedule, rows=_computes(schedule), transfers=None)
    splits = schedule.splits_backward
    whole = clocks(order, 1, 1, 1) if splits else clocks(order, 1, 2)
    return 1 - 3 * schedule.n_chunks * schedule.n_microbatches / whole


def _computes(schedule: Schedule) -> tuple[tuple[Action, ...], ...]:
    """The rows without messages."""
    return tuple(tuple(action for action in row if action.is_compute) for row in schedule.rows)


def grid(pipeline: Pipeline, n_shown: int = N_CLOCKS) -> ScheduleGrid:
    """The first `n_shown` clocks of the schedule, without its messages."""
    order = replace(pipeline.schedule, rows=_computes(pipeline.schedule), transfers=None)
    times = start_times(order, lambda action: 1)
    lines = []
    for line, actions in zip(times, order.rows, strict=True):
        at = {int(start): action for start, action in zip(line, actions, strict=True)}
        lines.append(tuple(at.get(i) for i in range(min(n_shown, int(clocks(order))))))
    return ScheduleGrid(tuple(lines), int(clocks(order)))
