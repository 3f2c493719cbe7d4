"""On one rank a step has the bits of autograd: the loss, all gradients, all buffers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import autopar
from autopar import Manual
from autopar.manual import Recompute
from tests.helpers.nightly import one_in, sampled
from tests.parity.zoo import FAMILIES

# Grouped matmuls of torch take no float64.
NOT_IN_FLOAT64 = ("mixtral", "qwen2-moe", "deepseek-v3")
DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def worst(family: str, dtype: torch.dtype, mode: Recompute | None = None) -> float:
    """The largest error of a step of a family on one rank."""
    entry = FAMILIES[family]
    batch = {name: value_in(value, dtype) for name, value in entry.case.batch(0).items()}
    report = autopar.verify(
        entry.case.model().to(dtype), (1, 1), batch,
        precision="fp64" if dtype == torch.float64 else "model",
        manual=Manual(recompute=mode or "none"), **entry.options,
    )  # fmt: skip
    assert report.plan is not None
    (source,) = report.plan.code().values()
    assert "def backward(" in source
    return max(report.errors.values())


def value_in(value: Any, dtype: torch.dtype) -> Any:
    """A tensor of a batch in the dtype; a flag stays (CLIP's `return_loss`)."""
    is_float = isinstance(value, Tensor) and value.is_floating_point()
    return value.to(dtype) if is_float else value


CASES = [
    (family, dtype)
    for family in FAMILIES
    for dtype in DTYPES
    if not (dtype == torch.float64 and family in NOT_IN_FLOAT64)
]
# Dropout, batch norm, group norm, weights of attention, tied weights, an encoder.
BY_DAY = [
    ("gpt2-dropout", torch.bfloat16),
    ("distilbert", torch.float64),
    ("resnet", torch.float32),
    ("group-norm", torch.bfloat16),
    ("attention-weights", torch.bfloat16),
    ("tied", torch.float32),
]


@one_in(6)
@pytest.mark.parametrize(("family", "dtype"), sampled(CASES, BY_DAY))
def test_every_family(family: str, dtype: torch.dtype) -> None:
    assert worst(family, dtype) == 0.0


@pytest.mark.parametrize(
    ("family", "mode"),
    sampled(
        [(f, m) for f in ("gpt2-dropout", "t5") for m in ("full", "selective")],
        [("gpt2-dropout", "selective")],
    ),
)
def test_recomputed(family: str, mode: Recompute) -> None:
    assert worst(family, torch.float32, mode) == 0.0
