"""What every rank is given whole is never read as a partial sum."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from autopar.passes.analysis import Analysis
from autopar.passes.intra import Constraints, intra_op_problem
from tests.helpers.captures import captured
from tests.helpers.harness import abstract_cost


class Scaled(nn.Module):
    """Operators that are linear in an input or a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.linear = nn.Parameter(torch.ones(4)), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        shifted = x * self.scale + torch.arange(4.0)
        return (self.linear(shifted) + x.sum(0)).mean()


def test_inputs_and_constants_are_whole() -> None:
    analysis = Analysis.of(captured(Scaled(), {"x": torch.ones(8, 4)}))
    problem = intra_op_problem(analysis, abstract_cost((2,)), 1, Constraints(), "adamw")
    whole = {*analysis.program.inputs, *analysis.program.constants}
    n_read = 0
    for candidates in problem.candidates:
        for chosen in map(candidates.strategies, range(len(candidates))):
            for operator in (member.operator for member in candidates.group.members):
                specs = chosen[operator.name].inputs
                for name, spec in zip(operator.inputs, specs, strict=True):
                    if name in whole:
                        assert all(p.kind != "P" for p in spec.placements), (operator.name, name)
                        n_read += 1
    assert n_read
