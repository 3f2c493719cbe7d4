"""Operators without a rule: an error, or kept whole with a warning."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import MissingRuleError, OptionError
from autopar.options import Options
from autopar.rules import registry


@torch.library.custom_op("autopar_tests::scan", mutates_args=())
def scan(x: Tensor) -> Tensor:
    """A linear recurrence over rows: y_t = x_t + y_{t-1} / 2."""
    rows = [x[0]]
    for row in x[1:]:
        rows.append(row + rows[-1] / 2)
    return torch.stack(rows)


@scan.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _scan_backward(ctx: Any, grad: Tensor) -> Tensor:
    return scan(grad.flip(0)).flip(0)


scan.register_autograd(_scan_backward)


@torch.library.custom_op("autopar_tests::clear", mutates_args=("x",))
def clear(x: Tensor) -> None:
    x.zero_()


class Scanning(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(scan(self.up(x))).square().mean()


MESH, BATCH = (1, 2), {"x": torch.randn(8, 8)}
WARNING = r"autopar_tests\.scan\.default has no sharding rule and is kept whole[\s\S]*test_fallback"


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    """An operator that one test accepts is refused again in the next one."""
    yield
    registry._kept_whole.clear()


def test_an_error_by_default_also_after_it_was_accepted() -> None:
    with pytest.warns(UserWarning, match=WARNING):
        autopar.plan(Scanning(), MESH, BATCH, fallback="replicate")
    with pytest.raises(MissingRuleError, match=r"scan\.default has no sharding rule"):
        autopar.plan(Scanning(), MESH, BATCH)


def test_kept_whole_is_exact_and_the_rest_is_sharded() -> None:
    with pytest.warns(UserWarning, match=WARNING) as caught:
        report = autopar.verify(
            Scanning(), MESH, BATCH, precision="fp64", fallback="replicate",
            manual=autopar.Manual(tp=2),
        )  # fmt: skip
    report.raise_if_wrong()
    assert report.tolerance == 1e-10
    assert len([w for w in caught if "kept whole" in str(w.message)]) == 1
    data = report.plan.data
    assert data.kept_whole == ("autopar_tests.scan.default",)
    assert any("S(" in entry for entry in data.parameters.values())
    scanned = next(spec for key, spec in data.operators.items() if "scan" in key)
    assert "S(" not in scanned and "P" not in scanned


def test_a_saved_plan_remembers_what_was_accepted(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=WARNING):
        made = autopar.plan(Scanning(), MESH, BATCH, fallback="replicate")
    made.save(tmp_path / "plan.json")
    registry._kept_whole.clear()  # as in another process
    bound = autopar.Plan.load(tmp_path / "plan.json").bind(Scanning())
    assert bound.data == made.data


def test_writing_and_random_operators_are_never_kept_whole() -> None:
    for op in ("autopar_tests.clear.default", "aten.bernoulli.default"):
        with pytest.raises(MissingRuleError, match="has no sharding rule"):
            registry.keep_whole(op)


def test_the_option_is_a_word() -> None:
    assert Options.of().fallback == "error"
    with pytest.raises(OptionError, match="fallback is one of 'error', 'replicate'"):
        Options.of(fallback="replicated")
