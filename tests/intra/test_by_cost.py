"""Plans follow from costs, not from patterns: by their shapes alone, the same layers are planned as
tensor parallel or data parallel, on four ranks with unit links and one flop per second.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from autopar.capture import capture
from autopar.cost.laws import CostModel
from autopar.mesh import Device, Link, LogicalMesh
from autopar.passes.analysis import Analysis
from autopar.passes.intra import Constraints, PlacementRequest, choose
from autopar.passes.lowering import lower
from autopar.placement import I, Placement, R, S
from autopar.program.communication import step_calls
from autopar.program.lines import StageProgram, Strategy
from tests.helpers.harness import Bert, abstract_cost, generated_code, model_case, thread_step
from tests.helpers.nightly import one_in

__all__ = ["generated_code"]

DTYPES = {"model": torch.float32, "fp64": torch.float64}
NO_ZERO = frozenset({"zero1", "zero2", "zero3"})
MESH = LogicalMesh((1, 4), ("node", "device"), (Link(1, 1),) * 2, Device(1, 1e30, 1e15, 0))
TENSOR = 1
Loss = Callable[[Tensor], Tensor]
LOSSES: dict[str, Loss] = {"sum": lambda y: y.sum(), "mean square": lambda y: y.pow(2).mean()}


class Layers(nn.Module):
    """Six layers of Linear and ReLU under a loss."""

    def __init__(self, width: int, loss: Loss) -> None:
        super().__init__()
        layers = [m for _ in range(6) for m in (nn.Linear(width, width), nn.ReLU())]
        self.net, self.loss = nn.Sequential(*layers), loss

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(self.net(x))


@dataclass(frozen=True)
class Planned:
    """What was chosen for a model and one input."""

    analysis: Analysis
    cost: CostModel
    strategy: Strategy
    program: StageProgram
    x: Tensor

    @property
    def calls(self) -> Counter[tuple[str, str]]:
        """(kind, phase) of the collectives of a step; those of the loss apart."""
        calls = step_calls(self.program)
        return Counter((c.kind, c.phase) for c in calls if c.phase != "loss")

    def use(self, name: str) -> Placement:
        """How a parameter with one use is placed in it."""
        (parameter,) = (p for p in self.program.parameters if p.name == name)
        (use,) = parameter.uses
        return use.local.spec.placements[TENSOR]

    def check_runs(self) -> None:
        """The calls counted are the calls made; in float64, also right."""
        (name,) = (info.path for info in self.analysis.program.inputs.values())
        step = thread_step(self.analysis, self.cost, self.strategy, {name: self.x}, seed=0)
        assert Counter(step.calls) == Counter(step.foretold)
        assert step.wrong == {}


def plan(model: nn.Module, x: Tensor, precision: str, *forbid: str) -> Planned:
    analysis = Analysis.of(capture(model, (x,), precision=precision))
    cost = CostModel(MESH, DTYPES[precision])
    chosen = choose(
        analysis, PlacementRequest(cost, 1, Constraints(NO_ZERO | set(forbid))), "adamw", None
    )
    program = lower(analysis, chosen.strategy, cost)
    return Planned(analysis, cost, chosen.strategy, program, x.double())


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("loss", LOSSES)
def test_wide_layers_alternate_column_and_row(loss: str, precision: str) -> None:
    """Weights outweigh activations: pairs of layers meet in one sum each way."""
    planned = plan(Layers(256, LOSSES[loss]), torch.randn(8, 256), precision)
    assert planned.calls == {("all_reduce", "forward"): 3, ("all_reduce", "backward"): 2}
    weights = [planned.use(f"net.{2 * layer}.weight") for layer in range(6)]
    assert weights == [S(0), S(1)] * 3
    if precision == "fp64":
        planned.check_runs()


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("loss", LOSSES)
def test_narrow_layers_are_data_parallel(loss: str, precision: str) -> None:
    """Activations outweigh weights: one bucket of gradients."""
    planned = plan(Layers(32, LOSSES[loss]), torch.randn(256, 32), precision)
    assert planned.calls == {("all_reduce", "grad_sync"): 1}
    for parameter in planned.program.parameters:
        assert parameter.stored.spec.placements[TENSOR] == I
        assert planned.use(parameter.name) == R
    (x,) = planned.program.delivered
    assert x.local.spec.placements[TENSOR] == S(0)
    if precision == "fp64":
        planned.check_runs()


@one_in(3)
@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("by", ["view", "chunk"])
def test_bert_is_megatron(by: str, precision: str) -> None:
    """Heads and MLP columns split; two sums each way per layer, and none into the input. With
    more rows, backward would hide the sync of data parallelism."""
    model = Bert(width=128, n_heads=8, n_layers=2, by=by)
    planned = plan(model, torch.randn(2, 8, 128), precision, "sequence")
    assert planned.calls == {("all_reduce", "forward"): 4, ("all_reduce", "backward"): 3}
    for block in range(2):
        # Rows of the fused projection are (q k v, head, head_dim): factor 1 is the heads.
        assert planned.use(f"blocks.{block}.qkv.weight") == S(0, 1)
        assert planned.use(f"blocks.{block}.out.weight") == S(1)
        assert planned.use(f"blocks.{block}.up.weight") == S(0)
        assert planned.use(f"blocks.{block}.down.weight") == S(1)
    (dims,) = {p.dims for p in planned.program.parameters if p.name == "blocks.0.qkv.weight"}
    assert dims[0] == (3, 8, 16)
    if precision == "fp64":
        planned.check_runs()


def test_equal_consumers_share_one_reshard() -> None:
    """Megatron's f after a norm: q, k and v of a Llama block read one reshard."""
    analysis, cost = model_case("llama").analysis, abstract_cost((2,))
    limits = Constraints(frozenset({"sequence"}), ("tensor",), 0)
    chosen = choose(analysis, PlacementRequest(cost, 1, limits), "adamw", None)
    program = lower(analysis, chosen.strategy, cost)
    read = [m.source for m in program.moves() if m.move.name == "i_to_r"]
    assert read and len(set(read)) == len(read), "a tensor is resharded twice to one placement"
