"""Plans of several stages as text and as a graph: goldens, modules, crossings, the schedule."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar import OptionError, Plan
from autopar.plans import Alternative
from autopar.program.communication import slices
from autopar.report import explain
from autopar.report.stages import crossing_rows, grid, parameter_tables, stage_rows
from autopar.report.tables import N_ALTERNATIVES, alternative_rows
from tests.conftest import Golden
from tests.helpers import jobs
from tests.helpers.jobs import machine
from tests.helpers.plans import pipeline_of

WIDTH = 16
SHADES = {"forward": "#ffffff", "backward_input": "#cfd4da", "backward_weight": "#e8ebee"}
Stages = Sequence[tuple[Sequence[str], tuple[int, int]]]


class Branched(nn.Module):
    """Every later layer also reads the first layer's result."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        first = x = torch.relu(self.layers[0](x))
        for layer in list(self.layers)[1:]:
            x = torch.relu(layer(x)) + first
        return x.square().mean()


@lru_cache
def branched() -> Plan:
    """Three stages on one, one and two ranks; the middle one has two layers."""
    stages: Stages = [
        (["layers.0"], (1, 1)), (["layers.1", "layers.2"], (1, 1)), (["layers.3"], (1, 2)),
    ]  # fmt: skip
    example = {"x": torch.zeros(8, WIDTH)}
    return autopar.plan(Branched(), machine((1, 4)), example, stages=stages, microbatches=4)


@lru_cache
def gpt2() -> Plan:
    """Two tensor-parallel stages of two blocks each, with a tied embedding."""
    recipe = autopar.Manual(tp=2, pp=2)
    return autopar.plan(
        jobs.gpt2(4), machine((2, 2)), jobs.tokens(0), manual=recipe, microbatches=4
    )


def test_gpt2_on_two_stages(golden: Golden) -> None:
    """Both blocks of each stage fold; what crosses is in no cluster; the tie is dashed."""
    golden("gpt2_2_stages.dot", gpt2().to_dot())
    golden("gpt2_2_stages.txt", gpt2().explain() + "\n")


def test_another_schedule_is_beside_1f1b() -> None:
    """Two chunks on each of two ranks, four microbatches: as the formulas of
    `autopar/schedule/orders.py` say. 1f1b has no such line."""
    recipe = autopar.Manual(pp=2, interleave=2)
    plan = autopar.plan(
        jobs.gpt2(4), machine((1, 2)), jobs.tokens(0), manual=recipe, microbatches=4
    )
    (line,) = (text for text in plan.explain().splitlines() if text.startswith("schedule: "))
    assert line == (
        "schedule: interleaved has a bubble of 11.1%, 1f1b 1/5 = 20.0% (equal stages, free "
        "messages); a rank has 2.5 microbatches in flight, with 1f1b 2"
    )
    assert "schedule: " not in gpt2().explain()


def test_headline() -> None:
    first = branched().explain().split("\n\n")[1]
    middle = re.escape("(dp=1 x tp=1 | dp=1 x tp=1 | ")
    assert re.match(rf"Branched on 3 stages {middle}.*\), 4 microbatches, 1f1b: .", first)


def test_stages_hold_modules() -> None:
    rows = stage_rows(pipeline_of(branched()))
    assert [(r.ranks, r.modules) for r in rows] == [
        ("0", "layers.0"), ("1", "layers.1-2"), ("2-3", "layers.3"),
    ]  # fmt: skip
    blocks = [r.modules for r in stage_rows(pipeline_of(gpt2()))]
    assert "transformer.h.0-1" in blocks[0] and blocks[1].startswith("transformer.h.2-3, ")


def test_a_block_of_two_stages_is_told() -> None:
    stages: Stages = [(["up"], (1, 1)), (["down"], (1, 1))]

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(self.up(x).relu()).square().mean()

    model = nn.Sequential(Block())
    named = [([f"0.{name}" for name in names], shape) for names, shape in stages]
    example = (torch.zeros(8, WIDTH),)
    plan = autopar.plan(model, machine((1, 2)), example, stages=named)
    assert [r.modules for r in stage_rows(pipeline_of(plan))] == ["0 (part)", "0 (part)"]


def test_stages_alike_share_a_table() -> None:
    tables = parameter_tables(pipeline_of(branched()))
    assert [t.stages for t in tables][-1] == (2,)
    pipeline = pipeline_of(gpt2())
    alike = replace(pipeline, stages=(pipeline.stages[1],) * 2)
    (table,) = parameter_tables(alike)
    assert table.title == "stages 0-1 each"


def test_a_value_that_several_stages_read_crosses_to_each() -> None:
    pipeline = pipeline_of(branched())
    rows = crossing_rows(pipeline)
    assert sorted(r.stages for r in rows) == ["0 -> 1", "0 -> 2", "1 -> 2"]
    assert len({r.value for r in rows if r.stages.startswith("0")}) == 1
    for row, c in zip(rows, pipeline.crossings, strict=True):
        pieces = slices(
            c.sent.local.dims, c.sent.local.spec, pipeline.meshes[c.source],
            c.received.local.spec, pipeline.meshes[c.target],
        )  # fmt: skip
        crossed = sum(piece.n_elements for piece in pieces) * c.sent.local.dtype.itemsize
        assert row.forward_bytes == row.backward_bytes == crossed
        assert row.tensor == f"float32[2, {WIDTH}]"


def test_names_are_found_on_every_stage() -> None:
    text = gpt2().explain("lm_head.weight")
    assert "stage 1, stored" in text and "gradients are added" in text
    assert "stage 0, stored" in gpt2().explain("transformer.wte.weight")
    assert "(stage 1, " in gpt2().explain("transformer.h.3.ln_1")
    assert "inside the matmul" in gpt2().explain("transformer.h.3.mlp.c_fc/add.Tensor#0")
    with pytest.raises(OptionError, match="nothing"):
        gpt2().explain("nothing")


def test_a_long_list_is_cut_to_the_best() -> None:
    plan = gpt2()
    rows = tuple(Alternative(f"plan {i}", float(i)) for i in range(40))
    data = replace(
        plan.data, chosen="plan 30", alternatives=(*rows, Alternative("big", None, "no room"))
    )
    shown, others = alternative_rows(data)
    assert [a.name for a in shown] == [*(f"plan {i}" for i in range(N_ALTERNATIVES)), "plan 30"]
    assert others == ("and 15 more: 9 slower, 5 as fast or faster, not as simple, 1 without a plan")
    text = explain(data, pipeline_of(plan), plan.predicted, [])
    assert "-> plan 30" in text and f"    {others}\n\nexplained in " in text
    assert alternative_rows(replace(data, alternatives=rows[:2])) == (list(rows[:2]), "")


def edges_of(graph: str) -> list[tuple[str, str]]:
    return re.findall(r"^\t+(\w+) -> (\w+)", graph, re.MULTILINE)


def test_crossings_join_the_boxes_of_both_stages() -> None:
    graph, pipeline = branched().to_dot(), pipeline_of(branched())
    edges = edges_of(graph)
    for number, c in enumerate(pipeline.crossings):
        name = f"crossing_{number}"
        into = {a.partition("_")[0] for a, b in edges if b == name}
        out = {b.partition("_")[0] for a, b in edges if a == name}
        assert (into, out) == ({f"s{c.source}"}, {f"s{c.target}"})


def test_every_end_of_an_edge_is_drawn() -> None:
    for plan in (branched(), gpt2()):
        graph = plan.to_dot()
        boxes = set(re.findall(r"^\t+(\w+) \[label=", graph, re.MULTILINE))
        assert {end for edge in edges_of(graph) for end in edge} <= boxes


def test_grid() -> None:
    clocks = grid(pipeline_of(gpt2()), n_shown=4)
    assert clocks.n_clocks == 2 * (4 + 1)
    texts = [[str(action) for action in row] for row in clocks.rows]
    assert texts == [["0F0", "0F1", "None", "0B0"], ["None", "1F0", "1B0", "1F1"]]


def test_the_schedule_of_devices_with_several_stages_is_drawn() -> None:
    recipe = autopar.Manual(pp=2)
    plan = autopar.plan(
        jobs.gpt2(4), machine((1, 2)), jobs.tokens(0), manual=recipe, microbatches=4,
        schedule="zero-bubble-v",
    )  # fmt: skip
    text, rows = plan.to_dot(), grid(pipeline_of(plan)).rows
    assert [str(action) for action in rows[0][:4]] == ["0F0", "0F1", "0F2", "3F0"]
    for device, row in enumerate(rows):
        cells = "".join(
            f'<TD BORDER="1" COLOR="#9aa5b1" BGCOLOR="{SHADES[action.kind]}">{action}</TD>'
            if action
            else "<TD></TD>"
            for action in row
        )
        assert f"<TR><TD>device {device}</TD>{cells}</TR>" in text
    assert "I gradients of inputs, W of weights" in text
