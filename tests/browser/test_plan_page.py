"""The page of a plan as a reader uses it: every click, and every number; two plans on one page."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

import autopar
from autopar.cost.memory import footprint_of_plan
from autopar.units import format_bytes, format_count, format_seconds
from tests.browser.conftest import Shown
from tests.helpers.plans import bound_of

Made = Callable[[str], Shown]
pytestmark = [pytest.mark.browser, pytest.mark.timeout(900)]
MOST_BYTES = 5e6
READY = "return document.documentElement.dataset.ready"


def gain(value: float) -> str:
    return "nothing" if abs(value) < 0.0005 else f"{value:+.1%}"


FORMATS: dict[str, Callable[[float], str]] = {
    "seconds": format_seconds, "bytes": format_bytes, "count": format_count,
    "percent": lambda share: f"{share:.1%}", "gain": gain,
    "flops": lambda rate: f"{format_count(rate)}FLOP/s",
    "days": lambda value: f"{float(f'{value:.3g}'):,.10g} days",
}  # fmt: skip


def figures(shown: Shown, where: str = "") -> list[tuple[str, str, str]]:
    """(value, format, text) of every number on the page."""
    found: list[tuple[str, str, str]] = shown.run(
        "return [...document.querySelectorAll(`${arguments[0]} .figure`)]"
        ".map(f => [f.dataset.value, f.dataset.format, f.textContent])",
        where,
    )
    return found


def test_the_page_opens_without_an_error(shown: Shown) -> None:
    shown.go_to_graph()
    assert shown.errors() == []
    heads = shown.run("return [...document.querySelectorAll('h2')].map(e => e.textContent)")
    assert heads[:6] == [
        "Time and memory", "What would help", "Alternatives",
        "Most expensive operators", "Graph", "Timeline",
    ]  # fmt: skip
    assert shown.path.stat().st_size < MOST_BYTES
    loaded = shown.run("return performance.getEntriesByType('resource').map(e => e.name)")
    assert loaded == [], "the page loads something"


def test_numbers_are_the_predictions(shown: Shown) -> None:
    for value, form, text in figures(shown):
        assert text == ("–" if value == "" else FORMATS[form](float(value)))
    predicted, timeline = shown.plan.predicted, shown.plan.simulate()
    by_name = dict(
        shown.run(
            "return [...document.querySelectorAll('[data-predicted]')]"
            ".map(f => [f.dataset.predicted, Number(f.dataset.value)])"
        )
    )
    assert by_name["step"] == predicted.step_time_s == timeline.step_time_s
    assert predicted.interval_s is not None
    interval = [float(value) for value, *_ in figures(shown, "#interval")]
    assert interval == pytest.approx(predicted.interval_s)
    assert by_name["peak memory"] == predicted.peak_bytes
    assert by_name["MFU"] == predicted.mfu and by_name["tokens/s"] == predicted.tokens_per_s
    n_ranks, hardware = shown.facts["setting"]["n_ranks"], bound_of(shown.plan).hardware
    assert by_name["tokens/s per device"] == predicted.tokens_per_s / n_ranks
    assert by_name["per device"] == pytest.approx(predicted.mfu * hardware.peak_flops_per_s)
    trillion_s = by_name["a trillion tokens"] * 86400
    assert trillion_s * predicted.tokens_per_s == pytest.approx(1e12)
    (free,) = [value for name, value in by_name.items() if name.startswith("free of")]
    takes = footprint_of_plan(predicted.peak_bytes, hardware)
    device_bytes = hardware.device.memory_bytes
    assert free == device_bytes - takes.reserved_bytes - takes.margin_bytes
    assert by_name["communication"] == predicted.comm_time_s == timeline.comm_time_s
    assert by_name["of it exposed"] == predicted.exposed_comm_s
    verdict = shown.run(
        "return [...document.querySelectorAll('.verdict li')].map(e=>e.textContent)"
    )
    assert verdict == shown.plan.verdict()


def test_bars_add_up(shown: Shown) -> None:
    def parts(bar: str) -> dict[str, float]:
        return dict(
            shown.run(
                f"return [...document.querySelectorAll('[data-bar={bar}] [data-part]')]"
                ".map(f => [f.dataset.part, Number(f.dataset.value)])"
            )
        )

    time = {name: s for name, s in parts("time").items() if not name.startswith("hidden")}
    assert sum(time.values()) == pytest.approx(shown.plan.predicted.step_time_s, rel=1e-8)
    assert sum(parts("memory").values()) == pytest.approx(shown.plan.predicted.peak_bytes)
    widths = shown.run(
        "return [...document.querySelectorAll('[data-bar=time] .bar:not(.hidden-part) .piece')]"
        ".map(p => parseFloat(p.style.width))"
    )
    assert sum(widths) == pytest.approx(100, abs=0.01)


def test_alternatives_open(shown: Shown) -> None:
    shown.run("document.querySelectorAll('.rest').forEach(d => { d.open = true; })")
    rows = shown.browser.find_elements(By.CSS_SELECTOR, ".alternative")
    assert len(rows) == len(shown.plan.data.alternatives)
    assert shown.run("return document.querySelectorAll('.rest .alternative').length") == max(
        len(rows) - 6, 0
    )
    by_name = {row.find_element(By.CSS_SELECTOR, ".name").text: row for row in rows}
    rows = [by_name[alternative.name] for alternative in shown.plan.data.alternatives]
    within = {row["name"]: row["within_error"] for row in shown.facts["alternatives"]}
    for row, alternative in zip(rows, shown.plan.data.alternatives, strict=True):
        why = row.find_element(By.CSS_SELECTOR, ".why").text
        assert why and ("within the error" in why) == within[alternative.name]
        if alternative.summary is None or alternative.name == shown.plan.data.chosen:
            continue  # its row has all that is known
        shown.run("arguments[0].scrollIntoView({block: 'center'})", row)
        row.find_element(By.TAG_NAME, "summary").click()
        said = row.find_element(By.CSS_SELECTOR, ".difference").text
        assert all(kind in said for kind in alternative.summary.times_s)
        assert all(kind in said for kind in alternative.summary.traffic_bytes)
    assert shown.errors() == []


def test_a_box_says_what_it_is(shown: Shown) -> None:
    shown.go_to_graph()
    found = shown.facts["stages"][0]["details"]
    dearest = max(found.values(), key=lambda d: d["forward_s"] + d["backward_s"])
    box = shown.run(
        "const boxes = [...document.querySelectorAll('.node')];"
        "return boxes.find(b => b.dataset.path === arguments[0])", dearest["module"],
    )  # fmt: skip
    shown.run("arguments[0].dispatchEvent(new MouseEvent('click', {bubbles: true}))", box)
    panel = shown.browser.find_element(By.ID, "details")
    assert dearest["module"] in panel.text and ", ".join(dearest["operators"]) in panel.text
    values = [float(value) for value, _, _ in figures(shown, "#details")]
    assert dearest["forward_s"] in values and dearest["kept_bytes"] in values
    for where in dearest["where"]:
        assert re.sub(r"^.*/site-packages/", "", where) in panel.text
    for option in dearest["runners_up"]:
        assert option["option"] in panel.text
    generated = panel.find_element(By.CSS_SELECTOR, "a[href^='#stage_']")
    shown.run("arguments[0].click()", generated)
    line = shown.wait("return document.querySelector('.line:target')?.textContent")
    assert re.sub(r"\.\d+", ".*", dearest["module"]) in re.sub(r"\.\d+", ".*", line)
    assert shown.errors() == []


def test_blocks_unfold_and_fold(shown: Shown) -> None:
    shown.go_to_graph()
    count = "return document.querySelectorAll('.node').length"
    folded, every = shown.run(count), sum(s["n_nodes"] for s in shown.facts["stages"])
    n_arrived = sum(
        d["kind"] == "arrived" for s in shown.facts["stages"] for d in s["details"].values()
    )
    assert folded < every
    shown.run("document.getElementById('unfold-all').click()")
    assert shown.wait(f"{count} > arguments[0]", folded)
    assert every - n_arrived <= shown.run(count) <= every
    shown.run("document.getElementById('fold-all').click()")
    assert shown.wait(f"{count} === arguments[0]", folded)
    fold = shown.browser.find_element(By.CSS_SELECTOR, ".fold")
    shown.run("arguments[0].dispatchEvent(new MouseEvent('click', {bubbles: true}))", fold)
    assert shown.wait(f"{count} > arguments[0]", folded)
    assert shown.errors() == []


def test_search_finds(shown: Shown) -> None:
    shown.go_to_graph()
    box = shown.browser.find_element(By.ID, "graph-search")
    name = {"gpt2": "transformer.h.4.mlp.c_fc", "t5": "encoder.block.2.layer.1"}[shown.name]
    for words in (name, "embedding", "layer_norm" if shown.name == "t5" else "ln_1"):
        box.clear()
        box.send_keys(words)
        assert shown.wait("return document.querySelectorAll('.node.hit').length"), words
        assert re.match(r"[1-9]\d* found", shown.browser.find_element(By.ID, "graph-found").text)
    box.clear()
    box.send_keys("no such thing")
    assert shown.browser.find_element(By.ID, "graph-found").text == "0 found"


def test_colours_zoom_and_keys(shown: Shown) -> None:
    shown.go_to_graph()
    number, texts = ".node .number", "return [...document.querySelectorAll(arguments[0])]"
    by_time = shown.run(f"{texts}.map(e => e.textContent)", number)
    shown.run("const h = document.getElementById('heat'); h.value = 'bytes';"
              "h.dispatchEvent(new Event('change'))")  # fmt: skip
    by_bytes = shown.run(f"{texts}.map(e => e.textContent)", number)
    assert by_time != by_bytes and any(text.endswith("iB") for text in by_bytes)
    where = "return document.querySelector('svg.graph > g').getAttribute('transform')"
    for button in ("zoom-in", "zoom-out", "fit"):
        before = shown.run(where)
        shown.run(f"document.getElementById('{button}').click()")
        assert shown.run(where) != before
    graph = shown.browser.find_element(By.CSS_SELECTOR, "svg.graph")
    before = shown.run(where)
    shown.run("arguments[0].focus()", graph)
    shown.browser.switch_to.active_element.send_keys(Keys.ARROW_DOWN)
    assert shown.run(where) != before
    node = shown.browser.find_element(By.CSS_SELECTOR, ".node")
    shown.run("arguments[0].focus()", node)
    shown.browser.switch_to.active_element.send_keys(Keys.ENTER)
    assert "Click a box" not in shown.browser.find_element(By.ID, "details").text
    assert shown.errors() == []


def test_tables_filter_and_sort(shown: Shown) -> None:
    rows = "return document.querySelectorAll('#parameter-rows tbody tr').length"
    every = shown.run(rows)
    assert every == len(shown.facts["parameters"])
    field = shown.browser.find_element(By.CSS_SELECTOR, "#parameter-rows input")
    shown.run("arguments[0].scrollIntoView()", field)
    field.send_keys("bias" if shown.name == "gpt2" else "SelfAttention")
    assert 0 < shown.run(rows) < every
    heads = shown.browser.find_elements(By.CSS_SELECTOR, "#collective-rows th button")
    (calls,) = [head for head in heads if head.text == "calls"]
    column = [head.text for head in heads].index("calls")
    cells = (
        "return [...document.querySelectorAll('#collective-rows tbody tr')]"
        f".map(r => Number(r.cells[{column}].textContent))"
    )
    shown.run("arguments[0].click()", calls)
    assert shown.run(cells) == sorted(shown.run(cells), reverse=True)
    shown.run("arguments[0].click()", calls)
    assert shown.run(cells) == sorted(shown.run(cells))
    assert shown.run("return document.querySelector('th[aria-sort]').ariaSort") == "ascending"
    devices = shown.browser.find_element(By.CSS_SELECTOR, ".devices").text
    assert f"{shown.facts['setting']['n_ranks'] - 1}" in devices
    axes = [axis for stage in shown.facts["devices"] for axis in stage["axes"]]
    for axis in axes:
        whole = f"{axis['name']} = all {axis['size']}, in rank order"
        assert (whole in devices) or f"groups of {axis['size']}" in devices


def test_the_most_expensive_operators(shown: Shown) -> None:
    """Their compute adds up to that of the step, but for parameters made for use and slowdown."""
    times = [float(value) for value, _, _ in figures(shown, "#operator-rows")]
    assert times == sorted(times, reverse=True)
    kinds = {"matmul", "attention", "pointwise"}
    device = shown.facts["live"]["devices"][shown.facts["time"]["device"]]
    of_device = sum(
        len(part["blocks"]) * (d["forward_s"] + d["backward_s"])
        for stage in (shown.facts["stages"][number] for number in device["stages"])
        for part in stage["sections"]
        for d in (stage["details"][str(node)] for node in part["copies"][0])
    )
    parts = [p["time_s"] for p in shown.facts["time"]["parts"] if p["kind"] in kinds]
    assert of_device == pytest.approx(sum(parts), rel=0.05)
    link = shown.browser.find_element(By.CSS_SELECTOR, "#operator-rows a")
    shown.run("arguments[0].click()", link)
    assert shown.wait("return document.querySelector('.line:target')?.closest('details').open")


FIRST_TEXTS = """
const seen = [];
for (const e of document.querySelectorAll('main *')) {
  const r = e.getBoundingClientRect(), isTitle = e.tagName.toLowerCase() === 'title';
  const own = [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim());
  if (!own || !r.width || !r.height || isTitle) continue;
  const scale = e.ownerSVGElement ? e.getScreenCTM().a : 1;
  seen.push([parseFloat(getComputedStyle(e).fontSize) * scale, e.textContent.slice(0, 40)]);
}
return seen.sort((a, b) => a[0] - b[0]).slice(0, 3);
"""


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1440, 390])
def test_desktop_and_phone(shown: Shown, width: int, theme: str) -> None:
    """Nothing scrolls sideways, no text is smaller than 9 px, also once all is unfolded and fit."""
    size = {"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": width < 600}
    shown.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        shown.browser.get(f"{shown.path.as_uri()}#;theme={theme}")
        shown.browser.refresh()
        shown.wait("return document.documentElement.dataset.ready")
        shown.go_to_graph()
        shown.run("document.getElementById('timeline').scrollIntoView()")
        shown.wait("return document.querySelectorAll('.plots rect').length")
        assert shown.run("return document.documentElement.dataset.theme") == theme
        assert shown.run("return document.documentElement.scrollWidth") <= width
        assert shown.run(FIRST_TEXTS)[0][0] >= 9 - 1e-3, shown.run(FIRST_TEXTS)
        shown.run("document.getElementById('unfold-all').click()")
        every = sum(s["n_nodes"] for s in shown.facts["stages"])
        shown.wait("return document.querySelectorAll('.node').length > arguments[0]", every // 2)
        shown.run("document.getElementById('fit').click()")
        assert shown.run(FIRST_TEXTS)[0][0] >= 9 - 1e-3, shown.run(FIRST_TEXTS)
        assert shown.errors() == []
    finally:
        shown.browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_the_url_has_what_is_open(shown: Shown) -> None:
    """A copied URL shows the same box, colours, part of the step and opened files."""
    shown.go_to_graph()
    shown.run("const heat = document.getElementById('heat'); heat.value = 'bytes';"
              "heat.dispatchEvent(new Event('change'));"
              "document.querySelector('.node').dispatchEvent(new MouseEvent('click'));"
              "document.querySelector('details.file').open = true;"
              "document.getElementById('time-in').click()")  # fmt: skip
    shown.wait("return location.hash.includes('open=') && location.hash.includes('time=')")
    link = shown.browser.find_element(By.CSS_SELECTOR, "nav a[href='#timeline']")
    shown.run("arguments[0].click()", link)
    url = shown.wait("return location.hash.startsWith('#timeline;') && location.href")
    ranged = shown.browser.find_element(By.ID, "timeline-range").text
    said = shown.browser.find_element(By.ID, "details").text
    shown.browser.get("about:blank")
    shown.browser.get(url)
    shown.wait("return document.documentElement.dataset.ready")
    shown.go_to_graph()
    assert shown.run("return document.getElementById('heat').value") == "bytes"
    assert shown.run("return document.querySelector('details.file').open")
    shown.wait("return document.getElementById('timeline-range').textContent === arguments[0]",
               ranged)  # fmt: skip
    assert shown.browser.find_element(By.ID, "details").text == said
    assert shown.errors() == []


def test_what_zero_moves_is_on_the_boxes(shown: Shown) -> None:
    """All gathers and gradient sync of the step, on the boxes of their parameters."""
    shown.go_to_graph()
    texts = shown.run("return [...document.querySelectorAll('.moved')].map(e => e.textContent)")
    assert any(text.startswith("gathers ") or "syncs " in text for text in texts)
    for stage, shown_stage in enumerate(shown.facts["stages"]):
        on_boxes = {}
        for part in shown_stage["sections"]:
            for d in (shown_stage["details"][str(node)] for node in part["copies"][0]):
                for p in d["parameters"]:
                    moved = sum(m["size_bytes"] for m in p["moved"])
                    on_boxes[p["name"]] = moved * len(part["blocks"])
        rows = [
            c.count * c.size_bytes for c in shown.plan.collectives()
            if c.stage == stage and c.phase in ("param_gather", "grad_sync") and "pp" not in c.axes
        ]  # fmt: skip
        assert sum(on_boxes.values()) == pytest.approx(sum(rows), rel=0.02)


def test_the_wheel_scrolls_the_page_and_one_colour_means_one_thing(shown: Shown) -> None:
    shown.go_to_graph()
    where = "return document.querySelector('svg.graph > g').getAttribute('transform')"
    before = shown.run(where)
    turn = (
        "const turned = new WheelEvent('wheel', {deltaY: 100, bubbles: true, cancelable: true,"
        "ctrlKey: arguments[0]}); document.querySelector('svg.graph').dispatchEvent(turned);"
        "return turned.defaultPrevented"
    )
    assert not shown.run(turn, False) and shown.run(where) == before
    assert shown.run(turn, True) and shown.run(where) != before
    colours = shown.run(
        "return [...document.querySelectorAll('.swatch')].map(s =>"
        " [s.style.backgroundColor, s.parentElement.firstChild.nextSibling.textContent])"
    )
    words: dict[str, set[str]] = {}
    for colour, word in colours:
        words.setdefault(colour, set()).add(word.removeprefix("hidden: ").partition(" over ")[0])
    same = (
        {"optimizer"},
        {"gathered weights", "gathers of parameters"},
        {"gradients", "gradient sync"},
        {"activations", "collectives of activations"},
        {"waits for messages", "messages"},
    )
    assert all(len(found) == 1 or found in same for found in words.values()), words


def test_a_command_is_copied(shown: Shown) -> None:
    shown.run("window.copied = null; Object.defineProperty(navigator, 'clipboard', {value:"
              " {writeText: async text => { window.copied = text; }}})")  # fmt: skip
    shown.run("document.querySelector('.help .copy').click()")
    assert shown.wait("return window.copied") == shown.facts["choices"][0]["command"]
    assert shown.wait("return document.querySelector('.help .copy').textContent") == "copied"
    nav = "return document.querySelector('nav').getBoundingClientRect().top"
    shown.run("document.getElementById('assumptions').scrollIntoView()")
    assert shown.wait(f"{nav} >= 0 && ({nav.removeprefix('return ')}) < 5"), "navigation is sticky"


def test_light_dark_and_print(shown: Shown) -> None:
    paper = "return getComputedStyle(document.body).backgroundColor"
    before = shown.run(paper)
    shown.run("document.getElementById('theme').click()")
    assert shown.run(paper) != before
    shown.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    hidden = shown.run("return getComputedStyle(document.querySelector('nav')).display")
    shown.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
    assert hidden == "none"
    ink = shown.run(  # a name stands beside every colour of a placement
        "return [...document.querySelectorAll('.chip')].every(c => c.nextSibling.textContent)"
    )
    assert ink


def test_a_70b_on_128_gpus(made: Made) -> None:
    """Small, and quickly there: the time is printed, not asserted, for machines are not idle."""
    shown = made("70b")
    size_bytes, took_ms = shown.path.stat().st_size, float(shown.run(READY))
    sys.stdout.write(f"Llama-70B on (16, 8): {size_bytes / 1e6:.2f} MB, ready after {took_ms} ms\n")
    assert size_bytes < MOST_BYTES
    shown.go_to_graph()
    assert "80 blocks" in shown.browser.find_element(By.CSS_SELECTOR, ".verdict").text
    assert shown.errors() == []


def test_bars_share_a_scale(
    made: Callable[[str], Shown], browser: webdriver.Chrome, tmp_path: Path
) -> None:
    plans = [made(name).plan for name in ("gpt2", "t5")]
    page = tmp_path / "both.html"
    page.write_text(autopar.compare(*plans).html(), encoding="utf-8")
    browser.get_log("browser")
    browser.get(page.as_uri())
    assert browser.execute_script("return document.documentElement.dataset.ready")
    lengths = browser.execute_script(
        "return [...document.querySelectorAll('#time .bar:not(.hidden-part)')].map(bar =>"
        " [...bar.children].reduce((sum, piece) => sum + parseFloat(piece.style.width), 0))"
    )
    steps = [plan.predicted.step_time_s for plan in plans]
    assert lengths == pytest.approx([100 * step / max(steps) for step in steps], abs=0.01)
    tops = browser.execute_script(
        "return [...document.querySelectorAll('#memory .of-plan')].map(e =>"
        " e.getBoundingClientRect().top)"
    )
    assert len(tops) == 2 and len(set(tops)) == 1, "the plans stand side by side"
    notes = browser.execute_script("return document.querySelector('.note').textContent")
    assert "these are plans of different graphs" in notes
    assert not [line for line in browser.get_log("browser") if line["level"] != "INFO"]
