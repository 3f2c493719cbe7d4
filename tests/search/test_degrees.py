"""`mesh_shape={"dp": ..., "tp": ...}`: every stage has these degrees, and the rest is searched."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import autopar
from autopar import Manual, Mesh, Plan
from autopar.cli import parse_degrees
from autopar.errors import MeshError, NotSupportedError, OptionError
from tests.helpers.harness import Mlp
from tests.helpers.nightly import one_in


def planned(shape: tuple[int, int], **options: Any) -> Plan:
    batch = {name: torch.zeros(32, 64) for name in ("x", "y")}
    model = Mlp(width=64, n_layers=4)
    return autopar.plan(model, Mesh(shape, hardware="a100-80gb"), batch, **options)


@one_in(3)
@pytest.mark.parametrize(
    ("degrees", "stages"),
    [
        ({"tp": 2}, 1), ({"dp": 4, "tp": 2}, "auto"), ({"tp": 2}, 2), ({"dp": 2, "tp": 2}, "auto"),
        ({"dp": 2, "cp": 2, "tp": 2}, 1), ({"cp": 2}, 2), ({"ep": 2, "tp": 4}, "auto"),
    ],
)  # fmt: skip
def test_stages_have_the_degrees(degrees: dict[str, int], stages: int | str) -> None:
    plan = planned((2, 4), mesh_shape=degrees, stages=stages)
    assert isinstance(stages, str) or len(plan.stages) == stages
    for stage in plan.stages:
        assert degrees.items() <= stage.axes.items()
    for row in plan.data.alternatives:
        assert "tp=1)" not in row.name and not row.name.endswith("tp=1"), row.name


def test_one_degree_in_use_is_all_that_is_tried() -> None:
    plan = planned((1, 4), mesh_shape={"dp": 2})
    named = [row.name for row in plan.data.alternatives if " on dp=" in row.name]
    assert named and all("dp=2 x tp=2" in name for name in named)


def test_degrees_that_no_stage_can_have_are_refused() -> None:
    with pytest.raises(MeshError, match=r"\{'tp': 3\} fits no stage of 8 ranks; stages may have"):
        planned((2, 4), mesh_shape={"tp": 3})
    with pytest.raises(MeshError, match="fits no stage"):
        planned((2, 4), mesh_shape={"dp": 2, "tp": 2}, stages=1)
    with pytest.raises(MeshError, match="fits no stage"):
        planned((2, 4), mesh_shape={"tp": 8}, stages=2)
    stages = [(("net.0", "net.1", "net.2"), (1, 4)), (("net.3", "net.4", "net.5"), (1, 4))]
    with pytest.raises(MeshError, match="fits no stage"):
        planned((2, 4), mesh_shape={"tp": 8}, stages=stages)


def test_what_fixes_no_degree_is_refused() -> None:
    with pytest.raises(NotSupportedError, match="three axes at most"):
        planned((2, 4), mesh_shape={"cp": 2, "ep": 2})
    wrong: list[Any] = [{}, {"pp": 2}, {"tp": 0}, {"tp": "2"}, "given", 4]
    for value in wrong:
        with pytest.raises(OptionError, match="mesh_shape"):
            planned((1, 4), mesh_shape=value)
    with pytest.raises(OptionError, match="mesh_shape cannot fix its degrees"):
        planned((1, 4), mesh_shape={"tp": 2}, manual=Manual(dp=2, tp=2))


def test_degrees_are_read_from_the_command_line() -> None:
    assert parse_degrees("dp=2, cp=2, tp=4") == {"dp": 2, "cp": 2, "tp": 4}
    assert parse_degrees("as-given") == "as-given"
