"""`autopar.plan` finds textbook layouts by cost, not by pattern, where they are the cheapest.

On four ranks with unit links and one FLOP per second:

    6 x Linear(256, 256), batch 32    activations are small: columns and rows alternate
    6 x Linear(32, 32), batch 256     parameters are small: data parallelism
    BERT block, fused QKV             Megatron; QKV sharded by head, however the model splits it

Layouts are the same however the loss is written. Counts are calls per step on one rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar import Device, Link, Mesh, Plan
from tests.helpers.jobs import Mlp, MlpWithLoss, stack

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
LOSSES = ("sum", "mean", "mse", "loss_fn")


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
    model = MlpWithLabels(width) if loss == "loss_fn" else MlpWithLoss(width, N_LAYERS, of=loss)
    batch = {name: torch.zeros(n_rows, width) for name in ("x", "y")}
    loss_fn = sum_of_squares if loss == "loss_fn" else None
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


class Block(nn.Module):
    """Attention and an MLP; `by` says how the fused QKV projection is split into q, k and v."""

    def __init__(self, width: int, n_heads: int, by: str, norm: str) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.n_heads, self.by, self.norm = n_heads, by, norm

    def _heads(self, fused: Tensor) -> tuple[Tensor, ...]:
        """q, k, v as [batch, heads, sequence, size]."""
        b, s, h = fused.shape[0], fused.shape[1], fused.shape[2] // 3
        n, size = self.n_heads, h // self.n_heads
        if self.by == "view":
            return fused.view(b, s, 3, n, size).permute(2, 0, 3, 1, 4).unbind(0)
        if self.by == "index":
            seen = fused.view(b, s, 3, n, size).transpose(1, 3)
            return tuple(seen[:, :, i] for i in range(3))
        if self.by == "slice":
            parts: tuple[Tensor, ...] = tuple(fused[..., i * h : (i + 1) * h] for i in range(3))
        else:
            parts = fused.chunk(3, -1) if self.by == "chunk" else fused.split(h, -1)
        return tuple(part.view(b, s, n, size).transpose(1, 2) for part in parts)

    def _attend(self, x: Tensor) -> Tensor:
        q, k, v = self._heads(self.qkv(x))
        mixed = F.scaled_dot_product_attention(q, k, v)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(x.shape))
        return out

    def _widen(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.up(x)))
        return out

    def forward(self, x: Tensor) -> Tensor:
        if self.norm == "pre":
            x = x + self._attend(self.norm_1(x))
            return x + self._widen(self.norm_2(x))
        x = self.norm_1(x + self._attend(x))
        out: Tensor = self.norm_2(x + self._widen(x))
        return out


class Bert(nn.Module):
    """Two blocks and a loss: "sum" or "mean" of squares, "mse", or no own loss ("loss_fn")."""

    def __init__(self, by: str = "view", norm: str = "post", of: str = "mean") -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(128, 8, by, norm) for _ in range(2)))
        self.of = of

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        out: Tensor = self.blocks(x)
        if self.of == "mse":
            return F.mse_loss(out, y)
        squares = (out - y).pow(2)
        endings: dict[str, Callable[[], Tensor]] = {
            "sum": squares.sum, "mean": squares.mean, "loss_fn": lambda: out,
        }  # fmt: skip
        return endings[self.of]()


def plan_bert(
    by: str = "view", norm: str = "post", loss: str = "mean", solver: str = "auto"
) -> Plan:
    batch = {name: torch.zeros(8, 8, 128) for name in ("x", "y")}
    loss_fn = sum_of_squares if loss == "loss_fn" else None
    forbid = (*ZERO, "sequence")
    model = Bert(by, norm, loss)
    return autopar.plan(
        model, MESH, batch, forbid=forbid, loss_fn=loss_fn, solver=solver, **OPTIONS
    )


def check_megatron(plan: Plan, norm: str = "post") -> None:
    """Two all_reduces forward and two backward per block; the model's input needs none in backward.

    If a norm comes first, its parameters have a gradient although the input has none. It is
    cheaper to all_reduce the parameters' gradients (1 KiB) than the gradient of the activations
    (32 KiB), so every rank computes them from a partial gradient of the activations.
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


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("by", ["view", "index", "chunk", "split", "slice"])
def test_bert_is_megatrons(by: str, norm: str) -> None:
    check_megatron(plan_bert(by, norm), norm)


@pytest.mark.parametrize("loss", [loss for loss in LOSSES if loss != "mean"])
def test_bert_is_megatrons_under_any_loss(loss: str) -> None:
    check_megatron(plan_bert(loss=loss))


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


def test_a_model_without_labels_is_planned_alike() -> None:
    """`loss_fn` reads the predictions alone."""
    plan = autopar.plan(
        Mlp(256, N_LAYERS), MESH, {"x": torch.zeros(32, 256)}, forbid=ZERO,
        loss_fn=lambda outputs, batch: outputs.sum(), **OPTIONS,
    )  # fmt: skip
    check_alternates(plan)
