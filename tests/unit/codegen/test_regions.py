"""Regions of generated files: what is in them, what they share, and where gradients go."""

from __future__ import annotations

import ast
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar import Manual, NotSupportedError
from autopar.passes.backward import make_fusible
from autopar.passes.facts import Differentiated
from autopar.program.lines import (
    FreeLine,
    JointLine,
    JointProgram,
    KernelLine,
    ReadyLine,
    is_compilable,
)
from autopar.runtime.execute import compiled, tell_when_compiled
from tests.helpers.jobs import llama, machine, tokens


class Gated(nn.Module):
    """`n_layers` equal blocks."""

    def __init__(self, n_layers: int, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(n_layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(self.norm(x))
        return x + self.down(y.sigmoid() * y.tanh())


def text(n_layers: int, **options: Any) -> str:
    batch = {"x": torch.empty(4, 8)}
    plan = autopar.plan(Gated(n_layers), (1, 2), batch, compile="regions", **options)
    return plan.code()["stage_0.py"]


def regions(source: str) -> dict[str, str]:
    """Name -> code of each function that is compiled."""
    return {
        node.name: ast.unparse(node)
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and node.decorator_list
    }


@pytest.mark.parametrize("manual", [Manual(tp=2), Manual(dp=2, zero=3)], ids=["tp", "zero3"])
def test_regions_are_operators_alone(manual: Manual) -> None:
    found = regions(text(3, manual=manual))
    assert found
    for code in found.values():
        assert not re.search(r"env|ready|phase|start|wait|\bi\b|all_|reduce_scatter", code)
        assert code.count("aten_") >= 2


def test_equal_blocks_share_regions() -> None:
    counts = {n: len(regions(text(n, manual=Manual(tp=2)))) for n in (2, 24)}
    assert counts[24] <= counts[2]


def test_without_the_option_there_are_none() -> None:
    plan = autopar.plan(Gated(3), (1, 2), {"x": torch.empty(4, 8)}, manual=Manual(tp=2))
    assert "compiled" not in plan.code()["stage_0.py"]


def joint_of(manual: Manual) -> JointProgram:
    plan = autopar.plan(llama(), machine((1, 2)), tokens(0), manual=manual)
    assert plan.bound is not None
    (joint,) = plan.bound.compilation[Differentiated].stages
    return joint


def is_moved(line: JointLine) -> bool:
    return isinstance(line, ReadyLine | FreeLine)


@pytest.mark.parametrize("manual", [Manual(dp=2), Manual(dp=2, zero=3)], ids=["dp", "zero3"])
def test_a_late_gradient_passes_no_communication(manual: Manual) -> None:
    """Other lines keep their order; a gradient comes later, and before what is no operator."""
    before = joint_of(manual).backward
    after = make_fusible(joint_of(manual)).backward
    moved = [x for x in after if not is_moved(x)]
    assert [x.writes for x in before if not is_moved(x)] == [x.writes for x in moved]
    assert not any(isinstance(x, KernelLine) and "_." in x.target for x in moved)
    assert [x for x in before if isinstance(x, ReadyLine)] == [
        x for x in after if isinstance(x, ReadyLine)
    ]

    def ahead(lines: tuple[JointLine, ...]) -> list[int]:
        """Of each gradient: how many lines that are no operators stand before it."""
        counts, n = [], 0
        for line in lines:
            if isinstance(line, ReadyLine):
                counts.append(n)
            elif not isinstance(line, FreeLine) and not is_compilable(line):
                n += 1
        return counts

    assert ahead(before) == ahead(after)
    freed = {name for x in after if isinstance(x, FreeLine) for name in x.names}
    assert freed == {name for x in before if isinstance(x, FreeLine) for name in x.names}


def test_a_missing_compiler_is_told_before_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(NotSupportedError, match=r"no-such-compiler[\s\S]*hint: apt-get install"):
        autopar.parallelize(Gated(2), 1, {"x": torch.empty(4, 8)}, compile="regions")
    with pytest.raises(NotSupportedError, match="no-such-compiler"):
        autopar.verify(Gated(2), 1, {"x": torch.ones(4, 8)}, compile="regions")


def test_graphs_have_a_decorator_of_their_own() -> None:
    batch = {"x": torch.empty(4, 8)}
    plans = [
        autopar.plan(Gated(2), 1, batch, compile=word) for word in ("regions", "regions+graphs")
    ]
    compiled, graphed = (plan.code()["stage_0.py"] for plan in plans)
    assert graphed == compiled.replace("@compiled", "@graphed").replace(
        "import compiled", "import graphed"
    )


def test_ranks_share_a_region_and_its_end_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    code = compile("def double(x):\n    return (2 * x,)\n", "a file of this test", "exec")
    namespaces: list[dict[str, Any]] = [{}, {}]
    for namespace in namespaces:
        exec(code, namespace)
    one, other = (compiled(namespace["double"]) for namespace in namespaces)
    assert one is other
    told: list[tuple[int, float]] = []
    assert tell_when_compiled(one.file, lambda n, time_s: told.append((n, time_s))) == 1
    assert one(torch.ones(2))[0].tolist() == [2, 2]
    ((n_regions, time_s),) = told
    assert n_regions == 1
    assert time_s == one.compile_s
    assert tell_when_compiled(one.file, lambda n, time_s: None) == 0
