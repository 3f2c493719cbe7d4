"""Tensors that cross between stages, as one rank sends and receives them.

A message from stage i to stage j carries all values of one microbatch that j reads from i. Both
ends cut them into the same slices, in the same order. An activation leaves in its sent layout
and arrives in its received layout; its gradient returns by the same slices. A rank without a
slice holds zeros: its placement is Partial there (`autopar/program/communication/cross_mesh.py`).

Between two stages of one rank the same slices are cut and put together, and nothing is sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from autopar.program.communication import Slice, crossing_slices, local_factors
from autopar.program.lines import Crossing, Local, Pipeline
from autopar.runtime.collectives.p2p import Messenger, Posted
from autopar.schedule import Action

Sends = list[tuple[Tensor, int]]
Receives = list[tuple[tuple[int, ...], torch.dtype, int]]


@dataclass(frozen=True)
class _Route:
    """One crossing, with the slices that this rank sends or receives."""

    crossing: Crossing
    slices: tuple[Slice, ...]


@dataclass(frozen=True)
class _PeerSlice:
    """A slice at one end: its index `at` in the local tensor, and the `peer` at the other end."""

    peer: int
    at: tuple[slice, ...]
    shape: tuple[int, ...]


class Crossings:
    """Posts the messages of one rank's schedule, and assembles the tensors that arrive.

    A rank waits for its oldest batch of sends once more batches than devices are under way. So
    neighbours do not block each other, and sent tensors do not pile up.
    """

    def __init__(
        self, pipeline: Pipeline, rank: int, messenger: Messenger, device: torch.device
    ) -> None:
        self.pipeline, self.rank, self.messenger, self.device = pipeline, rank, messenger, device
        self._sizes = pipeline.device_meshes[pipeline.device_of(rank)].sizes
        self._pace = messenger.context.flight.pace
        self._unfinished_sends: list[Posted] = []
        self._pending_receives: dict[Action, tuple[Posted, int, int]] = {}
        self._routes: dict[tuple[int, int], tuple[_Route, ...]] = {}

    def post(
        self, actions: Sequence[Action], values: Mapping[Action, Mapping[str, Tensor]]
    ) -> None:
        """Post consecutive messages as one batch; `values` maps each send to its tensors by name.

        Does not wait for receives; `arrived` does.
        """
        sends: Sends = []
        receives: Receives = []
        ends: list[tuple[Action, int, int]] = []
        for action in actions:
            if action.is_send:
                sends += self._sends(action, values[action])
            else:
                start = len(receives)
                receives += self._receives(action)
                ends.append((action, start, len(receives)))
        posted = self.messenger.post(sends, receives)
        self._pending_receives |= {action: (posted, start, end) for action, start, end in ends}
        if sends:
            self._unfinished_sends.append(posted)
        # Waiting cannot deadlock: the schedule was verified with batches that run in order.
        while len(self._unfinished_sends) > self.pipeline.schedule.n_devices:
            with self._pace.waiting():
                self._unfinished_sends.pop(0).wait_sent()

    def arrived(self, action: Action) -> dict[str, Tensor]:
        """The local tensors of one receive, by value name; waits for them.

        Not for others of their batch: the schedule may post those before they are made.
        """
        posted, start, end = self._pending_receives.pop(action)
        with self._pace.waiting():
            pieces = posted.wait_received(start, end)
        return self._values(action, pieces)

    def hand_over(self, send: Action, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What the other end of a send gets if it is a stage of this rank; nothing is sent."""
        return self._values(send.partner, [piece for piece, _ in self._sends(send, values)])

    def finish(self) -> None:
        """Wait until everything this rank sent has left."""
        with self._pace.waiting():
            for posted in self._unfinished_sends:
                posted.wait_sent()
        self._unfinished_sends.clear()

    def _values(self, receive: Action, pieces: Sequence[Tensor]) -> dict[str, Tensor]:
        """The local tensors of a receive, by value name, from the pieces of the message."""
        left, out = iter(pieces), {}
        for route in self._routes_of(receive):
            local = _end(route.crossing, receive)
            shape = local_factors(local.dims, local.spec, self._sizes)
            mine = [(part, next(left)) for part in self._parts(route, receive)]
            out[route.crossing.value] = self._assembled(local, shape, mine)
        return out

    def _routes_of(self, action: Action) -> list[_Route]:
        """The routes of a message; a backward message carries only values with gradients."""
        assert action.peer is not None
        source, target = sorted((action.stage, action.peer))
        if (source, target) not in self._routes:
            self._routes[source, target] = tuple(
                _Route(c, self._slices(c)) for c in self.pipeline.between(source, target)
            )
        return [r for r in self._routes[source, target] if action.is_forward or r.crossing.has_grad]

    def _slices(self, crossing: Crossing) -> tuple[Slice, ...]:
        found = crossing_slices(self.pipeline, crossing)
        return tuple(s for s in found if self.rank in (s.source_rank, s.target_rank))

    def _parts(self, route: _Route, action: Action) -> list[_PeerSlice]:
        """The slices of a crossing that this rank sends or receives in `action`."""
        at_source = action.stage == route.crossing.source
        ends = [
            (s.source_rank, _PeerSlice(s.target_rank, s.source, s.shape))
            if at_source
            else (s.target_rank, _PeerSlice(s.source_rank, s.target, s.shape))
            for s in route.slices
        ]
        return [part for own, part in ends if own == self.rank]

    def _receives(self, action: Action) -> Receives:
        return [
            (part.shape, route.crossing.sent.local.dtype, part.peer)
            for route in self._routes_of(action)
            for part in self._parts(route, action)
        ]

    def _sends(self, action: Action, values: Mapping[str, Tensor]) -> Sends:
        """The pieces that this rank sends, with their target ranks."""
        out: Sends = []
        for route in self._routes_of(action):
            local = _end(route.crossing, action)
            shape = local_factors(local.dims, local.spec, self._sizes)
            seen = values[route.crossing.value].detach().reshape(shape)
            for part in self._parts(route, action):
                out.append((seen[part.at].contiguous(), part.peer))
        return out

    def _assembled(
        self, local: Local, shape: tuple[int, ...], pieces: Sequence[tuple[_PeerSlice, Tensor]]
    ) -> Tensor:
        """The local tensor assembled from its pieces, with zeros elsewhere."""
        if len(pieces) == 1 and pieces[0][0].shape == shape:
            return pieces[0][1].view(local.shape)
        out = torch.zeros(shape, dtype=local.dtype, device=self.device)
        for part, piece in pieces:
            out[part.at] = piece
        return out.view(local.shape)


def _end(crossing: Crossing, action: Action) -> Local:
    """The crossing's local tensor on the stage that does `action`."""
    boundary = crossing.sent if action.stage == crossing.source else crossing.received
    return boundary.local
