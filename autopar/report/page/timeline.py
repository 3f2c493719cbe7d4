"""The simulated step as data: what each device does when, by layer.

    actions    names of actions, which events give by number
    events     [device, lane, action, start_s, end_s]; lanes: 0 compute, 1 collectives, 2 messages
    layers     names; of each stage, the works of one microbatch by letter, F and B or F, I and W,
               as [layer, compute_s, [phase, waited_s, overlapped_s] ...] in the order in which
               they run, with what waits for and runs beside collectives of a phase; and
               `slowdown`, by how much longer compute takes beside communication, as a fraction

An action `2F0` is stage 2's forward of microbatch 0, `2B0` its backward; of a split backward `2I0`
is the part of inputs, `2W0` that of weights. The page cuts it into its layers: each waits
for its collectives, then computes. What compute is slowed by is spread evenly.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autopar.cost.price import layer_works
from autopar.report.page.subject import Subject
from autopar.schedule import Kind

_LANES = {"compute": 0, "collectives": 1, "p2p": 2}
_LETTERS: Mapping[Kind, str] = {
    "forward": "F", "backward": "B", "backward_input": "I", "backward_weight": "W",
}  # fmt: skip


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
        by_letter = {
            _LETTERS[kind]: [
                [number(layers, w.layer), rounded(w.compute_s)]
                + [[phase, *map(rounded, seconds)] for phase, seconds in w.by_phase().items()]
                for w in works
            ]
            for kind, works in layer_works(program, cost).items()
        }
        stages.append({**by_letter, "slowdown": times.overlap_slowdown_fraction})
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
