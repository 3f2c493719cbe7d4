"""The timeline of a plan's page: a step by layer, and memory over it."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from selenium.webdriver.common.by import By

from autopar.schedule import SPLITS_BACKWARD
from autopar.units import format_bytes, format_seconds
from tests.browser.conftest import Shown
from tests.browser.test_plan_page import Made

pytestmark = [pytest.mark.browser, pytest.mark.timeout(900)]


def test_collectives_are_drawn_by_layer_where_compute_is(shown: Shown) -> None:
    """Not as one lump at the start of the action, beside those of its layers."""
    shown.run("document.getElementById('timeline').scrollIntoView()")
    shown.wait("return document.querySelector('.plots title')")
    for _ in range(8):
        at = shown.run("return document.getElementById('timeline-range').textContent")
        titles = shown.run(
            "return [...document.querySelectorAll('.plots title')].map(t => t.textContent)"
        )
        lumps = {t.split()[2].rstrip(":") for t in titles if t.startswith("collectives of ")}
        assert lumps.isdisjoint(t.partition(", ")[0] for t in titles if t.endswith("of compute"))
        shown.run("document.getElementById('time-in').click()")
        shown.wait(
            "return document.getElementById('timeline-range').textContent !== arguments[0]", at
        )


def test_the_timeline_zooms_to_layers_and_is_saved(shown: Shown) -> None:
    shown.run("document.getElementById('timeline').scrollIntoView()")
    titles = "return [...document.querySelectorAll('.plots title')].map(t => t.textContent)"
    shown.wait(f"return ({titles.removeprefix('return ')}).length")
    actions = {a for a in shown.facts["timeline"]["actions"] if re.fullmatch(r"\d+[FBIW]\d+", a)}
    drawn = " ".join(shown.run(titles))
    assert all(action in drawn for action in actions)
    for _ in range(6):
        shown.run("document.getElementById('time-in').click()")
    shown.wait("return document.getElementById('timeline-range').textContent.startsWith('0 s') "
               "=== false")  # fmt: skip
    inside = (
        "return [...document.querySelectorAll('.plots rect')].every(r => r.x.baseVal.value >= 0)"
    )
    assert shown.run(inside)
    link = shown.browser.find_element(By.CSS_SELECTOR, ".plots a")
    shown.run("arguments[0].dispatchEvent(new MouseEvent('click', {bubbles: true}))", link)
    assert shown.wait("return document.querySelector('.line:target')?.closest('details').open")
    layers = {t.partition(": ")[0].partition(", ")[2] for t in shown.run(titles) if ", " in t}
    assert layers & set(shown.facts["timeline"]["layers"])
    shown.run("document.getElementById('time-fit').click()")
    range_text = "return document.getElementById('timeline-range').textContent"
    whole = f"0 s to {format_seconds(shown.plan.predicted.step_time_s)}"
    assert shown.wait(f"{range_text} === arguments[0]", whole)
    saved: Any = shown.run(
        "let text; const make = URL.createObjectURL; window.saved = null;"
        "URL.createObjectURL = blob => { window.saved = blob.text(); return make(blob); };"
        "document.getElementById('perfetto').click(); return window.saved"
    )
    events = json.loads(saved)["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    assert len(spans) == len(shown.plan.simulate().events)
    end_us = max(e["ts"] + e["dur"] for e in spans)
    assert end_us == pytest.approx(1e6 * shown.plan.predicted.step_time_s, rel=1e-6)
    assert shown.errors() == []


def test_memory_over_the_step(shown: Shown) -> None:
    """The highest point is the predicted peak; it is marked, found and said; then memory falls."""
    shown.run("document.getElementById('timeline').scrollIntoView()")
    peak = shown.wait("return document.querySelector('.timeline-box').dataset.peak")
    assert float(peak) == pytest.approx(shown.plan.predicted.peak_bytes)
    marked = "return [...document.querySelectorAll('.plots text')].map(t => t.textContent)"
    assert f"peak {format_bytes(float(peak))}" in shown.run(marked)
    shown.run("document.getElementById('time-peak').click()")
    said = shown.browser.find_element(By.ID, "memory-at").text
    assert format_bytes(float(peak)) in said and "activations" in said
    devices, stage = shown.facts["live"]["devices"], shown.facts["memory"]["stage"]
    (held,) = (device["held"] for device in devices if stage in device["stages"])
    rows = "return document.querySelectorAll('#held-rows tr').length"
    assert shown.run(rows) == len(held) and shown.facts["memory"]["at"] in shown.run(
        "return document.querySelector('.held summary').textContent"
    )
    assert shown.errors() == []


@pytest.mark.parametrize("name", ["gpt2", "t5", "chunks"])
def test_devices_with_several_stages(name: str, made: Made) -> None:
    """Each device has a row with the actions of all its stages; parts of backward differ."""
    shown = made(name)
    shown.run("document.getElementById('timeline').scrollIntoView()")
    peak = shown.wait("return document.querySelector('.timeline-box').dataset.peak")
    assert float(peak) == pytest.approx(shown.plan.predicted.peak_bytes)
    keys = shown.run("return [...document.querySelectorAll('.keys li')].map(e => e.textContent)")
    assert ("gradients of weights" in keys) == (shown.plan.data.schedule in SPLITS_BACKWARD)
    assert name != "chunks" or shown.plan.data.schedule in SPLITS_BACKWARD
    titles = shown.run(
        "return [...document.querySelectorAll('.plots title')].map(t => t.textContent)"
    )
    actions = {a for a in shown.facts["timeline"]["actions"] if re.fullmatch(r"\d+[FBIW]\d+", a)}
    assert all(any(action in title for title in titles) for action in actions)
    shown.run("document.getElementById('time-peak').click()")
    assert format_bytes(float(peak)) in shown.browser.find_element(By.ID, "memory-at").text
    for device, facts in enumerate(shown.facts["live"]["devices"]):
        shown.run(
            "const e = document.getElementById('memory-of'); e.value = arguments[0];"
            "e.dispatchEvent(new Event('change'))", str(device),
        )  # fmt: skip
        peak = shown.run("return document.querySelector('.timeline-box').dataset.peak")
        assert float(peak) == pytest.approx(facts["peak"][0])
    assert shown.errors() == []
