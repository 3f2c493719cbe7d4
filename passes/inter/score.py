"""What a step of several stages takes, played from what each stage takes, without lowering them.

The schedule's own messages are placed and played by the simulator (`cost/simulate`), with

    compute     a stage's seconds of one microbatch, a third of them forward: of a product, backward
                makes two gradients. How they divide hardly matters: on small models with slow links
                it moves the step by half a percent
    messages    of every pair of stages, forward and back, as `cost/price/prediction.py` prices them: of the
                slower end, its slices one by one                                       (`hops_of`)
    once        all that a stage does once a step, after its last backward; then the loss is given
                to all ranks

What is left out: that parameters are gathered before and not after, and tied gradients. Played so,
small pipelines on slow links are within 1% of what is simulated line by line, 3% with ties; the
closed form of Alpa is off by up to a third, because receivers wait for messages.

With many microbatches the schedule repeats itself: more than `_STEADY` per stage add the time
that one of the last ones did.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from autopar.cost.hardware import flat_group
from autopar.cost.laws import collective_time_s
from autopar.cost.simulate import Spent, StageTimes, simulate
from autopar.mesh import Link, LogicalMesh
from autopar.placement import Spec, TensorType, local_bytes
from autopar.schedule import ORDERS, Action, Script, Transfer, place

_FORWARD = 1 / 3
# Microbatches per stage that are played; of the last half of them, what one adds is measured.
_STEADY = 8


class StageSeconds(NamedTuple):
    """Seconds of a stage: of one microbatch, and once a step."""

    time_s: float
    once_s: float


class MessageSeconds(NamedTuple):
    """Seconds of the messages of one microbatch between two stages; None: none returns."""

    source: int
    target: int
    forward_s: float
    backward_s: float | None


class StageBoundary(NamedTuple):
    """A stage's view of its ranks, how it cuts what it sends and what it receives, and the types
    of one microbatch's values."""

    view: LogicalMesh
    sent: Mapping[str, Spec]
    received: Mapping[str, Spec]
    types: Mapping[str, TensorType]


def hops_of(stages: Sequence[StageBoundary], links: Sequence[Link]) -> list[MessageSeconds]:
    """Of every pair of stages of which one reads what the other makes; `links` are those between
    nodes and inside them."""
    crossing: dict[tuple[int, int], list[str]] = {}
    for target, stage in enumerate(stages):
        for value in stage.received:
            source = next(k for k in range(target) if value in stages[k].sent)
            crossing.setdefault((source, target), []).append(value)
    return [
        _hop(source, target, values, stages, _link(stages[source].view, stages[target].view, links))
        for (source, target), values in crossing.items()
    ]


def _link(source: LogicalMesh, target: LogicalMesh, links: Sequence[Link]) -> Link:
    """Stages lie inside nodes, or have whole ones."""
    nodes = source.nodes
    if nodes is None:
        return links[-1]
    last_rank = target.first_rank + target.n_ranks - 1
    return links[-1 if source.first_rank // nodes.n_ranks == last_rank // nodes.n_ranks else 0]


def _hop(
    source: int, target: int, values: Sequence[str], stages: Sequence[StageBoundary], link: Link
) -> MessageSeconds:
    ends = stages[source], stages[target]
    ways: dict[bool, list[tuple[float, float]]] = {}
    for value in values:
        tensor = ends[1].types[value]
        specs = ends[0].sent[value], ends[1].received[value]
        cuts = [_cuts(tensor, spec, end) for spec, end in zip(specs, ends, strict=True)]
        sides_s = [
            _side_s(tensor, specs[side], ends[side], cuts[side], cuts[1 - side], link)
            for side in (0, 1)
        ]
        for is_back in (False, True)[: 1 + tensor.has_grad]:
            ways.setdefault(is_back, []).append((sides_s[0], sides_s[1]))
    slower_s = {way: max(map(math.fsum, zip(*of, strict=True))) for way, of in ways.items()}
    return MessageSeconds(source, target, slower_s[False], slower_s.get(True))


def _cuts(tensor: TensorType, spec: Spec, stage: StageBoundary) -> list[int]:
    """Into how many parts each factor of a tensor is cut."""
    sizes = stage.view.sizes
    return [math.prod(sizes[axis] for axis in spec.axes_of(cell)) for cell in tensor.cells]


def _side_s(
    tensor: TensorType,
    spec: Spec,
    stage: StageBoundary,
    cuts: list[int],
    others: list[int],
    link: Link,
) -> float:
    """Of one rank: its part, in as many pieces as it overlaps parts of the other stage."""
    n_pieces = math.prod(math.ceil(b / a) for a, b in zip(cuts, others, strict=True))
    size_bytes = local_bytes(tensor, spec, stage.view.sizes)
    return n_pieces * link.latency_s + size_bytes * link.s_per_byte


def step_s(
    schedule: str,
    n_microbatches: int,
    stages: Sequence[StageSeconds],
    boundaries: Sequence[StageBoundary],
    links: Sequence[Link],
    loss_bytes: int,
) -> float:
    """Seconds of a step of stages that are solved; the loss is given to all ranks over the slowest
    of `links`."""
    group = flat_group(sum(end.view.n_ranks for end in boundaries), links[0])
    loss_s = collective_time_s("all_reduce", loss_bytes, group) if loss_bytes else 0.0
    return played_s(schedule, n_microbatches, stages, hops_of(boundaries, links), loss_s)


def played_s(
    schedule: str,
    n_microbatches: int,
    stages: Sequence[StageSeconds],
    hops: Sequence[MessageSeconds],
    loss_s: float = 0.0,
) -> float:
    """Seconds of a step; `loss_s` of giving the loss to all ranks."""
    n_played = _STEADY * len(stages)
    if n_microbatches <= n_played:
        return _played_s(schedule, n_microbatches, stages, hops, loss_s)
    long_s, short_s = (
        _played_s(schedule, n, stages, hops, loss_s) for n in (n_played, n_played // 2)
    )
    each_s = (long_s - short_s) / (n_played - n_played // 2)
    return long_s + (n_microbatches - n_played) * each_s


def _played_s(
    schedule: str,
    m: int,
    stages: Sequence[StageSeconds],
    hops: Sequence[MessageSeconds],
    loss_s: float,
) -> float:
    between = tuple(Transfer(h.source, h.target, h.backward_s is not None) for h in hops)
    of_pair = {(h.source, h.target): h for h in hops}

    def message_s(send: Action) -> float:
        ends = send.stage, send.partner.stage
        if send.is_forward:
            return of_pair[ends].forward_s
        back_s = of_pair[ends[::-1]].backward_s
        assert back_s is not None, "a gradient of what has none"
        return back_s

    times = [
        StageTimes(
            n_ranks=1,
            before=Spent(),
            forward=Spent(time_s * _FORWARD),
            backward=Spent(time_s * (1 - _FORWARD)),
            after=Spent(once_s),
            update_s=0.0,
        )
        for time_s, once_s in stages
    ]
    script = _script(schedule, len(stages), m, between)
    return simulate(script, times, message_s, loss_s=loss_s).step_time_s


@lru_cache(maxsize=256)
def _script(schedule: str, n_stages: int, m: int, between: tuple[Transfer, ...]) -> Script:
    return place(ORDERS[schedule](n_stages, m), between)
