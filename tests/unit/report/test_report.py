"""The picture of a plan: goldens, equal blocks folded, every collective of activations in it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar import Manual, Plan, PlanError
from autopar.placement import COLLECTIVES
from autopar.program.communication import step_calls
from autopar.report import dot
from autopar.report.blocks import Block
from autopar.report.picture import escaped, fold, picture
from autopar.report.picture.nodes import is_reshard
from tests.conftest import Golden
from tests.helpers.jobs import CASES
from tests.helpers.models.tiny_model import Tiny, batch
from tests.helpers.plans import pipeline_of, program_of

WIDTH = 16
MEGATRON: dict[str, Any] = {"manual": Manual(dp=2, tp=2)}


class Layer(nn.Module):
    """A residual block of two projections."""

    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.up, self.down, self.act = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH), act

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(x)))


class Stack(nn.Module):
    """Layers with the given activations; `skip` adds layer 0's result at the end.

    `into` makes the first layer's input carry a gradient, as the inputs of the others do.
    """

    def __init__(self, acts: list[nn.Module], skip: bool = False) -> None:
        super().__init__()
        self.into, self.skip = nn.Linear(WIDTH, WIDTH), skip
        self.layers = nn.ModuleList(Layer(act) for act in acts)

    def forward(self, x: Tensor) -> Tensor:
        first = x = self.into(x)
        for i, layer in enumerate(self.layers):
            x = layer(x)
            first = x if i == 0 else first
        return (x + first if self.skip else x).square().mean()


def stack(*acts: nn.Module, skip: bool = False, **options: Any) -> Plan:
    example = {"x": torch.zeros(8, WIDTH)}
    return autopar.plan(Stack(list(acts), skip), (2, 2), example, **(options or MEGATRON))


@pytest.fixture(scope="module")
def tiny() -> Plan:
    return autopar.plan(Tiny(), (2, 2), batch(), **MEGATRON)


@pytest.fixture(scope="module")
def gpt2() -> Plan:
    case = CASES["gpt2"]
    return autopar.plan(case.model(), (2, 2), case.batch(0), **MEGATRON)


def copies(plan: Plan) -> list[int]:
    """How many blocks each section of the picture stands for."""
    sections, _ = fold(picture(program_of(plan)))
    return [len(s.copies) for s in sections if s.blocks[0].index]


def test_the_graph_of_a_tiny_mlp(tiny: Plan, golden: Golden) -> None:
    golden("tiny.dot", tiny.to_dot())


def test_the_graph_of_gpt2(gpt2: Plan, golden: Golden) -> None:
    golden("gpt2_2_layers.dot", gpt2.to_dot())


def test_equal_blocks_fold_and_others_are_drawn_apart() -> None:
    """Others have another operator, or are read from elsewhere."""
    plan = stack(nn.ReLU(), nn.ReLU(), nn.ReLU(), nn.ReLU())
    assert copies(plan) == [4]
    assert "layers.0 … 3" in plan.to_dot() and "× 4" in plan.to_dot()
    assert copies(stack(nn.ReLU(), nn.Tanh(), nn.Tanh())) == [1, 2]
    assert copies(stack(nn.ReLU(), nn.ReLU(), nn.ReLU(), skip=True)) == [1, 2]


def test_other_placements_are_drawn_apart() -> None:
    pinned: dict[str, Any] = {"force": {"layers.2.up.weight": "S(0)@1"}, "mesh_shape": "as-given"}
    found = stack(nn.ReLU(), nn.ReLU(), nn.ReLU(), nn.ReLU(), **pinned)
    assert found.placements["layers.2.up.weight"][1] == "S(0)"
    assert found.placements["layers.1.up.weight"] != found.placements["layers.2.up.weight"]
    assert len(copies(found)) > 1


def test_a_block_of_one_box_has_no_frame() -> None:
    """The members of an `nn.Sequential` are blocks too."""
    case = CASES["mlp"]
    options: dict[str, Any] = {"loss_fn": case.loss_fn} if case.loss_fn else {}
    graph = autopar.plan(case.model(), (2, 2), case.batch(0), **MEGATRON, **options).to_dot()
    assert "<B>net.0</B></TD>" in graph and "label=<<B>net.0</B>>" not in graph
    assert "label=<<B>net.2</B>>" in graph  # two boxes: a projection and, after a reshard, its bias


def test_one_other_reshard_is_drawn_apart(gpt2: Plan) -> None:
    """Other bytes in one reshard keep the last block from folding."""
    shown = picture(program_of(gpt2))
    last = max(
        i for i, e in enumerate(shown.edges) if shown.nodes[e.target].block.index and e.moves
    )
    edge = shown.edges[last]
    move = replace(edge.moves[-1], forward_bytes=1)
    edges = [*shown.edges]
    edges[last] = replace(edge, moves=(*edge.moves[:-1], move))
    assert [len(s.copies) for s in fold(shown)[0] if s.blocks[0].index] == [2]
    changed = replace(shown, edges=tuple(edges))
    assert [len(s.copies) for s in fold(changed)[0] if s.blocks[0].index] == [1, 1]


def test_every_edge_of_a_fold_is_between_boxes_that_are_drawn(gpt2: Plan) -> None:
    sections, edges = fold(picture(program_of(gpt2)))
    drawn = {i for section in sections for i in section.nodes}
    assert all(edge.source in drawn and edge.target in drawn for edge in edges)
    assert {edge.target for edge in edges} | {edge.source for edge in edges} == drawn


@pytest.mark.parametrize(
    ("module", "path", "relative"),
    [
        ("transformer.h.11.attn", "transformer.h.11", "attn"),
        ("encoder.block.0.layer.1", "encoder.block.0", "layer.1"),
        ("3", "3", ""),
        ("head", "", "head"),
    ],
)
def test_blocks_of_module_paths(module: str, path: str, relative: str) -> None:
    block = Block.of(module)
    assert (block.path, block.relative(module)) == (path, relative)


@pytest.mark.parametrize("options", [MEGATRON, {"manual": Manual(dp=1, tp=4, sp=True)}])
def test_every_collective_of_activations_is_in_the_picture(options: dict[str, Any]) -> None:
    """Compares the edges before folding with the collectives of one microbatch."""
    plan = stack(nn.ReLU(), nn.Tanh(), **options)
    edges = picture(program_of(plan)).edges
    drawn: Counter[tuple[str, int]] = Counter()
    for moves in {e.value: e.moves for e in edges}.values():
        for line in moves:
            drawn[line.move.forward, line.forward_bytes] += 1
            drawn[line.move.backward, line.backward_bytes] += line.has_grad
    drawn = Counter({key: n for key, n in drawn.items() if key[0] in COLLECTIVES and n})
    calls = step_calls(program_of(plan)).microbatch
    phases = ("forward", "backward", "loss")
    assert drawn == Counter((c.kind, c.size_bytes) for c in calls if c.phase in phases)
    assert drawn


def test_a_reshard_acts_forward_or_backward() -> None:
    edges = picture(program_of(stack(nn.ReLU()))).edges
    moves = {(m.move.forward, m.move.backward): m for edge in edges for m in edge.moves}
    backward = moves["identity", "all_reduce"]
    assert is_reshard(backward) and is_reshard(moves["all_reduce", "identity"])
    assert not is_reshard(replace(backward, has_grad=False))


def test_results_are_coloured_by_how_they_are_sharded() -> None:
    plan = stack(nn.ReLU(), manual=Manual(dp=2, tp=2, sp=True))
    nodes = {n.name: n for n in picture(program_of(plan)).nodes}
    assert nodes["x"].shards[0] == "data"
    assert nodes["up"].shards == ("data", "tensor")
    assert nodes["down"].shards == ("data", "partial")


def test_names_are_escaped(tiny: Plan) -> None:
    """A hostile name stays text in the graph."""
    evil = '</td><script>"x"&\x07\ud800'
    program = program_of(tiny)
    first, *rest = program.parameters
    program = replace(program, parameters=(replace(first, name=evil), *rest))
    graph = dot(evil, replace(pipeline_of(tiny), stages=(program,)))
    assert "<script>" not in graph and escaped(evil) in graph
    graph.encode()


def test_an_unbound_plan_has_no_picture(tiny: Plan) -> None:
    for call in (Plan(tiny.data).to_dot, Plan(tiny.data).to_json):
        with pytest.raises(PlanError, match="needs the model"):
            call()
