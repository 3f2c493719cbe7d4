"""`autopar.plan` finds textbook layouts by cost, not by pattern, where they are the cheapest.

Four ranks, unit links and one FLOP per second. Counts are calls per step on one rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar import Device, Link, Mesh, Plan
from tests.helpers.harness import Bert
from tests.helpers.jobs import Mlp, MlpWithLoss, stack
from tests.helpers.nightly import one_in

MESH = Mesh(
    (1, 4),
    links=[Link(latency_s=1, s_per_byte=1)] * 2,
    device=Device(flops_per_s=1, bytes_per_s=1e30, memory_bytes=1e15, launch_s=0),
)
ZERO = ("zero1", "zero2", "zero3")
OPTIONS: dict[str, Any] = {
    "stages": 1, "microbatches": 1, "mesh_shape": "as-given", "recompute": "none",
    "tolerance": 0.0, "tie": 0.0,
}  # fmt: skip
N_LAYERS = 6
LOSSES = ("mean", "mse", "loss_fn", "no labels")


def sum_of_squares(outputs: Tensor, batch: Mapping[str, Any]) -> Tensor:
    return (outputs - batch["y"]).pow(2).sum()


class MlpWithLabels(nn.Module):
    """Takes labels that only its `loss_fn` reads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = stack(width, N_LAYERS)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out


def plan_mlp(width: int, n_rows: int, loss: str, solver: str = "auto") -> Plan:
    """With a loss of its own, with `loss_fn` of labels, or with one of predictions alone."""
    batch = {name: torch.zeros(n_rows, width) for name in ("x", "y")}
    loss_fn: Any = None
    model: nn.Module = MlpWithLoss(width, N_LAYERS, of=loss)
    if loss == "loss_fn":
        model, loss_fn = MlpWithLabels(width), sum_of_squares
    elif loss == "no labels":
        model, batch = Mlp(width, N_LAYERS), {"x": batch["x"]}
        loss_fn = lambda outputs, batch: outputs.sum()  # noqa: E731
    return autopar.plan(model, MESH, batch, forbid=ZERO, loss_fn=loss_fn, solver=solver, **OPTIONS)


def calls(plan: Plan) -> dict[tuple[str, str], int]:
    """(kind, phase) -> calls per step on one rank."""
    counts: Counter[tuple[str, str]] = Counter()
    for collective in plan.collectives():
        counts[collective.kind, collective.phase] += collective.count
    return dict(counts)


def use(plan: Plan, parameter: str) -> set[str]:
    """The placements that operators use a parameter in, on the axis of four ranks."""
    return {placements[1] for placements in plan.uses[parameter].values()}


def check_alternates(plan: Plan) -> None:
    """Columns then rows, three times. The model's input needs no all_reduce in backward."""
    assert calls(plan) == {("all_reduce", "forward"): 3, ("all_reduce", "backward"): 2}
    for i in range(N_LAYERS):
        dim = i % 2
        name = f"net.{2 * i}"
        assert use(plan, f"{name}.weight") == {f"S({dim})"}
        assert plan.placements[f"{name}.weight"] == ("I", f"S({dim})")
        assert plan.placements[f"{name}.bias"] == ("I", "S(0)" if dim == 0 else "I")


def check_data_parallel(plan: Plan) -> None:
    """One bucket of gradients, and an all_reduce of the loss."""
    counts = calls(plan)
    assert counts.pop(("all_reduce", "grad_sync")) == 1
    assert counts == {("all_reduce", "loss"): 1}
    (sync,) = [c for c in plan.collectives() if c.phase == "grad_sync"]
    assert sync.size_bytes == N_LAYERS * (32 * 32 + 32) * 4
    for name, placements in plan.placements.items():
        assert placements == ("I", "I")
        assert use(plan, name) == {"R"}


@pytest.mark.parametrize("loss", LOSSES)
def test_wide_layers_alternate_columns_and_rows(loss: str) -> None:
    check_alternates(plan_mlp(256, 32, loss))


@pytest.mark.parametrize("loss", LOSSES)
def test_narrow_layers_are_data_parallel(loss: str) -> None:
    check_data_parallel(plan_mlp(32, 256, loss))


def plan_bert(by: str = "view", norm: str = "post", solver: str = "auto") -> Plan:
    model = Bert(width=128, n_heads=8, n_layers=2, by=by, norm=norm)
    return autopar.plan(
        model, MESH, {"x": torch.zeros(8, 8, 128)}, forbid=(*ZERO, "sequence"), solver=solver,
        **OPTIONS,
    )  # fmt: skip


def check_megatron(plan: Plan, norm: str = "post") -> None:
    """Two all_reduces forward and two backward per block; the model's input needs none in backward.

    If a norm comes first, it is cheaper to all_reduce its parameters' gradients (1 KiB) than the
    gradient of the activations (32 KiB).
    """
    counts = calls(plan)
    if norm == "pre":
        assert counts.pop(("all_reduce", "grad_sync")) == 1
        (sync,) = [c for c in plan.collectives() if c.phase == "grad_sync"]
        assert (sync.size_bytes, sync.tensor) == (
            2 * 128 * 4,
            "blocks.0.norm_1.bias, blocks.0.norm_1.weight",
        )
    assert counts == {("all_reduce", "forward"): 4, ("all_reduce", "backward"): 3}
    for i in range(2):
        # Dim 0 of QKV is 3 x heads x size: factor 1 (heads) is sharded, not the 3 of q, k, v.
        assert plan.placements[f"blocks.{i}.qkv.weight"] == ("I", "S(0.1)")
        assert plan.placements[f"blocks.{i}.qkv.bias"] == ("I", "S(0.1)")
        assert use(plan, f"blocks.{i}.qkv.weight") == {"S(0.1)"}
        assert plan.placements[f"blocks.{i}.out.weight"] == ("I", "S(1)")
        assert plan.placements[f"blocks.{i}.up.weight"] == ("I", "S(0)")
        assert plan.placements[f"blocks.{i}.down.weight"] == ("I", "S(1)")
        for norm in ("norm_1", "norm_2"):
            assert plan.placements[f"blocks.{i}.{norm}.weight"] == ("I", "I")


@one_in(6)
@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("by", ["view", "index", "chunk", "split", "slice"])
def test_bert_is_megatrons(by: str, norm: str) -> None:
    check_megatron(plan_bert(by, norm), norm)


@pytest.mark.parametrize(
    ("make", "check"),
    [
        (lambda solver: plan_mlp(256, 32, "mean", solver), check_alternates),
        (lambda solver: plan_mlp(32, 256, "mean", solver), check_data_parallel),
        (lambda solver: plan_bert(solver=solver), check_megatron),
    ],
    ids=["columns and rows", "data parallel", "BERT"],
)
def test_the_whole_ilp_agrees(make: Callable[[str], Plan], check: Callable[[Plan], None]) -> None:
    """The whole ILP has the same objective, and the same layout, since the optimum is unique."""
    fast, whole = make("auto"), make("ilp")
    assert whole.objective_s == pytest.approx(fast.objective_s, rel=1e-6)
    assert whole.stage_gap <= 1e-6
    check(whole)
