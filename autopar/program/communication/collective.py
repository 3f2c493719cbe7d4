"""Which collectives a step executes, in order, read off the lines of the stage programs.

    step  =  gathers of parameters (fused)                          once
             per microbatch: its forward, in order                  forward, loss
                             its backward (`order.py`)              backward, grad_sync
                             ZeRO-2 gradients back to storage       (fused)
             gradients back to storage (fused)                      once
  with several stages, besides
             what a rank sends to other stages                      p2p, once per microbatch
             gradients of tied parameters, exchanged and summed     grad_sync, once
             the loss to all ranks                                  once

A line has a backward if the loss, or what later stages read, depends on it through tensors with
gradient. What a recomputed segment repeats has the phase "backward", but for parameter gathers.

The runtime records exactly these calls, the cost model prices them, and the verifier proves that
they cannot deadlock.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from autopar.caching import once
from autopar.placement import COLLECTIVES, PrimitiveKind
from autopar.program.communication.backwards import Backward
from autopar.program.communication.bucketing import BUCKET_BYTES, Bucket, buckets, sync_bucket_bytes
from autopar.program.communication.gathers import gathers_at
from autopar.program.communication.messages import Messages, Piece, copy_axes, tie_exchanges
from autopar.program.communication.order import (
    Forward,
    Gather,
    Reduction,
    Start,
    Wait,
    Work,
    backward_parts,
    calls_beside,
    forward_order,
    positions_of,
)
from autopar.program.lines import (
    CallLine,
    GatherLine,
    Line,
    MoveLine,
    ParameterUse,
    Pipeline,
    StageProgram,
    StoredParameter,
    every_parameter,
    line_counts,
)

# "output": gathers of model outputs for the user; only in programs that return outputs.
# "buffer": gathers of changed buffers.
Phase = Literal[
    "forward",
    "backward",
    "grad_sync",
    "param_gather",
    "p2p",
    "loss",
    "optimizer",
    "output",
    "buffer",
]


# Parameter uses that are converted together, and a fused call for some of them, by position.
ConvertedUses = tuple[tuple[StoredParameter, ParameterUse], ...]
ConversionBucket = Bucket[tuple[PrimitiveKind, tuple[int, ...], torch.dtype]]


@dataclass(frozen=True)
class Collective:
    """Equal calls of a step, as one row.

    axis        name of the logical axis, or a tuple of names for merged axes; "pp" for a message
                to another stage, "world" for a call of all ranks
    count       calls per step on one rank, over all microbatches, after bucketing
    size_bytes  of one call: of the buffer (all_reduce), the output (all_gather), the input
                (reduce_scatter), the local send buffer (all_to_all), the tensor (send)
    tensor      the parameter names of a fused call, joined by ", "; else the operator that made
                the tensor, or the input
    """

    kind: str
    phase: str
    axis: str | tuple[str, ...]
    stage: int
    count: int
    size_bytes: int
    tensor: str

    @property
    def axes(self) -> tuple[str, ...]:
        """The names of its axes."""
        return (self.axis,) if isinstance(self.axis, str) else self.axis

    @property
    def axes_text(self) -> str:
        """`dp`, `dp+tp`."""
        return "+".join(self.axes)


@dataclass(frozen=True)
class RankCall:
    """One call of a collective by one rank, over the group along `axes`.

    `is_beside`: it runs beside compute, also in predictions (`calls_beside` in `order.py`).
    `beside_s`: else, the seconds of its own operator's compute that it runs beside.
    `under_matmul`: as of its move (`MoveLine`).
    `imbalance`: how many times as long it takes for the rank that sends or receives most.
    """

    kind: PrimitiveKind
    axes: tuple[int, ...]
    phase: str
    size_bytes: int
    tensor: str
    is_beside: bool = field(default=False, compare=False)
    beside_s: float = field(default=0.0, compare=False)
    under_matmul: bool = field(default=False, compare=False)
    imbalance: float = field(default=1.0, compare=False)


@dataclass(frozen=True)
class StepCalls:
    """The calls of a step: `before`; `forward` and `backward` per microbatch; `after`.

    If backward is split, `backward` has those of its first part, and `weights` of the second.
    """

    before: tuple[RankCall, ...]
    forward: tuple[RankCall, ...]
    backward: tuple[RankCall, ...]
    after: tuple[RankCall, ...]
    n_microbatches: int
    weights: tuple[RankCall, ...] = ()

    @property
    def microbatch(self) -> tuple[RankCall, ...]:
        """One microbatch's calls. With several stages, calls of other microbatches interleave."""
        return self.forward + self.backward + self.weights

    def __iter__(self) -> Iterator[RankCall]:
        yield from self.before
        for _ in range(self.n_microbatches):
            yield from self.microbatch
        yield from self.after

    def counted(self) -> Iterator[tuple[RankCall, int]]:
        """Every call, with its count per step."""
        for calls, count in (
            (self.before, 1),
            (self.microbatch, self.n_microbatches),
            (self.after, 1),
        ):
            for call in calls:
                yield call, count


@once
def step_calls(program: StageProgram) -> StepCalls:
    """The calls of one training step."""
    first, second = (tuple(_calls(program, order)) for order in backward_parts(program))
    returned = tuple(_return_calls(program, "micro"))
    is_split = program.splits_backward
    return StepCalls(
        tuple(_bucket_calls(conversion_buckets(program), "param_gather")),
        tuple(_calls(program, forward_order(program))),
        first if is_split else first + returned,
        tuple(_return_calls(program, "step")),
        program.n_microbatches,
        second + returned if is_split else second,
    )


def summarise(calls: StepCalls, axis_names: Sequence[str], stage: int) -> tuple[Collective, ...]:
    """One row per distinct call, in order of first occurrence."""
    counts: dict[RankCall, int] = {}
    for call, count in calls.counted():
        counts[call] = counts.get(call, 0) + count
    rows = []
    for call, count in counts.items():
        names = tuple(axis_names[a] for a in call.axes)
        axis = names[0] if len(names) == 1 else names
        rows.append(
            Collective(call.kind, call.phase, axis, stage, count, call.size_bytes, call.tensor)
        )
    return tuple(rows)


def rank_collectives(
    pipeline: Pipeline, rank: int, local_inputs: bool = False
) -> tuple[Collective, ...]:
    """The collectives and sends of one rank of the world in a step, one row per distinct call.

    `local_inputs`: ranks get only their own rows of the batch, and all_reduce the divisors.

    All ranks of a mesh make the same collectives, but not the same sends: of the ranks that hold
    the same shard only the first one sends. So the rank at coordinate 0 always takes part.
    """
    rows: list[Collective] = []
    for stage in pipeline.stages_of(rank):
        program = replace(pipeline.stages[stage], trains=pipeline.schedule.trains)
        calls = step_calls(program)
        if local_inputs:
            calls = replace(calls, before=(*calls.before, *_divisors(program)))
        rows += summarise(calls, program.axis_names, stage)
        rows += _sends(pipeline, stage, rank)
        rows += _tied(pipeline, stage, rank)
    if pipeline.n_stages > 1 and pipeline.stages[-1].loss is not None:
        size_bytes, first = pipeline.loss_dtype.itemsize, pipeline.stages_of(rank)[0]
        rows.append(Collective("all_reduce", "loss", "world", first, 1, size_bytes, "loss"))
    return tuple(rows)


def _sends(pipeline: Pipeline, stage: int, rank: int) -> list[Collective]:
    """What a rank sends to other stages: activations forward, gradients backward."""
    messages = Messages(pipeline)
    counts: dict[tuple[str, Piece], int] = {}
    for action in pipeline.schedule.actions_of(stage):
        for piece in messages.of(action) if action.is_send else ():
            if piece.source_rank == rank:
                counts[action.kind, piece] = counts.get((action.kind, piece), 0) + 1
    rows: dict[tuple[str, int, str], int] = {}
    for (kind, piece), count in counts.items():
        key = kind, piece.size_bytes, piece.tensor
        rows[key] = rows.get(key, 0) + count
    return [
        Collective("send", "p2p", "pp", stage, count, size_bytes, tensor)
        for (_, size_bytes, tensor), count in rows.items()
    ]


def _tied(pipeline: Pipeline, stage: int, rank: int) -> list[Collective]:
    """The sends and all_reduces of a rank that sum the gradients of tied parameters."""
    program, counts = pipeline.stages[stage], dict[Collective, int]()
    for exchange in tie_exchanges(pipeline):
        if stage not in exchange.stages:
            continue
        name = exchange.names[exchange.stages.index(stage)]
        calls = [
            Collective("send", "grad_sync", "pp", stage, 1, piece.size_bytes, name)
            for piece in exchange.pieces
            if piece.tensor == name and piece.source_rank == rank != piece.target_rank
        ]
        parameter = pipeline.parameter(stage, name)
        axes = tuple(program.axis_names[a] for a in copy_axes(parameter, pipeline.meshes[stage]))
        if axes:
            axis = axes[0] if len(axes) == 1 else axes
            size_bytes = parameter.stored.size_bytes
            calls.append(Collective("all_reduce", "grad_sync", axis, stage, 1, size_bytes, name))
        for call in calls:
            counts[call] = counts.get(call, 0) + 1
    return [replace(call, count=count) for call, count in counts.items()]


@once
def used_parameters(program: StageProgram) -> frozenset[str]:
    """Variables that differentiated lines read, so that backward gives them a gradient."""
    return frozenset(name for i in program.differentiated for name in program.body[i].reads)


def conversion_buckets(program: StageProgram) -> tuple[ConvertedUses, tuple[ConversionBucket, ...]]:
    """The uses converted from storage once a step, and the fused calls that do it."""
    waiting = tuple((p, use) for p in every_parameter(program) for use in p.uses if use.moves)
    steps = [[(m.move.forward, m.move.axes, m.forward_bytes) for m in u.moves] for _, u in waiting]
    return waiting, _fused([p.shard.dtype for p, _ in waiting], steps, BUCKET_BYTES)


def return_buckets(
    program: StageProgram, period: str
) -> tuple[ConvertedUses, tuple[ConversionBucket, ...]]:
    """The same for gradients of such uses, brought back to storage once per `period`.

    The last parameters come first, because backward ends with the first ones.
    """
    used = used_parameters(program)
    waiting = tuple(
        (p, use)
        for p in reversed(list(every_parameter(program)))
        for use in p.uses
        if use.moves and p.period == period and p.requires_grad and use.local.name in used
    )
    steps = [
        [(m.move.backward, m.move.axes, m.backward_bytes) for m in reversed(u.moves)]
        for _, u in waiting
    ]
    dtypes = [u.local.gradient_dtype or u.local.dtype for _, u in waiting]
    return waiting, _fused(dtypes, steps, return_bucket_bytes(waiting))


def return_bucket_bytes(uses: ConvertedUses) -> int:
    """The size of the buckets of `return_buckets`, whose uses these are."""
    return sync_bucket_bytes(sum(use.local.gradient_bytes for _, use in uses))


def _fused(
    dtypes: Sequence[torch.dtype],
    steps: Sequence[Sequence[tuple[PrimitiveKind, tuple[int, ...], int]]],
    bucket_bytes: int,
) -> tuple[ConversionBucket, ...]:
    keyed = [
        [
            ((kind, axes, dtype), size_bytes)
            for kind, axes, size_bytes in items
            if kind in COLLECTIVES
        ]
        for dtype, items in zip(dtypes, steps, strict=True)
    ]
    return tuple(buckets(keyed, bucket_bytes))


def _bucket_calls(
    found: tuple[ConvertedUses, tuple[ConversionBucket, ...]], phase: Phase
) -> list[RankCall]:
    waiting, fused = found
    return [
        RankCall(
            bucket.key[0],
            bucket.key[1],
            phase,
            bucket.size_bytes,
            ", ".join(waiting[i][0].name for i in bucket.members),
        )
        for bucket in fused
    ]


def _return_calls(program: StageProgram, period: str) -> Iterator[RankCall]:
    """The calls that return gradients once per `period`, each beside the backward after it.

    Later rounds start when all buckets are there, so they are waited for. So is, in every
    microbatch, the last bucket of each kind, which ends with the first parameters.
    """
    found = return_buckets(program, period)
    last = {bucket.key: k for k, bucket in enumerate(found[1]) if bucket.round == 0}
    waited = frozenset(last.values()) if period == "micro" else frozenset()
    for k, call in enumerate(_bucket_calls(found, "grad_sync")):
        yield replace(call, is_beside=found[1][k].round == 0 and k not in waited)


def _divisors(program: StageProgram) -> list[RankCall]:
    """The all_reduces that sum the divisors over the ranks' own rows."""
    rows = next(
        (
            item
            for item in program.delivered
            if item.source in program.prologue_inputs and item.batch_cell is not None
        ),
        None,
    )
    axes = tuple(sorted(rows.local.spec.axes_of(rows.batch_cell))) if rows else ()  # type: ignore[arg-type]
    sizes = {d.source: d.local.size_bytes for d in program.delivered if d.kind == "divisor"}
    if not axes:
        return []
    return [
        RankCall("all_reduce", axes, "loss", sizes[name], name)
        for name in program.prologue_outputs
        if name in sizes
    ]


def _origins(program: StageProgram) -> dict[str, str]:
    """Variable -> the operator or input whose value it holds, in some placement."""
    origin = {d.local.name: d.source for d in program.delivered}
    for line in program.body:
        for out in line.outs:
            if isinstance(line, CallLine):
                origin[out.name] = line.key
            else:
                origin.setdefault(out.name, origin.get(line.reads[0], out.name))
    return origin


def _calls(program: StageProgram, order: Sequence[Work]) -> Iterator[RankCall]:
    """The calls that work in this order makes, each where it begins."""
    origin, counts, beside = _origins(program), line_counts(program), calls_beside(program, order)
    for k, work in enumerate(order):
        position = positions_of(work)[0]
        line, n, is_beside = program.body[position], counts[position], k in beside
        match work:
            case Gather(positions) | Start(Gather(positions)):
                calls = _gather_calls(gathers_at(program, positions), is_beside)
            case Reduction(positions) | Start(Reduction(positions)):
                calls = _reduction_calls(gathers_at(program, positions), is_beside)
            case Forward(again=again) | Start(Forward(again=again)):
                calls = _line_calls(line, origin, again)
            case Backward() | Start(Backward()):
                calls = _backward_calls(line, origin)
            case Wait():
                continue
        for _ in range(n):
            yield from calls


def _line_calls(line: Line, origin: Mapping[str, str], again: bool) -> list[RankCall]:
    if isinstance(line, MoveLine):
        phase = "backward" if again else line.phase
        return _call(line.move.forward, line, phase, line.forward_bytes, origin[line.out.name])
    return _inner_calls(line, "forward", "backward" if again else "forward")


def _backward_calls(line: Line, origin: Mapping[str, str]) -> list[RankCall]:
    if isinstance(line, MoveLine):
        kind, size_bytes = line.move.backward, line.backward_bytes
        return _call(kind, line, "backward", size_bytes, origin[line.out.name])
    return _inner_calls(line, "backward", "backward")


def _inner_calls(line: Line, of: str, phase: str) -> list[RankCall]:
    if not isinstance(line, CallLine):
        return []
    calls = list[RankCall]()
    for c in line.inner:
        if c.phase == of:
            on = c.kind, line.lowered_axes, phase, c.size_bytes, line.key
            calls += [RankCall(*on, beside_s=c.beside_s, imbalance=c.imbalance)] * c.count
    return calls


def _gather_calls(lines: Sequence[GatherLine], is_beside: bool) -> list[RankCall]:
    """The calls of one gather, move by move."""
    names, found = ", ".join(line.parameter for line in lines), list[RankCall]()
    for moves in zip(*(line.moves for line in lines), strict=True):
        size_bytes = sum(move.forward_bytes for move in moves)
        kind = moves[0].move.forward
        found += _call(kind, moves[0], "param_gather", size_bytes, names, is_beside)
    return found


def _reduction_calls(lines: Sequence[GatherLine], is_beside: bool) -> list[RankCall]:
    """The calls of one reduction, move by move; only the last one may run beside compute."""
    names, found = ", ".join(line.parameter for line in lines), list[RankCall]()
    n_left = len(lines[0].moves)
    for moves in zip(*(line.moves[::-1] for line in lines), strict=True):
        n_left -= 1
        size_bytes = sum(move.backward_bytes for move in moves)
        kind = moves[0].move.backward
        last = is_beside and n_left == 0
        found += _call(kind, moves[0], "grad_sync", size_bytes, names, last)
    return found


def _call(
    kind: PrimitiveKind,
    line: MoveLine,
    phase: str,
    size_bytes: int,
    tensor: str,
    is_beside: bool = False,
) -> list[RankCall]:
    if kind not in COLLECTIVES:
        return []
    at = line.under_matmul
    return [RankCall(kind, line.move.axes, phase, size_bytes, tensor, is_beside, under_matmul=at)]
