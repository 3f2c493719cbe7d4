"""Verifies a whole pipeline before it runs: its stages, and what joins them (`verify_pipeline`).

    stages      each program keeps its own invariants (`verify_program`) and has the axes of its
                mesh; the ranks of devices are consecutive and in order; all stages have one number
                of microbatches; every stage's batch split divides the blocks of rows; the last
                stage has the loss
    crossings   every received tensor is sent by an earlier stage with the same factors, dtype
                and gradient; slices exist between the two layouts; the schedule has a
                transfer for it, with gradients if it has one. Between stages of one device every
                slice stays on its rank
    ties        a tied parameter has the same shape, factors, dtype and requires_grad everywhere,
                and a name of its own on each stage of a rank
    progress    no rank waits for ever                               (`pipeline_sequences`)

Progress is proved for messages that block one by one. This is stricter than the runtime, which
posts a run of messages as one batch and goes on. All ranks of a stage make the same calls in an
action, in one order (`stage.py`). So here an action is one call over all ranks of the device.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from autopar.errors import NotSupportedError, VerificationError
from autopar.program.communication import Messages, Piece, crossing_slices, tie_exchanges
from autopar.program.lines import Crossing, Pipeline, Tie, mesh_devices, most_batch_shards
from autopar.schedule import Action, validate
from autopar.verifier.deadlock import GroupCall, check_rendezvous
from autopar.verifier.stage import verify_program

_HINT = "this is a bug of autopar, or the pipeline was edited; plan again"


def verify_pipeline(pipeline: Pipeline) -> None:
    """Raise `VerificationError`, naming the place and the reason, unless all invariants hold."""
    for program in pipeline.stages:
        verify_program(program)
    _check_stages(pipeline)
    _check_received(pipeline)
    for crossing in pipeline.crossings:
        _check_crossing(pipeline, crossing)
    for tie in pipeline.ties:
        _check_tie(pipeline, tie)
    if pipeline.n_stages > 1:
        validate(pipeline.schedule)
        check_rendezvous(pipeline_sequences(pipeline))


def pipeline_sequences(pipeline: Pipeline) -> dict[int, list[GroupCall]]:
    """Every rank's calls in one step: its row of actions, its messages, and calls of all ranks."""
    messages, meshes = Messages(pipeline), pipeline.device_meshes
    out: dict[int, list[GroupCall]] = {r: [] for mesh in meshes for r in mesh.ranks}
    calls_by_send: dict[Action, list[GroupCall]] = {}  # by the send: both ends share its calls
    for mesh, row in zip(meshes, pipeline.schedule.rows, strict=True):
        ranks = mesh.ranks
        for action in row:
            if action.is_compute:
                call = GroupCall(ranks, str(action))
                for rank in ranks:
                    out[rank].append(call)
                continue
            is_send, pieces = action.is_send, messages.of(action)
            send = action if is_send else action.partner
            if send not in calls_by_send:
                calls_by_send[send] = _message_calls(pieces, f"in {send}")
            for piece, call in zip(pieces, calls_by_send[send], strict=True):
                out[piece.source_rank if is_send else piece.target_rank].append(call)
    for exchange in tie_exchanges(pipeline):
        sent = [p for p in exchange.pieces if p.source_rank != p.target_rank]
        for call in _message_calls(sent, "tied"):
            for rank in call.ranks:
                out[rank].append(call)
    if pipeline.stages[-1].loss is not None:
        everywhere = GroupCall(tuple(out), "all_reduce of the loss")
        for calls in out.values():
            calls.append(everywhere)
    return out


def _message_calls(pieces: Sequence[Piece], cause: str) -> list[GroupCall]:
    """One call of two ranks for each piece: the send together with its receive."""
    found = []
    for p in pieces:
        what = f"send of {p.size_bytes} B ({p.tensor}) {cause} to rank {p.target_rank}"
        ends = p.source_rank, p.target_rank
        found.append(GroupCall((min(ends), max(ends)), what))
    return found


def _check_stages(pipeline: Pipeline) -> None:
    if not len(pipeline.stages) == len(pipeline.meshes) == pipeline.schedule.n_stages:
        counts = (len(pipeline.stages), len(pipeline.meshes), pipeline.schedule.n_stages)
        raise _error(f"{counts} stages, meshes and lines of the schedule", "the pipeline")
    if pipeline.schedule.devices != mesh_devices(pipeline.meshes):
        raise _error(
            f"its stages are on devices {mesh_devices(pipeline.meshes)}, those of the schedule on "
            f"{pipeline.schedule.devices}",
            "the pipeline",
        )
    first = pipeline.meshes[0].first_rank
    for mesh in pipeline.device_meshes:
        if mesh.first_rank != first:
            where = f"stage {pipeline.meshes.index(mesh)}"
            raise _error(f"it begins at rank {mesh.first_rank}, not {first}", where)
        first += mesh.n_ranks
    for stage, (program, mesh) in enumerate(zip(pipeline.stages, pipeline.meshes, strict=True)):
        where, is_last = f"stage {stage}", stage == pipeline.n_stages - 1
        if (program.axis_names, program.axis_sizes) != (mesh.names, mesh.sizes):
            raise _error(f"its program is for axes {program.axis_sizes}, not {mesh.sizes}", where)
        if program.n_microbatches != pipeline.schedule.n_microbatches:
            n_microbatches = pipeline.schedule.n_microbatches
            raise _error(
                f"{program.n_microbatches} microbatches, the schedule has {n_microbatches}", where
            )
        n_shards = most_batch_shards(program.delivered, program.axis_sizes)
        if pipeline.n_blocks % n_shards:
            raise _error(f"{pipeline.n_blocks} blocks of rows for {n_shards} shards", where)
        if program.loss is not None and not is_last:
            raise _error("it makes the loss, and is not the last stage", where)
        if pipeline.schedule.trains and not program.trains:
            raise _error("it does not train, but the schedule does", where)


def _check_received(pipeline: Pipeline) -> None:
    """Raise unless every tensor that a stage receives has exactly one crossing."""
    for stage, program in enumerate(pipeline.stages):
        for boundary in program.received:
            found = [
                c for c in pipeline.crossings if c.target == stage and c.value == boundary.value
            ]
            if [c.received for c in found] != [boundary]:
                raise _error(f"{boundary.key} crosses {len(found)} times", f"stage {stage}")


def _check_crossing(pipeline: Pipeline, crossing: Crossing) -> None:
    sent, received = crossing.sent, crossing.received
    where = f"{sent.key} from stage {crossing.source} to stage {crossing.target}"
    if not 0 <= crossing.source < crossing.target < pipeline.n_stages:
        raise _error("it does not go to a later stage", where)
    if sent not in pipeline.stages[crossing.source].sent:
        raise _error("its source does not send it", where)
    if received not in pipeline.stages[crossing.target].received:
        raise _error("its target does not receive it", where)
    ends = [(b.value, b.local.dims, b.local.dtype, b.local.has_grad) for b in (sent, received)]
    if ends[0] != ends[1]:
        raise _error(f"it is {ends[0]} where it is sent, {ends[1]} where it is received", where)
    pieces = crossing_slices(pipeline, crossing)  # raises for layouts that cannot cross
    n_elements = math.prod(n for factors in sent.local.dims for n in factors)
    if sum(piece.n_elements for piece in pieces) != n_elements:
        raise _error(f"its slices do not hold its {n_elements} elements", where)
    pair = crossing.source, crossing.target
    is_inside = pipeline.meshes[pair[0]] == pipeline.meshes[pair[1]]
    if is_inside and any(piece.source_rank != piece.target_rank for piece in pieces):
        raise _error("its slices go to other ranks of the same stages", where)
    transfers = {(t.source, t.target): t for t in pipeline.schedule.transfers or ()}
    if pair not in transfers:
        raise _error("the schedule has no transfer for it", where)
    if crossing.has_grad and pipeline.schedule.trains and not transfers[pair].has_gradient:
        raise _error("the schedule brings no gradient back", where)


def _check_tie(pipeline: Pipeline, tie: Tie) -> None:
    (owner, owned), *mirrors = tie.places
    first = pipeline.parameter(owner, owned)
    for stage, name in mirrors:
        p = pipeline.parameter(stage, name)
        where = f"{name} on stage {stage}, tied to {owned} on stage {owner}"
        if p.mirror_of != owned:
            raise _error(f"it mirrors {p.mirror_of}", where)
        for what in ("shape", "dims", "requires_grad"):
            if getattr(p, what) != getattr(first, what):
                raise _error(f"{what} is {getattr(p, what)}, not {getattr(first, what)}", where)
        if p.stored.dtype != first.stored.dtype:
            raise _error(f"it is {p.stored.dtype}, not {first.stored.dtype}", where)
    taken = Counter((pipeline.meshes[stage], name) for stage, name in tie.places)
    if (most := taken.most_common(1)[0])[1] > 1:
        name = most[0][1]
        raise NotSupportedError(
            f"several stages of one rank use the parameter {name!r} under one name",
            hint="tie it under a second name, or take a schedule of one stage a rank",
        )


def _error(reason: str, where: str) -> VerificationError:
    return VerificationError(reason, where=where, hint=_HINT)
