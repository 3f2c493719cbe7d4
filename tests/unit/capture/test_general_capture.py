"""Operators without a rule of their own: where their parts come from, and what has no parts.

That the parts have rules and equal eager is asked of every template of `tests/fuzz/programs`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.capture import capture
from autopar.errors import MissingRuleError
from autopar.program.graph import operators_of
from tests.helpers.capture_harness import Module, check, targets

aten = torch.ops.aten
Body = Callable[[Tensor, Tensor], Tensor]


class Sums(nn.Module):
    """Sum of the absolute values of all results, complex ones included."""

    def __init__(self, bodies: tuple[Body, ...]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(2)
        self.p = nn.Parameter(torch.randn(4, 8, generator=generator, dtype=torch.float64))
        self.bodies = bodies

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([body(self.p, x).abs().sum() for body in self.bodies]).sum()


@pytest.fixture
def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {"x": torch.randn(4, 8, generator=generator, dtype=torch.float64)}


def test_parts_keep_the_line_and_the_module_of_the_user(batch: dict[str, Tensor]) -> None:
    program = capture(Sums((lambda p, x: torch.kron(p, x),)), batch)
    assert {line.rpartition(":")[0] for line in program.sources.values()} == {__file__}


def test_composites_with_hidden_no_grad_parts_are_kept(batch: dict[str, Tensor]) -> None:
    """It clamps norms without gradient inside; decomposed, its gradient would differ."""
    program = capture(Sums((lambda p, x: F.cosine_similarity(x, p * 1e-9),)), batch)
    assert aten.cosine_similarity.default in targets(program)
    check(Sums((lambda p, x: F.cosine_similarity(x, p * 1e-9),)), batch)


def test_an_operator_made_of_nothing_simpler_is_missing(batch: dict[str, Tensor]) -> None:
    program = capture(Sums((lambda p, x: torch.geqrf(p)[0],)), batch)
    with pytest.raises(MissingRuleError, match=r"geqrf.*\n.*test_general_capture"):
        operators_of(program)


def test_complex_numbers_are_lifted_too(batch: dict[str, Tensor]) -> None:
    """A complex value carries gradient, and has 16 bytes per element under fp64."""
    model = Sums((lambda p, x: torch.fft.fft(p.float()).real,))
    program = capture(model.float(), batch, precision="fp64")
    transform = next(n for n in program.operators if n.target == aten._fft_r2c.default)
    assert transform.meta["val"].dtype == torch.complex128
    assert transform.name in program.has_grad


def test_sums_that_begin_with_zeros_add_nothing_to_them() -> None:
    """A partial sum of rows adds to nothing else in place."""

    def body(self: Any, x: Tensor) -> dict[str, Tensor]:
        total = torch.zeros(x.shape[1], dtype=x.dtype)
        for part in (x * self.linear.weight.sum(), x):
            total = total + part.sum(0)
        return {"loss": total.square().sum()}

    program = check(Module(body), (torch.randn(4, 8, dtype=torch.float64),))
    assert targets(program).count(torch.ops.aten.add.Tensor) == 1
