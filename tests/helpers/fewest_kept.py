"""The fewest bytes that a recomputed segment may keep: a minimum cut, by maximum flow.

A value is a node of its bytes. Values from before the segment, and those that only a matmul,
attention or a collective makes, come from the source. Those that some backward needs go to the
sink. Lines that may run again lead from what they read to what they make. Every set of kept values
from which the others can be made again is a cut (Chen et al., 2016; torch's partitioner does so).
Statistics and copies that operators save besides values are left out on both sides.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import maximum_flow

from autopar.placement import COLLECTIVES
from autopar.program.lines import (
    CallLine,
    GatherLine,
    Line,
    MoveLine,
    Segment,
    StageProgram,
    storage_owners,
)

SOURCE, SINK, UNLIMITED = "source", "sink", 1 << 30
# Capacities are whole numbers of 32 bits.
UNIT_BYTES = 64


@dataclass(frozen=True)
class Kept:
    """Bytes of one segment: what its operators would keep, what it does keep, the fewest."""

    name: str
    without: int
    now: int
    fewest: int


class KeptValues:
    """What the segments of a stage that trains keep."""

    def __init__(self, stage: StageProgram) -> None:
        self.stage, self.body = stage, stage.body
        self.owners = list(storage_owners(stage.body))
        self.made: dict[str, int] = {}
        self.size_bytes: dict[str, int] = {}
        for i, line in enumerate(self.body):
            for out in line.outs:
                owner = self.owners[i][out.name]
                if owner.endswith(f"@{i}") and not isinstance(line, GatherLine):
                    self.made[owner], self.size_bytes[owner] = i, out.size_bytes
        self.needed_by: dict[str, set[int]] = {}
        for i in stage.differentiated:
            for owner in self._kept_by(i):
                self.needed_by.setdefault(owner, set()).add(i)

    def __iter__(self) -> Iterator[Kept]:
        for segment in self.stage.segments:
            needed = {
                owner
                for owner, by in self.needed_by.items()
                if any(segment.start <= i < segment.stop for i in {*by, self.made[owner]})
            }
            # Whatever is needed after the segment is there anyway.
            free = {o for o in needed if any(i >= segment.stop for i in self.needed_by[o])}
            again = {*segment.again}
            now = {owner for owner in needed if self.made[owner] not in again}
            now |= {o for i in again for o in self._read(i) if self.made[o] not in again}
            yield Kept(
                segment.name,
                self._sum(needed - free),
                self._sum(now - free),
                self._fewest(segment, needed, free),
            )

    def _kept_by(self, i: int) -> Iterator[str]:
        line = self.body[i]
        if isinstance(line, CallLine) and line.has_grad:
            names = (*line.keeps, *line.reads) if line.saved_bytes else line.keeps
            found = (self.owners[i].get(name, name) for name in names)
            yield from (owner for owner in found if owner in self.made)

    def _read(self, i: int) -> Iterator[str]:
        found = (self.owners[i].get(name, name) for name in self.body[i].reads)
        yield from (owner for owner in found if owner in self.made)

    def _sum(self, owners: Collection[str]) -> int:
        return UNIT_BYTES * sum(map(self._units, owners))

    def _units(self, owner: str) -> int:
        return -(-self.size_bytes[owner] // UNIT_BYTES)

    def _fewest(self, segment: Segment, needed: Collection[str], free: Collection[str]) -> int:
        span = range(segment.start, segment.stop)
        values = {o for o, i in self.made.items() if i in span} | {*needed}
        values |= {owner for i in span for owner in self._read(i)}
        capacity: dict[tuple[str, str], int] = {}
        for owner in values:
            units = 0 if owner in free else self._units(owner)
            capacity[owner, f"{owner} kept"] = units
            i = self.made[owner]
            if i not in span or not may_run_again(self.body[i]):
                capacity[SOURCE, owner] = UNLIMITED
            else:
                for read in self._read(i):
                    capacity[f"{read} kept", owner] = UNLIMITED
            if owner in needed:
                capacity[f"{owner} kept", SINK] = UNLIMITED
        nodes = {
            name: k for k, name in enumerate({SOURCE, SINK, *(n for e in capacity for n in e)})
        }
        rows, columns = zip(*((nodes[a], nodes[b]) for a, b in capacity), strict=True)
        most = np.array([*capacity.values()], dtype=np.int32)
        graph = csr_matrix((most, (rows, columns)), shape=(len(nodes), len(nodes)))
        flow = maximum_flow(graph, nodes[SOURCE], nodes[SINK])
        return int(flow.flow_value) * UNIT_BYTES


def may_run_again(line: Line) -> bool:
    """May "selective" run a line again: no matmul, attention or collective?"""
    if isinstance(line, CallLine):
        return not line.flops and not line.is_attention
    return not (isinstance(line, MoveLine) and line.move.forward in COLLECTIVES)
