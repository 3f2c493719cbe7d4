"""The simulated step as data: what each device does when, by layer.

    actions    names of actions, which events give by number
    events     [device, lane, action, start_s, end_s]; lanes: 0 compute, 1 collectives, 2 messages
    layers     names; of each stage, `forward` and `backward` of one microbatch as
               [layer, compute_s, [phase, waited_s, overlapped_s] ...] in the order in which they
               run, with what waits for and runs beside collectives of a phase; and
               `slowdown`, by how much longer compute takes beside communication, as a fraction

An action `2F0` is stage 2's forward of microbatch 0. The page cuts it into its layers: each waits
for its collectives, then computes. What compute is slowed by is spread evenly.
"""

from __future__ import annotations

from typing import Any

from autopar.cost.price import layer_works
from autopar.report.page.subject import Subject

_LANES = {"compute": 0, "collectives": 1, "p2p": 2}


def timeline_facts(subject: Subject) -> dict[str, Any]:
    timeline = subject.timeline
    actions: dict[str, int] = {}
    layers: dict[str, int] = {}

    def number(of: dict[str, int], name: str) -> int:
        return of.setdefault(name, len(of))

    events = [
        [
            event.device, _LANES[event.lane], number(actions, event.action),
            rounded(event.start_s), rounded(event.end_s),
        ]
        for event in timeline.events
    ]  # fmt: skip
    stages = []
    for program, cost, times in zip(
        subject.pipeline.stages, subject.costs, timeline.record.stages, strict=True
    ):
        forward, backward = (
            [
                [number(layers, w.layer), rounded(w.compute_s)]
                + [[phase, *map(rounded, seconds)] for phase, seconds in w.by_phase().items()]
                for w in works
            ]
            for works in layer_works(program, cost)
        )
        slowdown = times.overlap_slowdown_fraction
        stages.append({"forward": forward, "backward": backward, "slowdown": slowdown})
    return {
        "step_time_s": timeline.step_time_s,
        "devices": timeline.names(),
        "actions": list(actions),
        "events": events,
        "layers": list(layers),
        "stages": stages,
    }


def rounded(time_s: float) -> float:
    """Nine digits: what two events differ by stays, and the page stays small."""
    return float(f"{time_s:.9g}")
