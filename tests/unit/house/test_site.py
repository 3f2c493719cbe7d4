"""What the site is made of besides pages: docstrings, links, tables, pictures, the gallery."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from pathlib import Path

import pytest

import autopar
from autopar.cost.hardware import available_profiles
from autopar.options import Options
from docs.docstrings import restructured
from docs.gallery import make
from docs.gallery.models import Piece
from docs.generated import commands_help, profiles_table
from docs.links import with_downloads
from docs.pictures import draw
from examples.demo import mlp
from tests.helpers.pages import ROOT

REFERENCE = ROOT / "docs" / "reference"
TABLE = """
Save it.

path    where; a folder
        of its own
`extra`   JSON, for `Spec`s
    and more

Raises `StateError`.

    for x in y:
        save(x)
"""


def test_tables_and_code_of_docstrings() -> None:
    text = "\n".join(restructured(inspect.cleandoc(TABLE).splitlines()))
    assert "``path``\n    where; a folder\n    of its own" in text
    assert "``extra``\n    JSON, for `Spec`\\ s\n    and more" in text
    assert "\nRaises `StateError`.\n" in text
    assert "::\n\n    for x in y:\n        save(x)\n" in text


@pytest.mark.parametrize(
    ("text", "page", "there"),
    [
        ("[a](../ARCHITECTURE.md)", "index.md", "[a](path:../ARCHITECTURE.md)"),
        ("[a](../../README.md)", "tutorials/plan.md", "[a](path:../../README.md)"),
        ("[a](../memory.md)", "tutorials/plan.md", "[a](../memory.md)"),
        ("[a](memory.md)", "index.md", "[a](memory.md)"),
        ("[a](../examples/demo.py)", "index.md", "[a](../examples/demo.py)"),
    ],
)
def test_links_out_of_the_site_are_downloads(text: str, page: str, there: str) -> None:
    assert with_downloads(text, page) == there


def test_every_public_name_is_in_the_reference() -> None:
    text = (REFERENCE / "api.md").read_text() + (REFERENCE / "options.md").read_text()
    listed = set(re.findall(r"auto\w+:: (?:autopar\.)?(\w+)(?:\(\))?$", text, re.M))
    errors = {name for name in autopar.__all__ if name.endswith("Error")}
    assert "automodule:: autopar.errors" in (REFERENCE / "errors.md").read_text()
    assert {getattr(autopar, name).__module__ for name in errors} == {"autopar.errors"}
    assert set(autopar.__all__) - errors <= listed


def test_every_option_is_in_the_reference_with_its_default() -> None:
    text = (REFERENCE / "options.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| `([^`]*)`", text, re.M))
    options = Options()
    shown = {f.name: repr(getattr(options, f.name)).replace("'", '"') for f in fields(Options)}
    assert rows == shown


def test_every_command_and_profile_is_in_the_reference() -> None:
    text = commands_help()
    assert "### autopar plan\n" in text and "### autopar doctor\n" in text
    assert text.count("Usage: autopar ") == text.count("### autopar ") >= 15
    table = profiles_table()
    assert all(f"| `{name}` |" in table for name in available_profiles())
    assert "| `a100-80gb` | 80.0 GiB | 2.04 TB/s | 19.5 TFLOP/s | 312 TFLOP/s |" in table


def test_pictures_are_not_stale() -> None:
    for name, text in draw.pictures().items():
        assert (draw.FOLDER / name).read_text() == text, f"{name} is stale: run make docs"
    first = draw.PLAN.read_text().splitlines()[0]
    assert first == draw.mark(draw.plan_dot()), "docs/pictures/mlp.svg is stale: run make docs"


@pytest.mark.parametrize("has_dot", [True, False])
def test_a_page_of_the_gallery(
    has_dot: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    piece = Piece("Mlp", "a small one", lambda: (*mlp(), None), (1, 4), "a100-80gb")
    monkeypatch.setattr(make, "PIECES", {"mlp": piece})
    monkeypatch.setattr(make, "FOLDER", tmp_path)
    monkeypatch.setattr(make, "rendered", lambda dot: "<svg/>" if has_dot else None)
    make.make("mlp")
    text = (tmp_path / "mlp.md").read_text()
    assert text.startswith("# Mlp\n\nA small one, on 1 x 4 a100-80gb.\n")
    assert "would take 128.1 MiB on every rank, within the 80.0 GiB" in text
    assert "Most bytes are moved by all_reduce of forward, 2.0 MiB a step and rank" in text
    assert "The winner is Megatron on dp=1 x tp=4; next is" in text
    assert "considered\n" in text
    assert ("![The plan of Mlp](mlp.svg)" in text) is has_dot
    assert ("apt install graphviz" in text) is not has_dot
    assert (tmp_path / "mlp.svg").exists() is has_dot
