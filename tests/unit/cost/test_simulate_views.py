"""Views of simulated steps: lanes, memory, traces, drawings; slow devices; steps of a plan."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar import OptionError, Plan
from autopar.cost.simulate import Event, PartWork, SplitBackward, StageTimes, Timeline, simulate
from autopar.schedule import one_f_one_b, zero_bubble
from tests.helpers.jobs import machine
from tests.helpers.strategies import placed

SVG = "{http://www.w3.org/2000/svg}"
WIDTH = 16


def stage(forward: PartWork, backward: PartWork | SplitBackward, **fields: Any) -> StageTimes:
    return StageTimes(1, PartWork(), forward, backward, PartWork(), 0.0, **fields)


def two_stages() -> Timeline:
    """One microbatch, 1 s per message, 100 static bytes and 10 saved for backward."""
    times = StageTimes(
        n_ranks=2,
        before=PartWork(0.0, 0.5),
        forward=PartWork(1.0, 0.5),
        backward=PartWork(2.0, 0.5, 1.0),
        after=PartWork(),
        update_s=0.25,
        sync_s=1.0,
        n_sync_buckets=2,
        static_bytes=100.0,
        kept_bytes=10.0,
    )
    return simulate(one_f_one_b(range(2), 1), [times, times], 1.0)


def of_lane(timeline: Timeline, device: int, lane: str) -> list[tuple[str, float, float]]:
    found = [e for e in timeline.events if (e.device, e.lane) == (device, lane)]
    return [(e.action, e.start_s, e.end_s) for e in found]


def test_lanes() -> None:
    """F on 0 until 2, its message until 3, F and B on 1 until 7, a message, B on 0 until 10.5."""
    timeline = two_stages()
    assert of_lane(timeline, 0, "compute") == [
        ("0F0", 0.5, 2.0), ("0B0", 8.0, 10.5), ("optimizer", 11.25, 11.5),
    ]  # fmt: skip
    assert of_lane(timeline, 0, "collectives") == [
        ("gather parameters", 0.0, 0.5),
        ("collectives of 0F0", 0.5, 1.0),
        ("collectives of 0B0", 8.0, 9.5),
        # Starts after half of the backward (one of two buckets) and 1 s of its own collectives.
        ("sync gradients", 10.25, 11.25),
    ]
    assert of_lane(timeline, 0, "p2p") == [("0SF0>1", 2.0, 3.0)]
    assert of_lane(timeline, 1, "p2p") == [("1SB0>0", 7.0, 8.0)]
    assert [e.start_s for e in timeline.events] == sorted(e.start_s for e in timeline.events)


def test_memory_by_hand() -> None:
    timeline = two_stages()
    assert timeline.memory(0) == ((0.0, 100.0), (0.5, 110.0), (10.5, 100.0))
    assert timeline.memory(1) == ((0.0, 100.0), (3.0, 110.0), (7.0, 100.0))
    assert timeline.peak_bytes(0) == 110.0


def test_memory_of_split_backwards() -> None:
    """Kept until the weight part of the backward is done."""
    halves = stage(PartWork(1.0), SplitBackward(PartWork(1.0), PartWork(1.0)), kept_bytes=1.0)
    parts = simulate(zero_bubble(range(2), 1), [halves] * 2)
    assert parts.memory(1) == ((0.0, 0.0), (1.0, 1.0), (4.0, 0.0))


def test_a_chrome_trace(tmp_path: Path) -> None:
    timeline = two_stages()
    timeline.to_chrome_trace(tmp_path / "trace.json")
    entries = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [e for e in entries if e["ph"] == "X"]
    assert len(spans) == len(timeline.events)
    assert max(e["ts"] + e["dur"] for e in spans) == pytest.approx(timeline.step_time_s * 1e6)
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in entries if e["name"] == "thread_name"}
    sends = [e for e in spans if e["name"] == "0SF0>1"]
    assert [lanes[e["pid"], e["tid"]] for e in sends] == ["p2p"]
    names = [e["args"]["name"] for e in entries if e["name"] == "process_name"]
    assert names == ["stage 0", "stage 1"]
    counters = [(e["ts"], e["args"]["bytes"]) for e in entries if e["ph"] == "C" and e["pid"] == 0]
    assert counters == [(t * 1e6, size_bytes) for t, size_bytes in timeline.memory(0)]


def test_a_trace_without_known_bytes_has_no_memory(tmp_path: Path) -> None:
    timeline = simulate(placed("interleaved", 2, 2, 2), [stage(PartWork(1.0), PartWork(2.0))] * 4)
    timeline.to_chrome_trace(tmp_path / "trace.json")
    entries = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert not [e for e in entries if e["ph"] == "C"]
    assert [e["args"]["name"] for e in entries if e["name"] == "process_name"] == [
        "device 0", "device 1",
    ]  # fmt: skip


def test_a_drawing(tmp_path: Path) -> None:
    timeline = two_stages()
    timeline.to_svg(tmp_path / "step.svg")
    root = ET.parse(tmp_path / "step.svg").getroot()
    boxes = {
        title.text.partition(":")[0]: box
        for box in root.iter(f"{SVG}rect")
        if (title := box.find(f"{SVG}title")) is not None and title.text
    }
    assert set(boxes) == {e.action for e in timeline.events}
    place = {name: (float(box.get("x", 0)), float(box.get("y", 0))) for name, box in boxes.items()}
    height = {name: float(box.get("height", 0)) for name, box in boxes.items()}
    # Later events are further right; lanes and devices do not overlap.
    assert place["0F0"][0] < place["0SF0>1"][0] < place["0B0"][0]
    assert place["0F0"][1] + height["0F0"] <= place["collectives of 0F0"][1]
    assert place["sync gradients"][1] + height["sync gradients"] <= place["1SB0>0"][1]
    assert place["0SF0>1"][1] + height["0SF0>1"] <= place["1F0"][1]


def test_a_slow_device_by_hand() -> None:
    """Only compute takes longer, including the optimizer."""
    times = StageTimes(1, PartWork(), PartWork(1.0, 1.0), PartWork(2.0, 1.0), PartWork(), 1.0)
    before, slow = (
        simulate(one_f_one_b(range(2), 1), [times] * 2, slow=s) for s in (None, (1, 1.5))
    )
    assert before.step_time_s == 2 + 5 + 3 + 1
    assert slow.step_time_s == 2 + (1.5 + 1 + 3 + 1) + 3 + 1.5
    assert slow.devices[1].update_s == 1.5
    assert slow.devices[1].collectives_s == before.devices[1].collectives_s


def test_jitter_is_drawn_for_every_compute() -> None:
    stages = [stage(PartWork(1.0), PartWork(1.0))] * 2

    def computes(seed: int) -> list[Event]:
        timeline = simulate(one_f_one_b(range(2), 4), stages, jitter=(0.5, seed))
        return [e for e in timeline.events if e.lane == "compute"]

    took_s = {e.action: e.end_s - e.start_s for e in computes(1)}
    assert all(1.0 <= time_s <= 1.5 for time_s in took_s.values())
    assert len({round(time_s, 6) for time_s in took_s.values()}) == len(took_s) == 16
    assert computes(1) == computes(1) != computes(2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"slow": (2, 1.5)}, r"slow=\(2, 1.5\) is not one of 2 devices"),
        ({"slow": (0, 0.5)}, "a factor of at least 1"),
        ({"jitter": (-0.1, 0)}, "a fraction of at least 0"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        simulate(one_f_one_b(range(2), 2), [stage(PartWork(1.0), PartWork(1.0))] * 2, **options)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.square().mean()


@lru_cache
def planned(n_stages: int) -> Plan:
    names = [f"layers.{i}" for i in range(4)]
    per_stage = 4 // n_stages
    stages = [(names[i : i + per_stage], (1, 1)) for i in range(0, 4, per_stage)]
    example = {"x": torch.zeros(8, WIDTH)}
    mesh = machine((1, n_stages))
    return autopar.plan(Layers(), mesh, example, stages=stages, microbatches=4)


@pytest.mark.parametrize("n_stages", [1, 2])
def test_a_plan_is_simulated_as_it_was_priced(n_stages: int) -> None:
    plan = planned(n_stages)
    timeline = plan.simulate()
    predicted = plan.predicted
    assert timeline.step_time_s == predicted.step_time_s
    assert timeline.bubble == predicted.bubble
    peaks = [timeline.peak_bytes(i) for i in range(n_stages)]
    assert peaks == pytest.approx(predicted.peak_bytes_per_stage)
    # What microbatches save for backward comes and goes; the rest stays.
    bytes_held = [size_bytes for _, size_bytes in timeline.memory(0)]
    assert 0 < min(bytes_held) < max(bytes_held)
    assert bytes_held[0] == pytest.approx(bytes_held[-1])


def test_a_device_is_at_it_from_its_first_event_to_its_last() -> None:
    """ZB-H2 has no bubble on any device; the step is longer by the fill of the pipeline only."""
    one = PartWork(1.0)
    stages = [StageTimes(1, PartWork(), one, SplitBackward(one, one), PartWork(), 0.0)] * 4
    timeline = simulate(zero_bubble(range(4), 8, zb_h2=True), stages, sends_as_made=True)
    assert (timeline.step_time_s, timeline.longest_device_s) == (8 * 3.0 + 3, 8 * 3.0)
