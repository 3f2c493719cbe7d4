"""Attention on shards: a causal query sharded by rows, and grouped-query heads over two axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import autopar
from autopar.capture import capture
from autopar.cost.laws import CostModel
from autopar.passes.analysis import Analysis
from autopar.passes.intra import Constraints, PlacementRequest, choose
from autopar.placement import Split
from autopar.program.lines import OperatorStrategy, Strategy
from autopar.rules.lowering import CAUSAL_ATTENTION
from autopar.runtime.groups import Group
from autopar.runtime.launch import ThreadWorld, run_threads
from autopar.runtime.lowered import causal_attention
from tests.helpers.harness import abstract_cost, generated_code, model_case, thread_step
from tests.helpers.machines import mesh_of
from tests.helpers.tensors import random_tensor

__all__ = ["generated_code"]

ATTENTION = "aten.scaled_dot_product_attention.default"


def group(world: ThreadWorld) -> Group:
    """The group of all ranks; four ranks are two merged axes."""
    mesh = mesh_of(2, 2) if world.n_ranks == 4 else mesh_of(world.n_ranks)
    return world.make_groups(mesh)[mesh.active_axes]


def own_kept_bytes(q: Tensor, k: Tensor, v: Tensor, g: Group | None) -> int:
    """Bytes that autograd saves for attention besides its inputs and its result."""
    kept: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        kept[t.untyped_storage()._cdata] = t.untyped_storage().nbytes()
        return t

    with saved_tensors_hooks(pack, lambda t: t):
        if g is None:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            out = causal_attention(q, k, v, g, None, False)
    named = {t.untyped_storage()._cdata for t in (q, k, v, out)}
    return sum(size_bytes for storage, size_bytes in kept.items() if storage not in named)


def test_what_it_keeps_besides_the_operators_part() -> None:
    """The last rank saves a mask, because it sees all keys; the first rank needs none."""
    q, k, v = (random_tensor(i, 2, 4, 12, 4).requires_grad_() for i in range(3))
    whole_bytes = own_kept_bytes(q, k, v, None)
    mask_bytes = CAUSAL_ATTENTION.value(
        CAUSAL_ATTENTION.saved_bytes, {"c": 4, "t": 12}, itemsize=8, n_ranks=3
    )

    def work(world: ThreadWorld) -> float:
        g = group(world)
        rows = g.slice(q.detach(), Split(2)).requires_grad_()
        return own_kept_bytes(rows, k, v, g) - whole_bytes / 3

    first, middle, last = run_threads(work, 3)
    assert (first, last) == (0, mask_bytes)
    assert first < middle < last


class Attends(nn.Module):
    """Blocks of causal grouped-query attention and an MLP; the loss is a mean of squares."""

    def __init__(self, width: int, n_heads: int, n_key_heads: int, n_layers: int = 1) -> None:
        super().__init__()
        self.sizes = (n_heads, n_key_heads, width // n_heads)
        each = width // n_heads * n_key_heads
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm": nn.LayerNorm(width), "q": nn.Linear(width, width),
                    "k": nn.Linear(width, each), "v": nn.Linear(width, each),
                    "out": nn.Linear(width, width), "mlp": nn.Sequential(
                        nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(),
                        nn.Linear(4 * width, width),
                    ),
                }
            )
            for _ in range(n_layers)
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        n_heads, n_key_heads, size = self.sizes
        for block in self.blocks:
            assert isinstance(block, nn.ModuleDict)
            h = block["norm"](x)
            q, k, v = (
                block[name](h).unflatten(-1, (n, size)).transpose(1, 2)
                for name, n in (("q", n_heads), ("k", n_key_heads), ("v", n_key_heads))
            )
            mixed = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=n_heads != n_key_heads
            )
            x = x + block["out"](mixed.transpose(1, 2).flatten(2))
            x = x + block["mlp"](x)
        return x.pow(2).mean()


@dataclass(frozen=True)
class Placed:
    """The fastest plan of one layer on unit links."""

    analysis: Analysis
    cost: CostModel
    strategy: Strategy
    batch: Mapping[str, Tensor]

    @staticmethod
    def of(
        heads: tuple[int, int], sizes: tuple[int, ...], n_rows: int = 1, forbid: Sequence[str] = (),
        hides: bool = True,
    ) -> Placed:  # fmt: skip
        batch = {"x": random_tensor(0, n_rows, 16, 4 * heads[0])}
        program = capture(Attends(4 * heads[0], *heads), batch, precision="fp64")
        analysis, cost = Analysis.of(program), replace(abstract_cost(sizes), hides=hides)
        limits = Constraints(frozenset(forbid))
        return Placed(
            analysis,
            cost,
            choose(analysis, PlacementRequest(cost, 1, limits), "adamw", None).strategy,
            batch,
        )

    @property
    def attention(self) -> OperatorStrategy:
        (found,) = (o.name for o in self.analysis.operators if str(o.call.op) == ATTENTION)
        return self.strategy.operators[found]

    def wrong(self) -> Mapping[str, float]:
        return thread_step(self.analysis, self.cost, self.strategy, self.batch, 0).wrong


def test_rows_are_chosen_where_heads_do_not_divide() -> None:
    """On a machine where compute hides no messages; else a ring costs less."""
    placed = Placed.of((6, 6), (4,), hides=False)
    assert [str(s) for s in placed.attention.inputs] == ["S(2)", "R", "R"]
    assert placed.attention.lowered == CAUSAL_ATTENTION
    assert placed.wrong() == {}


def test_heads_that_do_not_divide_stay_whole() -> None:
    placed = Placed.of((6, 6), (4,), forbid=["sequence"])
    assert [str(s) for s in placed.attention.inputs] == ["I", "I", "I"]
    assert placed.wrong() == {}


@pytest.mark.parametrize(
    ("n_key_heads", "sizes", "n_rows", "query", "key"),
    [
        (1, (4,), 1, "S(1)", "R"),  # multi-query: all heads share one key
        (2, (4,), 1, "S(1.1)", "R"),  # every rank has both keys and a part of each group
        (2, (2, 2), 1, "S(1) S(1.1)", "S(1) R"),  # keys over one axis, groups over the other
        (2, (2, 4), 2, "S(1) S(1.1)", "S(1) R"),  # 4 ranks share the 4 heads of a key
    ],
)
def test_heads_of_grouped_queries(
    n_key_heads: int, sizes: tuple[int, ...], n_rows: int, query: str, key: str
) -> None:
    """Eight heads share keys, and the sequence must stay whole."""
    placed = Placed.of((8, n_key_heads), sizes, n_rows, forbid=["sequence"])
    assert [str(s) for s in placed.attention.inputs] == [query, key, key]
    assert placed.wrong() == {}


def test_keys_that_the_model_repeats() -> None:
    """Heads of a Llama's keys over one axis, the groups that share them over the other."""
    analysis, cost = model_case("llama").analysis, abstract_cost((2, 2))
    limits = Constraints(frozenset({"sequence", "data"}))
    strategy = choose(analysis, PlacementRequest(cost, 1, limits), "adamw", None).strategy
    placed = Placed(analysis, cost, strategy, model_case("llama").batch(0))
    of_query, *of_keys = [str(s) for s in placed.attention.inputs[:3]]
    assert (of_query, of_keys) == ("S(1) S(1.1)", ["S(1) R"] * 2)
    assert placed.wrong() == {}


@pytest.mark.parametrize(
    ("n_rows", "function"), [(1024, "causal_attention"), (16384, "ring_attention")]
)
def test_rows_are_chosen_on_a_real_machine(n_rows: int, function: str) -> None:
    """One layer of GPT-2 XL on one sequence: its 25 heads do not divide over eight A100.

    Messages round a ring take their latency, so the keys of a short sequence are gathered.
    """
    with torch.device("meta"):
        model, x = Attends(1600, 25, 25).bfloat16(), torch.empty(1, n_rows, 1600).bfloat16()
    mesh = autopar.Mesh((1, 8), hardware="a100-80gb")
    plan = autopar.plan(model, mesh, {"x": x}, stages=1, mesh_shape="as-given")
    (source,) = plan.code().values()
    assert f" = {function}.forward(" in source
