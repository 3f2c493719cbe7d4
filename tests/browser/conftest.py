"""Pages in a headless Chromium, and the plans that they are of. `make test-browser` runs this."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from selenium import webdriver
from selenium.webdriver.support.ui import WebDriverWait
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

import autopar
from autopar import Plan

WAIT_S = 30.0


@pytest.fixture(scope="session")
def browser() -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    binary = shutil.which("chromium") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    assert binary and driver, "no Chromium or no chromedriver: apt install chromium chromium-driver"
    options.binary_location = binary
    for flag in ("headless=new", "no-sandbox", "disable-gpu", "disable-background-networking"):
        options.add_argument(f"--{flag}")
    options.add_argument("--window-size=1440,1000")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    found = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield found
    found.quit()


def ids(batch: int, length: int) -> dict[str, Any]:
    tokens = torch.zeros(batch, length, dtype=torch.int64, device="meta")
    return {"input_ids": tokens, "labels": tokens}


def make_gpt2() -> Plan:
    with torch.device("meta"):
        config = AutoConfig.for_model("gpt2", n_layer=6, n_embd=256, n_head=8, vocab_size=512)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return autopar.plan(model, autopar.Mesh((2, 4), hardware="a100-80gb"), ids(32, 128))


def make_t5() -> Plan:
    with torch.device("meta"):
        config = AutoConfig.for_model(
            "t5", d_model=256, d_ff=1024, num_layers=4, num_decoder_layers=4, num_heads=8, d_kv=32,
            vocab_size=512, use_cache=False, decoder_start_token_id=0, pad_token_id=0,
        )  # fmt: skip
        model = AutoModelForSeq2SeqLM.from_config(config, dtype=torch.bfloat16)
    machine = autopar.Mesh((1, 4), hardware="a100-80gb")
    return autopar.plan(model, machine, ids(32, 64), stages=2, microbatches=4)


def make_chunks() -> Plan:
    """Two stages a rank in a V, with backward in two parts."""
    with torch.device("meta"):
        config = AutoConfig.for_model("gpt2", n_layer=8, n_embd=256, n_head=8, vocab_size=512)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    recipe = autopar.Manual(pp=4, microbatch_size=4)
    machine = autopar.Mesh((1, 4), hardware="a100-80gb")
    return autopar.plan(model, machine, ids(32, 128), manual=recipe, schedule="zero-bubble-v")


def make_70b() -> Plan:
    with torch.device("meta"):
        config = AutoConfig.for_model(
            "llama", hidden_size=8192, intermediate_size=28672, num_hidden_layers=80,
            num_attention_heads=64, num_key_value_heads=8, vocab_size=128256, use_cache=False,
            max_position_embeddings=8192,
        )  # fmt: skip
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return autopar.plan(model, autopar.Mesh((16, 8), hardware="h100-sxm"), ids(512, 4096))


MAKE: dict[str, Callable[[], Plan]] = {
    "gpt2": make_gpt2, "t5": make_t5, "chunks": make_chunks, "70b": make_70b,
}  # fmt: skip


class Shown:
    """A plan, its facts, and its page in the browser."""

    def __init__(self, name: str, folder: Path, browser: webdriver.Chrome) -> None:
        self.name, self.browser = name, browser
        self.plan = MAKE[name]()
        self.path = self.plan.report(folder / f"{name}.html", replan=False).page
        self.facts = json.loads(self.plan.to_json(replan=False))

    def open(self) -> Shown:
        self.browser.get_log("browser")
        self.browser.get(self.path.as_uri())
        self.wait("return document.documentElement.dataset.ready")
        return self

    def run(self, script: str, *args: object) -> Any:
        return self.browser.execute_script(script, *args)

    def wait(self, script: str, *args: object) -> Any:
        """Run a script until it returns something true."""
        return WebDriverWait(self.browser, WAIT_S).until(lambda _: self.run(script, *args))

    def go_to_graph(self) -> None:
        self.run("document.getElementById('graph').scrollIntoView()")
        self.wait("return document.querySelectorAll('.node').length")

    def errors(self) -> list[Any]:
        return [line for line in self.browser.get_log("browser") if line["level"] != "INFO"]


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory, browser: webdriver.Chrome) -> Any:
    folder, kept = tmp_path_factory.mktemp("pages"), dict[str, Shown]()

    def of(name: str) -> Shown:
        if name not in kept:
            kept[name] = Shown(name, folder, browser)
        return kept[name].open()

    return of


@pytest.fixture(params=["gpt2", "t5"])
def shown(request: pytest.FixtureRequest, made: Callable[[str], Shown]) -> Shown:
    return made(request.param)
