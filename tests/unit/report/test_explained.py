"""What the text of a plan says is explained in the pages that the text names.

Words are read off the code that prints them, labels off printed plans.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import autopar
from autopar import Manual, Mesh, Plan
from autopar.report.words.explanation import PAGES
from autopar.report.words.sentences import _NUMBERS

ROOT = Path(__file__).parents[3]
REPORT = ROOT / "autopar" / "report"
PRINTERS = [
    *sorted((REPORT / "words").glob("[!_]*.py")),
    *(REPORT / f"{name}.py" for name in ("tables", "division", "stages", "blocks")),
    ROOT / "passes" / "search" / "slower.py",
]
GPUS = Mesh((1, 2), hardware="a100-80gb")


@pytest.fixture(scope="module")
def prose() -> str:
    """The pages without what is in their blocks: an output does not explain itself."""
    pages = [(ROOT / page).read_text(encoding="utf-8") for page in PAGES]
    return "\n".join(re.sub(r"^```.*?^```", "", page, flags=re.M | re.S) for page in pages)


def printed(node: ast.AST) -> Iterator[str]:
    """Strings of code that may be printed: no docstrings, keys, operands of `in`, patterns, errors,
    assertions."""
    match node:
        case ast.Expr(value=ast.Constant()) | ast.Compare() | ast.Assert() | ast.Raise():
            return
        case ast.Constant(value=str() as text):
            if "\\" not in text and "<" not in text:
                yield text
        case ast.Dict(values=values):
            for value in values:
                yield from printed(value)
        case ast.Subscript(value=value):
            yield from printed(value)
        case _:
            for child in ast.iter_child_nodes(node):
                yield from printed(child)


@pytest.mark.parametrize("path", PRINTERS, ids=lambda path: path.stem)
def test_every_word_of_the_output_is_in_its_pages(path: Path, prose: str) -> None:
    def words(text: str) -> set[str]:
        return set(re.findall(r"[a-z][a-z0-9_-]*[a-z0-9]", text.lower()))

    said = " ".join(printed(ast.parse(path.read_text(encoding="utf-8"))))
    known = words(prose) | set(_NUMBERS.values()) | words(" ".join(PAGES))
    assert words(said) - known == set()


def test_strings_that_are_printed_are_found() -> None:
    found = printed(ast.parse('"doc"\nx = f"{a} as much", {"key": "value"}["k"]\nassert y, "no"\n'))
    assert list(found) == [" as much", "value"]


def in_half_precision() -> Plan:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).to(torch.bfloat16)
    x = torch.empty(8, 64, dtype=torch.bfloat16)
    return autopar.plan(model, GPUS, (x,), loss_fn=lambda out, _: out.sum(), stages=1)


def in_stages() -> Plan:
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)))
    model, recipe = nn.Sequential(blocks), Manual(pp=2, recompute="full")
    x = torch.empty(8, 64)
    return autopar.plan(model, GPUS, (x,), loss_fn=lambda out, _: out.sum(), manual=recipe)


@pytest.mark.parametrize("make", [in_half_precision, in_stages])
def test_every_label_is_explained(make: object, prose: str) -> None:
    """Heads of lines and of columns stand in the page in bold or as code."""
    assert callable(make)
    plan = make()
    text = plan.explain()
    assert re.findall(r"docs/\S+\.md", text.splitlines()[-1]) == list(PAGES)
    screen = str(plan).partition("\n\n")[2]
    labels = set(re.findall(r"^(\w+)  ", screen, re.M))
    labels |= set(re.findall(r"^([a-z]+(?: [a-z]+)*)(?:: |$)", text, re.M))
    columns = re.findall(r"^(?:phase|stage|parameter|crosses) {2,}.*$", text, re.M)
    labels |= {x for line in columns for x in re.split(r"  +", line.partition("(")[0]) if x}
    assert {"plan", "step", "predicted", "assumed", "state", "count"} <= labels
    marked = " | ".join(re.findall(r"`[^`\n]+`|\*\*[^*]+\*\*", prose))
    missing = [x for x in sorted(labels) if not re.search(rf"\b{re.escape(x)}\b", marked)]
    assert missing == []
