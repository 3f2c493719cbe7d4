"""Memory of sharded experts: live bytes of real steps against predictions."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch
from torch import Tensor, nn

from autopar.capture import capture
from autopar.cost.laws import CostModel
from autopar.cost.price import peak_of_stage
from autopar.passes.analysis import Analysis
from autopar.passes.intra import Constraints, PlacementRequest, Role, choose
from autopar.passes.lowering import PlacedStage, join
from tests.helpers.harness import abstract_cost, generated_code
from tests.helpers.nightly import nightly
from tests.helpers.pools import Pool
from tests.helpers.whole_steps import WholeStep, bytes_of_each

__all__ = ["generated_code"]

N_ROWS, WIDTH, INNER, N_EXPERTS = 512, 64, 96, 4


class Mixture(nn.Module):
    """An embedding, a mixture and a layer; all experts have equally many rows of every rank. Gate
    and up are parts of one matrix, or have one each: "gated"."""

    def __init__(self, n_parts: int, name: str) -> None:
        super().__init__()
        self.first = nn.Embedding(8, WIDTH)
        n_into = n_parts if name == "gated_mlp" else 1
        self.w_in = nn.ParameterList(
            torch.randn(N_EXPERTS, n_parts // n_into * INNER, WIDTH) / 8 for _ in range(n_into)
        )
        self.w_out = nn.Parameter(torch.randn(N_EXPERTS, WIDTH, INNER) / 8)
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, tokens: Tensor, ids: Tensor) -> Tensor:
        rows = self.first(tokens)
        hidden = [torch.bmm(w[ids], rows.unsqueeze(-1)).squeeze(-1) for w in self.w_in]
        if len(hidden) == 1 and hidden[0].shape[1] > INNER:
            hidden = [hidden[0][:, :INNER], hidden[0][:, INNER:]]
        features = torch.nn.functional.silu(hidden[0])
        if len(hidden) > 1:
            features = features * hidden[1]
        rows = torch.bmm(self.w_out[ids], features.unsqueeze(-1)).squeeze(-1)
        return self.last(rows).pow(2).mean()


def batch() -> dict[str, Tensor]:
    rows = torch.arange(N_ROWS)
    return {"tokens": rows % 7, "ids": rows % N_EXPERTS}


@lru_cache
def analysed(n_parts: int, name: str) -> Analysis:
    torch.manual_seed(0)
    return Analysis.of(capture(Mixture(n_parts, name), batch()))


def step(n_parts: int, name: str, role: Role, way: str) -> tuple[WholeStep, float]:
    """A step on two ranks that divide the experts, and its predicted peak."""
    analysis = analysed(n_parts, name)
    cost = CostModel(abstract_cost((2,)).mesh, torch.float32)
    limits = Constraints(frozenset({"sequence"}), (role,), 0, expert_axes=frozenset({0}))
    request = PlacementRequest(cost, 1, limits)
    strategy = choose(analysis, request, "adamw", None).strategy
    pipeline = join([PlacedStage(analysis, strategy, cost)], "1f1b")
    functions = {getattr(line, "lowered", None) for line in pipeline.stages[0].body}
    assert f"expert_{way}_{name}" in functions
    return WholeStep.of(analysis.program, pipeline, batch()), peak_of_stage(pipeline, 0, "adamw")


@nightly
@pytest.mark.parametrize(("n_parts", "name"), [(1, "mlp"), (2, "mlp"), (2, "gated_mlp")])
def test_peaks_of_two_processes(workers: Pool, n_parts: int, name: str) -> None:
    """Rows are exchanged, or every rank has all of them."""
    cases = (
        step(n_parts, name, "data", "exchange"),
        step(n_parts, name, "tensor", "parallel"),
    )
    steps, expected = zip(*cases, strict=True)
    for sizes in workers(2).run(bytes_of_each, list(steps)):
        for (measured, _), predicted in zip(sizes, expected, strict=True):
            assert predicted == pytest.approx(measured, rel=0.03)
