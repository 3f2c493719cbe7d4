"""Messages between stages: what goes from rank to rank, in order.

    a crossing     the slices that take a value from its sent spec to its received spec; the
                   gradient goes back by the same slices
    a message      from stage i to stage j: the slices of all values that cross, in the order of
                   `Pipeline.between`; backward, those of the gradients
    a tie          every two of its stages exchange their gradients of the parameter, each in the
                   other's spec; of the ranks with copies of a shard the first one receives, and
                   an all_reduce with zeros gives it to the others               (`TieExchange`)

The runtime sends these slices, the simulator prices them, and the verifier proves that every send
has its receive.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

from autopar.mesh import LogicalMesh
from autopar.placement import P, Placement, R, Spec
from autopar.program.communication.cross_mesh import Slice, slices
from autopar.program.lines import Crossing, Pipeline, StoredParameter, Tie
from autopar.schedule import Action


@dataclass(frozen=True)
class Piece:
    """What one rank of the world sends to another in one call: a part of `tensor`."""

    source_rank: int
    target_rank: int
    size_bytes: int
    tensor: str


@dataclass(frozen=True)
class TieExchange:
    """The gradients of a tied parameter that two stages exchange; it has a name on each."""

    stages: tuple[int, int]
    names: tuple[str, str]
    pieces: tuple[Piece, ...]


@dataclass
class Messages:
    """The messages of a pipeline, cached by pair of stages and direction."""

    pipeline: Pipeline
    _known: dict[tuple[int, int, bool], tuple[Piece, ...]] = field(default_factory=dict)

    def of(self, action: Action) -> tuple[Piece, ...]:
        """The pieces of a send or a receive, in the order in which they are posted."""
        assert action.peer is not None, f"{action} is no message"
        source, target = sorted((action.stage, action.peer))
        is_forward = action.is_forward
        key = source, target, is_forward
        if key not in self._known:
            self._known[key] = tuple(self._pieces(source, target, is_forward))
        return self._known[key]

    def _pieces(self, source: int, target: int, is_forward: bool) -> Iterator[Piece]:
        for crossing in self.pipeline.between(source, target):
            if not is_forward and not crossing.has_grad:
                continue
            itemsize = crossing.sent.local.dtype.itemsize
            for s in crossing_slices(self.pipeline, crossing):
                ends = (s.source_rank, s.target_rank)
                start, end = ends if is_forward else ends[::-1]
                yield Piece(start, end, s.n_elements * itemsize, crossing.sent.key)


def message_edges(pipeline: Pipeline) -> tuple[tuple[int, int], ...]:
    """Every (sender, receiver) of a step's messages between stages, in one order for all ranks."""
    edges: set[tuple[int, int]] = set()
    for crossing in pipeline.crossings:
        forward = {(s.source_rank, s.target_rank) for s in crossing_slices(pipeline, crossing)}
        edges |= forward
        if crossing.has_grad:
            edges |= {(target, source) for source, target in forward}
    for exchange in tie_exchanges(pipeline):
        edges |= {(piece.source_rank, piece.target_rank) for piece in exchange.pieces}
    return tuple(sorted(edges))


def crossing_slices(pipeline: Pipeline, crossing: Crossing) -> tuple[Slice, ...]:
    """The slices of one value, forward; its gradient goes the other way."""
    sent, received = crossing.sent.local, crossing.received.local
    meshes = pipeline.meshes
    return slices(
        sent.dims, sent.spec, meshes[crossing.source], received.spec, meshes[crossing.target],
        (sent.folded, received.folded),
    )  # fmt: skip


def tied_slices(pipeline: Pipeline, tie: Tie, source: int, target: int) -> tuple[Slice, ...]:
    """The slices of a tied parameter's gradient that stage `source` sends to `target`."""
    names, meshes = dict(tie.places), pipeline.meshes
    mine, theirs = (pipeline.parameter(stage, names[stage]) for stage in (source, target))
    return slices(
        mine.dims,
        _placed(mine, meshes[source], R),
        meshes[source],
        _placed(theirs, meshes[target], P),
        meshes[target],
    )


def copy_axes(parameter: StoredParameter, mesh: LogicalMesh) -> tuple[int, ...]:
    """The axes along which ranks store the same shard."""
    placements = parameter.stored.spec.placements
    return tuple(a for a in mesh.active_axes if not placements[a].is_shard)


def tie_exchanges(pipeline: Pipeline) -> tuple[TieExchange, ...]:
    """All exchanges of a step, in one order for all stages."""
    found = []
    for tie in pipeline.ties if pipeline.schedule.trains else ():
        names = dict(tie.places)
        if not pipeline.parameter(*tie.places[0]).requires_grad:
            continue
        for a, b in itertools.combinations(names, 2):
            itemsize = pipeline.parameter(a, names[a]).stored.dtype.itemsize
            pieces = tuple(
                Piece(s.source_rank, s.target_rank, s.n_elements * itemsize, names[source])
                for source, target in ((a, b), (b, a))
                for s in tied_slices(pipeline, tie, source, target)
            )
            found.append(TieExchange((a, b), (names[a], names[b]), pieces))
    return tuple(found)


def _placed(parameter: StoredParameter, mesh: LogicalMesh, copy: Placement) -> Spec:
    """The stored spec, with `copy` on the axes along which ranks store copies."""
    spec = parameter.stored.spec
    copies = copy_axes(parameter, mesh)
    placements = tuple(copy if a in copies else p for a, p in enumerate(spec.placements))
    return Spec(placements, spec.order)
