"""Two plans on one page, on one scale."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from selenium import webdriver

import autopar
from tests.browser.conftest import Shown

pytestmark = [pytest.mark.browser, pytest.mark.timeout(900)]


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
    notes = browser.execute_script("return document.querySelector('.note').textContent")
    assert "these are plans of different graphs" in notes
    assert not [line for line in browser.get_log("browser") if line["level"] != "INFO"]
