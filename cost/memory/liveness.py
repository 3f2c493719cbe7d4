"""The peak memory of one rank in a step: liveness of storages over the lines.

    always      stored parameters, optimizer state, the rank's part of batch and constants
    per step    parameters converted for use, and the gradients of those uses
    forward     results of a line, until the variable is freed and autograd needs it no more;
                what autograd keeps (`CallLine.keeps`, `saved_bytes`), until its backward
    backward    one gradient per variable, from the first consumer's backward to the
                producer's; a gradient that is passed on (`Workspace.passed`) counts once
    workspace   temporaries of operators, buffers of collectives
    in flight   bytes kept by other microbatches between their forward and backward; each keeps as
                much as the simulated one
    messages    gradients that were sent and are still under way

A storage counts once, however many variables view it. The first microbatch makes the gradients and
later ones add to them, so both kinds are simulated. PyTorch's allocator and buffers inside kernels
are not counted.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from autopar.cost.memory.ledger import Ledger
from autopar.cost.memory.microbatch import MicrobatchMemory
from autopar.cost.memory.state import OPTIMIZERS, static_bytes_per_param
from autopar.placement import COLLECTIVES, Split
from autopar.program.communication import ConversionBucket, conversion_buckets, return_buckets
from autopar.program.lines import (
    ParameterUse,
    StageProgram,
    every_delivered,
    every_parameter,
    parameter_counts,
)
from autopar.schedule import GRADIENTS_DONE, Schedule, in_flight_by_stage


@dataclass(frozen=True)
class PeakMemory:
    """The peak of one rank, where it is reached, and its bytes by kind."""

    peak_bytes: float
    at: str
    parts: Mapping[str, float]


def peak_memory(
    program: StageProgram,
    optimizer: str,
    n_in_flight: int = 1,
    n_under_way: int = 0,
) -> PeakMemory:
    """Simulate the live bytes of one step of `program` and return their peak.

    n_in_flight   the most microbatches between their forward and their backward, or its first part
    n_under_way   gradient messages that may still be held during another backward
                  (`gradients_under_way`)
    """
    ledger = Ledger()
    deque(phases_of(program, optimizer, n_in_flight, n_under_way, ledger), maxlen=0)
    return PeakMemory(ledger.peak_bytes, ledger.at, ledger.parts)


def phases_of(
    program: StageProgram,
    optimizer: str,
    n_in_flight: int,
    n_under_way: int,
    ledger: Ledger,
) -> Iterator[tuple[str, Sequence[int]]]:
    """Simulate the step on a ledger. Yields the name of each phase once it is over.

    The phases are "before"; "forward", "backward" and, if backward is split, "weights" of the first
    microbatch, then of a later one; "after"; "optimizer". With them come the numbers of the works
    that the first marks of the phase belong to, in `forward_order` or `backward_order`.
    """
    _always(program, optimizer, ledger)
    _convert(program, ledger)
    yield "before", ()
    microbatch = MicrobatchMemory(program, ledger)
    works = microbatch.works()
    others = min(n_in_flight, program.n_microbatches) - 1
    kept_bytes = _kept_bytes(microbatch, ledger) if others else 0.0
    for first in (True, False)[: program.n_microbatches]:
        # If all microbatches are in flight at once, the second backward follows the last forward.
        # The forward here then only restores its live bytes, and its peaks do not count.
        is_last = not first and others + 1 == program.n_microbatches
        ledger.drop("in flight", "others")
        ledger.add("in flight", "others", kept_bytes * (others - is_last))
        ledger.is_paused = is_last and others > 0
        microbatch.forward()
        ledger.is_paused = False
        yield "forward", works[0]
        microbatch.backward_input()
        if program.splits_backward:
            _send_back(program, n_under_way, ledger)
            yield "backward", works[1]
        microbatch.backward_weight()
        _bring_back(program, "micro", ledger)
        _send_back(program, n_under_way, ledger)
        yield ("weights", works[2]) if program.splits_backward else ("backward", works[1])
    ledger.clear("in flight")
    _bring_back(program, "step", ledger)
    ledger.clear("converted")
    ledger.clear("messages")
    yield "after", ()
    if program.trains:
        # `torch.optim` makes each temporary for a whole list of tensors at once.
        updated = (p.stored.size_bytes for p in every_parameter(program) if p.requires_grad)
        ledger.mark("the optimizer", OPTIMIZERS[optimizer].temporaries * sum(updated))
    yield "optimizer", ()


def kept_bytes(program: StageProgram, optimizer: str) -> float:
    """Bytes that a microbatch keeps between its forward and its backward."""
    ledger = Ledger()
    _always(program, optimizer, ledger)
    _convert(program, ledger)
    return _kept_bytes(MicrobatchMemory(program, ledger), ledger)


def gradients_under_way(schedule: Schedule, stage: int) -> int:
    """The most gradient messages that a stage has sent and may still hold during a backward.

    Only backwards with the most microbatches in flight count, because peaks are there. The runtime
    waits for a batch of messages once it has posted as many later batches as there are devices
    (`Crossings.post` in `runtime/collectives/crossings.py`).
    """
    most_in_flight, now = in_flight_by_stage(schedule)[stage], 0
    most, held = 0, deque[int](maxlen=schedule.n_devices)
    row = schedule.rows[schedule.device_of(stage)]
    for is_compute, run in itertools.groupby(row, lambda a: a.is_compute):
        if not is_compute:
            sends = [(action.kind, action.stage) for action in run if action.is_send]
            held += [sends.count(("send_backward", stage))] if sends else []
            continue
        for action in (a for a in run if a.stage == stage):
            if action.kind == "forward":
                now += 1
                continue
            most = max(most, sum(held) if now == most_in_flight else 0)
            now -= action.kind in GRADIENTS_DONE
    return most


def _kept_bytes(microbatch: MicrobatchMemory, ledger: Ledger) -> float:
    """Bytes that a microbatch keeps after its forward; the ledger is left as it was."""
    before_bytes, ledger.is_paused = ledger.live_bytes, True
    microbatch.forward()
    kept_bytes = ledger.live_bytes - before_bytes
    microbatch.forget()
    ledger.is_paused = False
    return kept_bytes


def _send_back(program: StageProgram, n_under_way: int, ledger: Ledger) -> None:
    """Hold the gradients of received tensors, for the microbatches that may be under way."""
    returned = [b.local.size_bytes for b in program.received if b.local.has_grad]
    ledger.drop("messages", "gradients")
    ledger.add("messages", "gradients", float(n_under_way * sum(returned)))


def _always(program: StageProgram, optimizer: str, ledger: Ledger) -> None:
    for p in every_parameter(program):
        ledger.add("parameters", p.name, p.stored.size_bytes)
        if p.requires_grad and program.trains:
            each = static_bytes_per_param(optimizer, p.stored.dtype, shape=p.stored.shape)
            n_elements = p.stored.size_bytes / p.stored.dtype.itemsize
            ledger.add("optimizer", p.name, each.optimizer_bytes * n_elements)
    for item, n in every_delivered(program):
        n_parts = program.n_microbatches if item.batch_cell is not None else 1
        ledger.add("batch", item.local.name, item.local.size_bytes * n_parts * n)


def _convert(program: StageProgram, ledger: Ledger) -> None:
    """Convert parameters for use, bucket by bucket; a use of the stored tensor itself is free.

    A shard that was cast for use is dropped when its moves are done, unless it is what is used.
    """
    waiting, found = conversion_buckets(program)
    casts = [p for p in every_parameter(program) if p.cast is not None]
    for p in casts:
        ledger.add("converted", f"cast of {p.name}", p.shard.size_bytes)
    for bucket in found:
        for i in bucket.members:
            ledger.drop("converted", f"{i}")
            ledger.add("converted", f"{i}", waiting[i][1].local.size_bytes)
        ledger.mark("gathering parameters", _bucket_bytes(bucket, program))
    for i, (_, use) in enumerate(waiting):
        if _changes(use) and not ledger.has("converted", f"{i}"):
            ledger.add("converted", f"{i}", use.local.size_bytes)
    ledger.mark("converting parameters")
    for p in casts:
        if p.uses and all(_changes(use) for use in p.uses):
            ledger.drop("converted", f"cast of {p.name}")


def _changes(use: ParameterUse) -> bool:
    """Is the use another tensor than the shard?"""
    return any(m.move.forward != "identity" for m in use.moves)


def _bring_back(program: StageProgram, period: str, ledger: Ledger) -> None:
    """Return gradients of converted uses to storage.

    The first calls begin during backward, and end after it. Until then a gradient lives in the
    buffer that replaces it. In backward such a buffer adds at most a bucket (`BUCKET_BYTES`), for a
    moment, which is counted at its end.
    """
    waiting, found = return_buckets(program, period)
    counts = parameter_counts(program)
    fused = {i for bucket in found if len(bucket.members) > 1 for i in bucket.members}
    for bucket in found:
        if bucket.round == 0:
            ledger.mark(
                "gradient sync", _sync_buffer_bytes(bucket, [waiting[i][1] for i in bucket.members])
            )
            if bucket.key[0] != "all_reduce":  # an all_reduce has its result in the buffer
                for i in bucket.members:
                    ledger.add("synced", f"{i}", waiting[i][0].stored.size_bytes)
    ledger.mark("gradient sync")
    for _, use in waiting:
        ledger.drop("gradients of uses", use.local.name)
    ledger.clear("synced")
    for i, (parameter, _) in enumerate(waiting):
        ledger.add("synced", f"{i}", parameter.stored.size_bytes)
    for bucket in found:
        if bucket.round > 0:
            ledger.mark("gradient sync", _bucket_bytes(bucket, program))
    new = {
        parameter.name: counts.get(parameter.name, 1)
        for parameter, _ in waiting
        if not ledger.has("gradients", parameter.name)
    }
    for i, (parameter, _) in enumerate(waiting):
        if new.get(parameter.name, 0) > 0:
            # A gradient in a fused bucket is copied out of it; one alone is kept as it is.
            if i not in fused:
                ledger.drop("synced", f"{i}")
            ledger.add("gradients", parameter.name, parameter.stored.size_bytes)
            new[parameter.name] -= 1
    ledger.mark("gradient sync")
    ledger.clear("synced")


def _sync_buffer_bytes(bucket: ConversionBucket, uses: Sequence[ParameterUse]) -> float:
    """Buffers of a bucket's call, besides its gradients and its results.

    Its gradients are copied into one buffer. Those that are not cut along rows are cut first.
    """
    fused = float(bucket.size_bytes) if len(bucket.members) > 1 else 0.0
    if bucket.key[0] == "all_reduce":
        return fused
    firsts = [next(m for m in reversed(u.moves) if m.move.backward in COLLECTIVES) for u in uses]
    cut = (m.backward_bytes for m in firsts if not all(_is_rows(s) for s in m.move.splits))
    return fused + sum(cut)


def _is_rows(split: Split) -> bool:
    return split.dim == 0 and split.outer == 1


def _bucket_bytes(bucket: ConversionBucket, program: StageProgram) -> float:
    """Buffers of one bucket's call besides its results."""
    kind, axes, _ = bucket.key
    n_ranks = math.prod(program.axis_sizes[axis] for axis in axes)
    whole = float(bucket.size_bytes)
    if len(bucket.members) == 1:
        return {"all_gather": whole, "reduce_scatter": whole, "all_to_all": 2 * whole}.get(kind, 0)
    match kind:
        case "all_gather":  # the concatenated shards, and the stacked result
            return whole / n_ranks + whole
        case "reduce_scatter":  # pieces, and the concatenated pieces
            return 2 * whole
        case "all_to_all":
            return 3 * whole
        case _:  # the concatenated tensors
            return whole
