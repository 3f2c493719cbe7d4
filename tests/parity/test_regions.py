"""Steps in regions, compiled and as they are written, beside one process."""

from __future__ import annotations

import pytest

import autopar
from autopar import Manual, Mesh
from autopar.parity import Report
from tests.helpers.nightly import nightly
from tests.parity.zoo import FAMILIES

LAYOUTS = {
    "one": None,
    "tp": Manual(tp=2),
    "dp": Manual(dp=2),
    "zero3": Manual(dp=2, zero=3),
    "pp": Manual(pp=2),
}
BY_DAY = [("gpt2", "tp")]
EVERY = [(family, layout) for family in FAMILIES for layout in LAYOUTS]
# Compiling takes half a minute a family, so each has one layout; they take turns. Two take longer
# than a test may: they were compiled by hand, and run as they are written.
TOO_LONG = {"swin", "t5"}
COMPILED = [
    (family, list(LAYOUTS)[k % len(LAYOUTS)])
    for k, family in enumerate(FAMILIES)
    if family not in TOO_LONG
]


def report(family: str, layout: str) -> Report:
    """One step in regions on thread ranks, in float64."""
    entry, manual = FAMILIES[family], LAYOUTS[layout]
    options = {"precision": "fp64", "microbatches": entry.microbatches, **entry.options}
    mesh = Mesh((1, 1 if manual is None else 2))
    batch = entry.case.batch(0)
    return autopar.verify(
        entry.case.model(), mesh, batch, compile="regions", manual=manual, **options
    )


@pytest.mark.parametrize(
    ("family", "layout"), [*BY_DAY, *(pytest.param(*c, marks=nightly) for c in EVERY)]
)
def test_regions_run_as_they_are_written(
    family: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    assert report(family, layout).ok


@nightly
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # raised in inductor
@pytest.mark.parametrize(("family", "layout"), COMPILED)
def test_compiled_regions(family: str, layout: str) -> None:
    found = report(family, layout)
    assert found.ok
    assert max(found.errors.values()) < 1e-10
