"""Tables of bags are never gathered, and complex weights are trained as in one process.

Parity of bags, spectra and all else that capture rewrites: `tests/fuzz/programs/test_templates.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from tests.helpers.nightly import nightly


def test_tables_of_bags_are_never_gathered() -> None:
    class Tables(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = nn.ModuleList(nn.EmbeddingBag(100_000, 128, mode="sum") for _ in range(3))
            self.head = nn.Linear(3 * 128, 1)

        def forward(self, ids: Tensor, y: Tensor) -> Tensor:
            bags = [table(ids[:, i]) for i, table in enumerate(self.tables)]
            return (self.head(torch.cat(bags, 1)).squeeze(1) - y).pow(2).mean()

    with torch.device("meta"):
        model = Tables()
        batch = {"ids": torch.empty(8192, 3, 4, dtype=torch.int64), "y": torch.empty(8192)}
    plan = autopar.plan(model, autopar.Mesh((1, 4), hardware="a100-80gb"), batch)
    assert all("S(" in str(plan.uses[f"tables.{i}.weight"]) for i in range(3))
    gathered = [c.size_bytes for c in plan.collectives() if c.phase == "param_gather"]
    assert max(gathered, default=0) < 100_000 * 128


class Fourier(nn.Module):
    """A layer of a Fourier neural operator: low frequencies are written into slices of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.weights = nn.ParameterList(
            torch.randn(4, 4, 2, 2, dtype=torch.complex128) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        spectrum = torch.fft.rfftn(h, dim=(-2, -1))
        out = torch.zeros_like(spectrum)
        low, high = slice(2), slice(-2, None)
        for weight, rows in zip(self.weights, (low, high), strict=True):
            part: Any = (..., rows, low)
            out[part] = torch.einsum("bi...,io...->bo...", spectrum[part], weight)
        return (torch.fft.irfftn(out, h.shape[-2:], (-2, -1)) + h).pow(2).sum()


def complex_training() -> tuple[list[float], list[float], float]:
    """Norms and weights after three steps of a model with complex weights, sharded and alone."""
    torch.manual_seed(0)
    model, alone = Fourier().double(), Fourier().double()
    alone.load_state_dict(model.state_dict())
    batch: dict[str, Any] = {"x": torch.randn(4, 4, 6, 8, dtype=torch.float64)}
    pm = autopar.parallelize(model, (1, 2), batch, manual=autopar.Manual(dp=2, zero=3))
    optimizers = [torch.optim.AdamW(m.parameters()) for m in (pm, alone)]
    norms: list[float] = []
    expected: list[float] = []
    for _ in range(3):
        pm.step(**batch)
        alone(**batch).backward()
        norms.append(pm.clip_grad_norm_(0.1).item())
        expected.append(nn.utils.clip_grad_norm_(alone.parameters(), 0.1).item())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    whole = pm.full_state_dict()
    off = [(whole[n] - p).abs().max().item() for n, p in alone.named_parameters() if whole]
    return norms, expected, max(off, default=0.0)


@nightly
def test_parity_of_complex_weights() -> None:
    for norms, expected, off in autopar.launch(complex_training, 2):
        assert norms == pytest.approx(expected, rel=1e-10)
        assert off < 1e-10
