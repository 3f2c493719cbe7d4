"""What a pipeline costs: its collectives, its step time, its memory.

    step   = end of the simulated schedule, with the optimizer          (`timeline_of`)
             x what the slowest of its ranks takes longer than the mean    (`slowest_of`)
    mfu    = model flops of all ranks / (n_ranks x peak flops_per_s x step)    (`predict`)
    peak   = maximum over ranks, of all stages of a rank together        (`peak_of_stage`)

With one stage nothing waits, and step = compute + comm + optimizer. Times of one rank (compute,
comm, exposed comm, optimizer) are those of the busiest stage: the one with the most compute and
communication. `program/communication/collective.py` lists the collectives that the runtime
executes. So a bucket is priced as the one call that it is.

A rank sends or receives the slices of a message one by one, and the slowest rank decides
(`transfer_s`):

    max over ranks of sum over its slices of (latency_s + size_bytes x s_per_byte), of their link
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from autopar.cost.hardware import flat_group
from autopar.cost.laws import CostModel, collective_time_s
from autopar.cost.memory import (
    MemoryCourse,
    PeakMemory,
    RowPeak,
    StageMemory,
    gradients_under_way,
    kept_bytes,
    memory_course,
    peak_memory,
    peak_of_row,
    stage_memory,
)
from autopar.cost.price.stage_times import stage_times
from autopar.cost.simulate import StageTimes, TieTimes, Timeline, simulate
from autopar.errors import NotSupportedError
from autopar.mesh import Link, Mesh
from autopar.plans import Predicted
from autopar.program.communication import (
    Collective,
    Messages,
    Piece,
    TieExchange,
    copy_axes,
    rank_collectives,
    tie_exchanges,
)
from autopar.program.lines import CallLine, Pipeline, StageProgram, counted_sum, line_counts
from autopar.schedule import Action, Schedule, in_flight_by_stage, live_counts

# (rank, rank) -> the link between them.
LinkBetween = Callable[[int, int], Link]

# Optimizers that update every element alone, so a rank updates its shard without communication.
_ELEMENTWISE = ("adamw", "adam", "sgd")


def link_between(mesh: Mesh, links: Sequence[Link]) -> LinkBetween:
    """The link of any two ranks, as a function; `links` are those of the mesh axes, in order."""
    return lambda a, b: links[mesh.link_axis(a, b)]


def collectives_of(
    pipeline: Pipeline, optimizer: str = "adamw", local_inputs: bool = False
) -> tuple[Collective, ...]:
    """Every collective and message of one training step, stage by stage; equal ones are counted.

    Ranks of a stage may send different messages. The rows are those of its first rank, which sends
    as many bytes as any. `local_inputs`: every rank is given its own rows of the batch, so
    divisors are summed.

    Raises `NotSupportedError` for an optimizer that would need collectives of its own.
    """
    if optimizer not in _ELEMENTWISE:
        raise NotSupportedError(
            f"optimizer {optimizer!r} does not update every element alone",
            hint=f"use one of {', '.join(_ELEMENTWISE)}",
        )
    return tuple(
        row
        for mesh in pipeline.device_meshes
        for row in rank_collectives(pipeline, mesh.first_rank, local_inputs)
    )


def predict(
    pipeline: Pipeline,
    costs: Sequence[CostModel],
    optimizer: str = "adamw",
    link_between: LinkBetween | None = None,
    *,
    peak_flops_per_s: float | None = None,
    n_samples: int | None = None,
    n_tokens: int | None = None,
    interval_ratio: float | None = None,
) -> Predicted:
    """Price one training step of a pipeline; `costs` has one model per stage.

    link_between: the link of two ranks of the world; needed with several stages.
    peak_flops_per_s: the datasheet's rate, for MFU; by default the device's achieved rate.
    n_samples, n_tokens: of one global batch.
    interval_ratio: of the machine's software (`Hardware`).
    """
    timeline = timeline_of(pipeline, costs, optimizer, link_between)
    busiest = timeline.busiest
    step_s = timeline.step_time_s * costs[0].runs.slowest_of(pipeline.n_ranks)
    flops = pipeline.n_microbatches * counted_sum(
        (line.model_flops, n)
        for program in pipeline.stages
        for line, n in zip(program.body, line_counts(program), strict=True)
        if isinstance(line, CallLine)
    )
    peak = peak_flops_per_s or costs[0].mesh.device.flops_per_s
    peaks = tuple(peak_of_stage(pipeline, k, optimizer) for k in range(pipeline.n_stages))
    return Predicted(
        step_time_s=step_s,
        peak_bytes=max(peaks),
        compute_time_s=busiest.compute_s,
        comm_time_s=busiest.comm_s,
        exposed_comm_s=busiest.exposed_comm_s,
        optimizer_time_s=busiest.update_s,
        bubble=timeline.bubble,
        samples_per_s=n_samples / step_s if n_samples and step_s else None,
        tokens_per_s=n_tokens / step_s if n_tokens and step_s else None,
        mfu=flops / (pipeline.n_ranks * peak * step_s) if step_s else 0.0,
        peak_bytes_per_stage=peaks,
        interval_ratio=interval_ratio,
    )


def peak_of_stage(pipeline: Pipeline, stage: int, optimizer: str) -> float:
    """Peak bytes on a rank of a stage: of all its stages, with the microbatches that the schedule
    keeps in flight."""
    schedule = pipeline.schedule
    device = schedule.device_of(stage)
    stages = schedule.stages_on(device)
    if len(stages) == 1 and not schedule.splits_backward:
        return float(peak_memory_of(pipeline, stage, optimizer).peak_bytes)
    return row_peak_of(pipeline, device, optimizer).peak_bytes


def row_peak_of(pipeline: Pipeline, device: int, optimizer: str) -> RowPeak:
    """That peak of a device with several stages, or a backward in two parts."""
    schedule = pipeline.schedule
    stages = schedule.stages_on(device)
    memories = {k: _memory_of(pipeline.stages[k], optimizer) for k in stages}
    under_way = {k: gradients_under_way(schedule, k) for k in stages}
    return peak_of_row(schedule.rows[device], memories, under_way)


def _memory_of(program: StageProgram, optimizer: str) -> StageMemory:
    key = "memory", optimizer
    if key not in program.price_cache:
        program.price_cache[key] = stage_memory(program, optimizer)
    found: StageMemory = program.price_cache[key]
    return found


def peak_memory_of(pipeline: Pipeline, stage: int, optimizer: str) -> PeakMemory:
    """That peak, where it is reached, and what it is made of."""
    schedule = pipeline.schedule
    n_in_flight, n_under_way = _most_held(schedule, stage)
    program, key = pipeline.stages[stage], ("peak", optimizer, n_in_flight, n_under_way)
    if key not in program.price_cache:
        program.price_cache[key] = peak_memory(program, optimizer, n_in_flight, n_under_way)
    found: PeakMemory = program.price_cache[key]
    return found


def _most_held(schedule: Schedule, stage: int) -> tuple[int, int]:
    """Microbatches in flight on a stage, and gradients that it has sent, at most."""
    return in_flight_by_stage(schedule)[stage], gradients_under_way(schedule, stage)


def memory_course_of(pipeline: Pipeline, stage: int, optimizer: str) -> MemoryCourse:
    """The live bytes of a stage's step, moment by moment.

    If its rank has several stages or a backward in two parts, they are those of one microbatch in
    flight: what else the rank holds depends on the moment (`row_peak_of`).
    """
    schedule, program = pipeline.schedule, pipeline.stages[stage]
    if len(schedule.stages_on(schedule.device_of(stage))) > 1 or schedule.splits_backward:
        return memory_course(program, optimizer)
    n_in_flight, n_under_way = _most_held(schedule, stage)
    return memory_course(program, optimizer, n_in_flight, n_under_way)


def timeline_of(
    pipeline: Pipeline,
    costs: Sequence[CostModel],
    optimizer: str = "adamw",
    link_between: LinkBetween | None = None,
    *,
    with_memory: bool = False,
    slow: tuple[int, float] | None = None,
    jitter: tuple[float, int] | None = None,
) -> Timeline:
    """Simulate one training step; `slow` and `jitter` as in `simulate`.

    with_memory: also the bytes of every stage over time. Their peak is `peak_of_stage`. Bytes that
    no microbatch in flight keeps count as static, as if they were there all the time.
    """
    trains = pipeline.schedule.trains
    # The same object where possible: its prices are cached.
    programs = (p if p.trains == trains else replace(p, trains=trains) for p in pipeline.stages)
    stages = [
        _times_of_stage(program, cost, optimizer)
        for program, cost in zip(programs, costs, strict=True)
    ]
    if with_memory:
        stages = [_with_memory(pipeline, k, stages[k], optimizer) for k in range(len(stages))]
    if pipeline.n_stages == 1:
        return simulate(pipeline.schedule, stages, slow=slow, jitter=jitter)
    assert link_between is not None, "several stages, and no links between them"
    between = link_between
    messages = Messages(pipeline)

    def message_s(action: Action) -> float:
        return transfer_s(messages.of(action), between)

    ties = [_tie_times(pipeline, costs, exchange, between) for exchange in tie_exchanges(pipeline)]
    loss_s = _everywhere_s(pipeline, between) if pipeline.stages[-1].loss is not None else 0.0
    return simulate(pipeline.schedule, stages, message_s, ties, loss_s, slow=slow, jitter=jitter)


def _times_of_stage(program: StageProgram, cost: CostModel, optimizer: str) -> StageTimes:
    """`stage_times`, computed once for all meshes on which a stage costs the same."""
    key = "times", replace(cost, mesh=cost.mesh.canonical), optimizer
    if key not in program.price_cache:
        program.price_cache[key] = stage_times(program, cost, optimizer)
    times: StageTimes = program.price_cache[key]
    return times


def _with_memory(pipeline: Pipeline, stage: int, times: StageTimes, optimizer: str) -> StageTimes:
    schedule = pipeline.schedule
    device = schedule.device_of(stage)
    stages = schedule.stages_on(device)
    kept = {k: kept_bytes(pipeline.stages[k], optimizer) for k in stages}
    most_kept_bytes = max(
        sum(n * kept[k] for k, n in zip(stages, count.live, strict=True))
        for count in live_counts(schedule, device)
    )
    static = (peak_of_stage(pipeline, stage, optimizer) - most_kept_bytes) / len(stages)
    return replace(times, static_bytes=static, kept_bytes=kept[stage])


def transfer_s(pieces: Iterable[Piece], link_between: LinkBetween) -> float:
    """Seconds of a message: those of the rank that is slowest to send or receive its pieces."""
    times_s: defaultdict[tuple[str, int], float] = defaultdict(float)
    for piece in pieces:
        link = link_between(piece.source_rank, piece.target_rank)
        time_s = link.message_s(piece.size_bytes)
        times_s["sends", piece.source_rank] += time_s
        times_s["receives", piece.target_rank] += time_s
    return max(times_s.values(), default=0.0)


def _tie_times(
    pipeline: Pipeline, costs: Sequence[CostModel], exchange: TieExchange, between: LinkBetween
) -> TieTimes:
    """Both directions run at once; then an all_reduce in each stage hands the result to copies."""
    inside_s = []
    for stage, name in zip(exchange.stages, exchange.names, strict=True):
        parameter = pipeline.parameter(stage, name)
        axes = copy_axes(parameter, pipeline.meshes[stage])
        size_bytes = parameter.stored.size_bytes
        cost = costs[stage]
        inside_s.append(cost.primitive_time_s("all_reduce", size_bytes, axes) if axes else 0.0)
    a, b = inside_s
    return TieTimes(exchange.stages, transfer_s(exchange.pieces, between), (a, b))


def _everywhere_s(pipeline: Pipeline, between: LinkBetween) -> float:
    """Seconds of the loss's all_reduce over all ranks, on the slowest link between neighbours."""
    ranks = [rank for mesh in pipeline.device_meshes for rank in mesh.ranks]
    links = [between(a, b) for a, b in itertools.pairwise(ranks)]
    slowest = Link(max(k.latency_s for k in links), max(k.s_per_byte for k in links))
    group = flat_group(len(ranks), slowest)
    return collective_time_s("all_reduce", pipeline.loss_dtype.itemsize, group)
